"""The soak's checkers, and a short soak with fixed faults: every kind once, then all at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.chaos.history import Published, value_of
from tests.soak.changing_job import original
from tests.soak.checkers import count, gaps

ROOT = Path(__file__).resolve().parents[2]
SEED = 48
RUN_WITHIN_S = 900


def published(acked: list[bool]) -> Published:
    one = Published(3, has_ids=True)
    one.begin(len(acked), 1, time.monotonic())
    one.acked_s = [1.0 if is_acked else None for is_acked in acked]
    return one


def test_count_tells_lost_twice_strange_and_unacked_apart() -> None:
    one = published([True, True, True, False, False])
    values = [value_of(3, number) for number in range(5)]
    assert count("x", [one], values[:3]).is_exact
    with_unacked = count("x", [one], values[:4])
    assert with_unacked.is_exact
    assert (with_unacked.acked, with_unacked.rows, with_unacked.unacked) == (3, 4, 1)
    lost = count("x", [one], [values[0], values[3]])
    assert (lost.is_exact, lost.lost, lost.named[0]) == (False, 2, "lost (3, 1)")
    for twice in (values[1], values[4]):  # also of a message that was never acked
        found = count("x", [one], [*values, twice])
        assert (found.is_exact, found.twice, found.lost) == (False, 1, 0)
    ended = count("x", [one], values[:1], up_to_an_end=True)
    assert (ended.is_exact, ended.lost, count("x", [one], [values[0]] * 2, up_to_an_end=True).twice) == (True, 0, 1)
    strange = count("x", [one], [*values, b"other"])
    assert (strange.is_exact, strange.strange) == (False, 1)


def test_original_of_a_row_of_the_changing_job() -> None:
    assert original(b"message|with|bars|0|5 in version 3") == b"message|with|bars"
    assert original(b"message|1|5 in version 3") is None


def test_gaps_names_what_is_missing_repeated_or_beyond() -> None:
    assert gaps([2, 0, 1], 3) is None
    assert gaps([0, 2, 2, 7], 3) == "1 offsets missing [1], 1 several times [2], 1 beyond 3 [7]"


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.timeout(RUN_WITHIN_S + 60)
def test_every_acked_message_is_stored_once_whatever_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.soak", "--minutes", "0", "--seed", str(SEED), "--brokers", "1"]
    done = subprocess.run(
        [*command, "--publishers", "1", "--out", str(tmp_path / "soak")],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=RUN_WITHIN_S, env=os.environ,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    found = json.loads((tmp_path / "soak" / "report.json").read_text())
    ended = {f"ended {at}" for at in range(len(found["conflicts"]))}
    assert {one["place"] for one in found["places"]} == {
        "table",
        "stream",
        "real time",
        "published",
        "appended",
    } | ended
    for place in found["places"]:
        assert place["acked"] == found["acked"] > 500
        if place["place"] not in ended:
            assert place["rows"] - place["unacked"] == place["acked"]
    assert found["faults"] == dict.fromkeys(
        [
            "kill all", "pause all", "kill nats", "pause nats", "kill driver table", "pause driver table",
            "kill driver copy", "pause driver copy", "kill driver changing", "pause driver changing",
            "redeploy changing", "set back changing", "kill driver live", "pause driver live", "kill everything",
        ],
        1,
    )  # fmt: skip
    # A set back ends a query only if it goes behind the last stored batch, which depends on the moment. What such a
    # query is told is tested in spark/test_http_sink.py.
    assert all(driver["killed_half_done"] for driver in found["drivers"]), "or nothing had to be put right"
    assert all(driver["starts"] >= 3 and driver["batches"] >= 3 for driver in found["drivers"])
