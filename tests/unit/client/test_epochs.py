"""Whose word about a stream's bounds counts: that of the newest leader epoch which was seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from natslog.client import ClientOptions, NatslogClient, asking
from natslog.client.epochs import LeaderEpochs
from natslog.errors import BrokerUnavailable, NoLeader, OffsetOutOfRange
from tests.unit.client.answering import ID, Answers, leader, serving


@pytest.fixture(autouse=True)
def _unknown_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("asking", "client", "streams"):
        monkeypatch.setattr(f"natslog.client.{module}.leader_epochs", EPOCHS, raising=False)
    monkeypatch.setattr(asking, "LEADER_WITHIN_S", 0.3)
    EPOCHS._seen.clear()


EPOCHS = LeaderEpochs()


@pytest.fixture
def serve() -> Iterator[Callable[[Answers], str]]:
    with serving() as start:
        yield start


def client_of(*urls: str) -> NatslogClient:
    return NatslogClient(urls, ClientOptions(retries=0, timeout_s=2, retry_interval_s=0.05))


def test_epoch_older_than_one_that_was_seen_is_outdated() -> None:
    epochs = LeaderEpochs()
    assert epochs.outdated({"id": ID, "leader_epoch": 3}) is None
    assert epochs.outdated({"id": ID, "leader_epoch": 5}) is None
    outdated = epochs.outdated({"id": ID, "leader_epoch": 4})
    assert outdated is not None
    assert outdated.retriable
    assert epochs.outdated({"id": "another", "leader_epoch": 4}) is None, "of another stream nothing is known"
    assert epochs.outdated({}) is None, "a broker that does not say it is not refused"
    assert epochs.highest(ID) == 5


def test_epoch_that_no_broker_confirms_is_forgotten() -> None:
    clock = [1000.0]
    epochs = LeaderEpochs(lambda: clock[0])
    epochs.note(ID, 5)
    clock[0] += 599
    epochs.note(ID, 5)
    clock[0] += 599
    assert not epochs.note(ID, 4)
    clock[0] += 2
    assert epochs.note(ID, 4), "the cluster was restored from a backup"


def test_bounds_of_an_older_leader_are_asked_for_elsewhere(serve: Callable[[Answers], str]) -> None:
    old, new = leader(1, 640), leader(2, 1200)
    with client_of(serve(new)) as client:
        assert client.position("orders")["high_watermark"] == 1200
    with client_of(serve(old), serve(new)) as client:
        assert client.position("orders")["high_watermark"] == 1200
        assert client.stream("orders")["high_watermark"] == 1200
        assert client.newest_position("orders")["high_watermark"] == 1200
        assert client.offset_at("orders", 0) == (1200, None)
        assert client.fetch("orders", 1200).high_watermark == 1200
        with pytest.raises(OffsetOutOfRange) as beyond:
            client.splits("orders", 0, 9999)
        assert beyond.value.facts["high_watermark"] == 1200
    assert old.asked >= 5


def test_newest_position_is_the_one_of_the_newest_epoch_of_all_brokers(serve: Callable[[Answers], str]) -> None:
    with client_of(serve(leader(1, 640)), serve(leader(2, 1200)), "http://127.0.0.1:1") as client:
        assert client.newest_position("orders")["high_watermark"] == 1200


def test_older_leader_alone_is_waited_for_and_then_no_answer(serve: Callable[[Answers], str]) -> None:
    EPOCHS.note(ID, 2)
    with client_of(serve(leader(1, 640))) as client:
        for ask in (
            lambda: client.offset_at("orders", 0),
            lambda: client.splits("orders", 0, 1200),
            lambda: client.fetch("orders", 640),
        ):
            with pytest.raises(BrokerUnavailable, match="epoch 2 of this stream was already received") as refused:
                ask()
            assert refused.value.retriable
        assert "high_watermark" not in client.streams()[0], "listed, without a position"
        assert "high_watermark" not in client.stream("orders")


def test_broker_without_a_session_is_passed_over(serve: Callable[[Answers], str]) -> None:
    problem = NoLeader("no session").to_json()["error"]
    shown = {"name": "orders", "id": ID, "leader_epoch": 1, "problem": problem}
    alone = Answers(orders=(200, shown, {}), streams=(200, [], {"Natslog-Current": "false"}))
    first = serve(alone)
    with client_of(first, serve(leader(2, 1200))) as client:
        assert client.position("orders")["high_watermark"] == 1200
        assert client.stream("orders")["high_watermark"] == 1200
        assert [one["name"] for one in client.streams(current=True)] == ["orders"]
    with client_of(first) as client:
        with pytest.raises(NoLeader, match="no session"):
            client.position("orders")
        with pytest.raises(BrokerUnavailable, match="may be outdated"):
            client.streams(current=True)
        assert client.streams() == []
