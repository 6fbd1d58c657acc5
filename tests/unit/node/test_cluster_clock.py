"""What time a broker goes by: its own clock, the others', and what outlives its process."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from natslog.node import cluster_clock
from natslog.node.cluster_clock import StreamTime
from tests.machine import Machine

HOUR_S = 3600.0


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def stream_time(broker, newest_s: float) -> StreamTime:
    return StreamTime(broker.clock, int(newest_s * 1e6), 0.0)


def ahead_s(time: StreamTime, machine: Machine) -> float:
    """Of the right time."""
    return time.now_us() / 1e6 - machine.true_s


def test_a_leader_ahead_stamps_with_the_time_of_the_others(machine: Machine, tmp_path: Path) -> None:
    machine.ahead_s = HOUR_S
    broker = machine.broker(tmp_path, 2, 3)
    time = stream_time(broker, machine.true_s - 60)
    assert ahead_s(time, machine) == pytest.approx(0, abs=0.01)
    broker.after(100)
    assert ahead_s(time, machine) == pytest.approx(0, abs=0.01)
    assert broker.clock.apart_s == pytest.approx({2: -HOUR_S, 3: -HOUR_S})
    assert time.behind_s() == pytest.approx(HOUR_S, abs=0.01)


def test_others_that_do_not_answer_leave_elapsed_time(machine: Machine, tmp_path: Path) -> None:
    broker = machine.broker(tmp_path, 2, 3)
    time = stream_time(broker, machine.true_s - 60)
    broker.others_s = {2: None, 3: None}
    broker.after(10)
    assert broker.clock.reading().agreed_us is None, "samples have expired"
    machine.ahead_s = HOUR_S
    broker.after(10_000)
    assert ahead_s(time, machine) == pytest.approx(-60, abs=0.01), "a minority's steady clock is not enough"


def test_a_sample_of_a_broker_that_is_no_member_counts_for_nothing(machine: Machine, tmp_path: Path) -> None:
    broker = machine.broker(tmp_path, 2, 3)
    broker.others_s = {2: None, 3: None, 9: 0.0}
    broker.after(10)
    broker.clock.refresh([1, 2, 3])
    assert broker.clock.reading().agreed_us is None


def test_a_process_that_starts_again_on_the_same_machine_follows_its_clock_at_once(
    machine: Machine, tmp_path: Path
) -> None:
    broker = machine.broker(tmp_path)
    broker.after(HOUR_S)
    newest_s = machine.true_s
    machine.elapsed_s += 8 * HOUR_S  # stopped for the night
    again = machine.broker(tmp_path)
    assert ahead_s(stream_time(again, newest_s), machine) == pytest.approx(0, abs=0.01)


def test_a_process_that_starts_with_a_clock_ahead_does_not_follow_it_and_remembers_that(
    machine: Machine, tmp_path: Path
) -> None:
    machine.broker(tmp_path).after(HOUR_S)
    newest_s = machine.true_s
    machine.ahead_s = HOUR_S
    for _ in range(3):
        broker = machine.broker(tmp_path)
        time = stream_time(broker, newest_s)
        broker.after(600)
        assert ahead_s(time, machine) <= 0.01
    broker.after(1900)
    assert ahead_s(time, machine) == pytest.approx(HOUR_S, abs=1), "it was steady for an hour, over all processes"


def test_a_jump_while_the_process_runs_is_stored_too(machine: Machine, tmp_path: Path) -> None:
    broker = machine.broker(tmp_path)
    broker.after(HOUR_S)
    machine.ahead_s = HOUR_S
    broker.after(3000)
    again = machine.broker(tmp_path)
    assert again.clock.reading().steady_us == pytest.approx(3000e6, abs=61e6)


def test_a_machine_that_was_started_anew_is_another(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.broker(tmp_path).after(HOUR_S)
    newest_s = machine.true_s
    monkeypatch.setattr(cluster_clock, "_boot_id", lambda: "another")
    machine.elapsed_s += 600
    again = machine.broker(tmp_path)
    time = stream_time(again, newest_s)
    assert ahead_s(time, machine) == pytest.approx(-600, abs=0.01)
    again.after(660)
    assert ahead_s(time, machine) == pytest.approx(0, abs=0.01)


@pytest.mark.parametrize("content", [b"", b"nothing of ours", b"natslog clock v1 bytes=2 crc32c=00000000\n{}"])
def test_a_file_that_cannot_be_read_counts_as_none_and_is_written_anew(
    machine: Machine, tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "clock").write_bytes(content)
    broker = machine.broker(tmp_path)
    assert broker.clock.reading().steady_us == 0
    assert (tmp_path / "clock").read_bytes() != content


def test_clocks_that_are_apart_are_named_once(
    machine: Machine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broker = machine.broker(tmp_path, 2, 3)
    with caplog.at_level(logging.WARNING, "natslog.cluster"):
        broker.others_s[2] = 45.0
        broker.after(10)
        machine.ahead_s = 3.0
        broker.after(10)
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "the clocks of broker 2 and of this broker differ by 45 s",
        "the wall clock of this machine jumped by +3.0 s",
    ]


def test_what_must_not_expire_early_is_stamped_with_the_later_clock(machine: Machine, tmp_path: Path) -> None:
    broker = machine.broker(tmp_path, 2, 3)
    for own_s, latest_s in ((-HOUR_S, 0.0), (HOUR_S, HOUR_S)):
        machine.ahead_s = own_s
        broker.tick()
        assert broker.clock.latest_us() / 1e6 - machine.true_s == pytest.approx(latest_s, abs=0.01)


def test_messages_expire_by_the_time_of_a_majority_and_not_at_once_after_a_jump_of_it(
    machine: Machine, tmp_path: Path
) -> None:
    broker = machine.broker(tmp_path, 2, 3)
    time = stream_time(broker, machine.true_s - 5)

    def late_s() -> float:
        """How far expiry is behind the right time."""
        return machine.true_s - time.expiry_us() / 1e6

    broker.after(60)
    assert late_s() == pytest.approx(0, abs=0.01)
    broker.others_s = {2: None, 3: None}
    broker.after(20)
    assert late_s() == pytest.approx(late_s(), abs=0.01)
    assert late_s() >= 15, "while no majority is known, nothing expires"
    broker.others_s = {2: HOUR_S, 3: HOUR_S}
    broker.after(10)
    assert late_s() == pytest.approx(0, abs=0.01), "at once only as far as time has passed"
    broker.after(10)
    assert late_s() == pytest.approx(-10 * HOUR_S / 300, abs=1), "a majority that jumped is followed within minutes"
    broker.others_s = {2: 0.0, 3: 0.0}
    broker.after(1)
    before_us = time.expiry_us()
    broker.after(60)
    assert time.expiry_us() == before_us, "corrected: nothing more expires before it is that time"
    broker.after(300)
    assert late_s() == pytest.approx(0, abs=0.01)


def test_after_a_start_of_a_process_messages_expire_at_once(machine: Machine, tmp_path: Path) -> None:
    machine.broker(tmp_path, 2, 3).after(HOUR_S)
    newest_s = machine.true_s - HOUR_S / 2
    again = machine.broker(tmp_path, 2, 3)
    assert stream_time(again, newest_s).expiry_us() / 1e6 == pytest.approx(machine.true_s, abs=0.01)
