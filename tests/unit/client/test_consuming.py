"""The consumer against a scripted stream: when positions are stored, what it does about losses, and how it ends."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

from natslog.client import ClientOptions, Fetched, NatslogClient, confirming
from natslog.client.checkpoints import Checkpoints
from natslog.errors import (
    BrokerUnavailable,
    CursorNotFound,
    DataLoss,
    Forbidden,
    InvalidRequest,
    NatslogError,
    OffsetOutOfRange,
    StreamNotFound,
    StreamRecreated,
)
from tests.harness import eventually

PART = 10


class Scripted(NatslogClient):
    """A stream of offsets `[log_start, high_watermark)`, ten in a part, and one cursor."""

    def __init__(self, high_watermark: int = 30, log_start: int = 0) -> None:
        super().__init__("http://127.0.0.1:1", ClientOptions(retry_interval_s=0.001))
        self.high_watermark, self.log_start, self.id = high_watermark, log_start, "first"
        self.exists = True
        self.stored: int | None = None
        self.writes: list[int] = []
        self.failures: list[NatslogError] = []
        self.cursor_failures: list[NatslogError] = []
        self.asked: list[dict[str, Any]] = []
        self.matches: Callable[[int], bool] = lambda offset: True
        self.news = threading.Event()

    def position(self, name: str) -> dict[str, Any]:
        if not self.exists:
            raise StreamNotFound("there is no stream")
        return {"id": self.id, "log_start_offset": self.log_start, "high_watermark": self.high_watermark}

    newest_position = position

    def offset_at(self, name: str, timestamp: str | int) -> tuple[int, str | None]:
        return {"2026-01-02T00:00:00+00:00": 7}[str(timestamp)], None

    def cursor(self, consumer: str, stream: str) -> dict[str, Any]:
        if self.stored is None:
            raise CursorNotFound("no cursor")
        return {"id": self.id, "offset": self.stored}

    def set_cursor(self, consumer: str, stream: str, offset: int, *, expected_id: str | None = None) -> dict[str, Any]:
        if self.cursor_failures:
            raise self.cursor_failures.pop(0)
        if expected_id != self.id:
            raise StreamRecreated("another stream")
        self.stored = offset
        self.writes.append(offset)
        return {"id": self.id, "offset": offset}

    def fetch(self, name: str, start: int, end: int | None = None, **asked: Any) -> Fetched:
        self.asked.append({"start": start, "end": end} | asked)
        if self.failures:
            raise self.failures.pop(0)
        if asked["expected_id"] != self.position(name)["id"]:
            raise StreamRecreated("another stream")
        if not self.log_start <= start <= self.high_watermark:
            raise OffsetOutOfRange(f"the log has offsets {self.log_start} to {self.high_watermark}")
        if start == self.high_watermark:
            self.news.wait(asked["wait_ms"] / 1000)
        upto = min(start + PART, self.high_watermark if end is None else end)
        offsets = [offset for offset in range(start, upto) if self.matches(offset)]
        batches = [pa.RecordBatch.from_pydict({"offset": [offset]}) for offset in offsets]
        return Fetched(batches, upto, self.high_watermark, self.log_start, self.id)


@pytest.fixture(autouse=True)
def losses_are_confirmed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confirming, "PERSISTS_S", 0.0)
    monkeypatch.setattr(confirming, "_AGAIN_AFTER_S", 0.001)


def ranges(consumer: Any) -> list[tuple[int, int]]:
    return [(batch.start_offset, batch.next_offset) for batch in consumer]


# ---- positions ----


def test_new_consumer_starts_at_the_log_start_and_stores_where_it_ended() -> None:
    client = Scripted(log_start=5, high_watermark=28)
    batches = list(client.consume("s", cursor="c", follow=False))
    assert [(one.start_offset, one.next_offset, one.high_watermark) for one in batches] == [
        (5, 15, 28),
        (15, 25, 28),
        (25, 28, 28),
    ]
    assert [offset for one in batches for offset in one.record_batch["offset"].to_pylist()] == list(range(5, 28))
    assert [one.num_rows for one in batches] == [10, 10, 3]
    assert client.writes == [5, 28], "the position of a new cursor at once, and the end"
    assert all(one["expected_id"] == "first" for one in client.asked)


def test_a_stream_that_answers_long_polls_at_once_is_not_asked_without_a_pause() -> None:
    """As a leader does that is stopping."""
    client = Scripted(high_watermark=0)
    client.options = ClientOptions(retry_interval_s=0.05)
    client.news.set()
    consumer = client.consume("s")
    threading.Timer(0.5, consumer.close).start()
    assert list(consumer) == []
    assert 2 <= len(client.asked) <= 12


def test_consumer_resumes_at_its_cursor_whatever_start_says() -> None:
    client = Scripted()
    client.stored = 12
    assert ranges(client.consume("s", cursor="c", start="latest", follow=False)) == [(12, 22), (22, 30)]


@pytest.mark.parametrize(
    ("start", "first"),
    [
        ("earliest", 3),
        ("latest", 30),
        (20, 20),
        (datetime(2026, 1, 2, tzinfo=UTC), 7),
        ("2026-01-02T00:00:00+00:00", 7),
    ],
)
def test_start_without_a_cursor(start: Any, first: int) -> None:
    client = Scripted(log_start=3)
    assert client.consume("s", cursor="c", start=start, follow=False).position == first
    assert client.stored == first, "a consumer that fails now does not start elsewhere the next time"


def test_consumer_without_cursor_stores_nothing() -> None:
    client = Scripted()
    consumer = client.consume("s", follow=False)
    assert ranges(consumer)[-1] == (20, 30)
    assert client.stored is None
    with pytest.raises(InvalidRequest, match="give it a cursor"):
        consumer.checkpoint()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start": -1}, "start -1"),
        ({"start": True}, "start True must be 'earliest'"),
        ({"start": None}, "start None must be"),
        ({"checkpoint": "by hand"}, "checkpoint 'by hand' must be 'auto' or 'manual'"),
        ({"checkpoint": "manual"}, "requires a cursor"),
        ({"on_data_loss": "ignore"}, "on_data_loss 'ignore' must be"),
        ({"checkpoint_every": 0}, "checkpoint_every 0"),
        ({"checkpoint_interval_s": -1}, "checkpoint_interval_s -1"),
        ({"max_bytes": 0}, "max_bytes 0"),
        ({"wait_ms": 0}, "wait_ms 0"),
        ({"patience_s": float("nan")}, "patience_s nan"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        Scripted().consume("s", **options)


# ---- checkpoints ----


def test_batch_counts_as_processed_when_the_next_one_is_requested() -> None:
    client = Scripted()
    consumer = client.consume("s", cursor="c", checkpoint_every=1)
    next(consumer)
    assert client.stored == 0
    next(consumer)
    assert client.stored == 10


def test_checkpoint_by_count_of_messages() -> None:
    client = Scripted(high_watermark=60)
    with client.consume("s", cursor="c", checkpoint_every=15, checkpoint_interval_s=None, follow=False) as consumer:
        ranges(consumer)
    assert client.writes == [0, 20, 40, 60]


def test_checkpoint_by_time_also_while_there_are_no_messages() -> None:
    client = Scripted(high_watermark=10)
    consumer = client.consume("s", cursor="c", checkpoint_interval_s=0.05)
    next(consumer)
    waiting = threading.Thread(target=ranges, args=(consumer,))
    waiting.start()
    eventually(lambda: client.stored == 10, 30, "stored during the long poll")
    assert waiting.is_alive()
    consumer.close()
    waiting.join(5)


def test_checkpoint_is_not_due_before_its_time() -> None:
    client, now = Scripted(), [0.0]
    checkpoints = Checkpoints(client, "c", "s", every_rows=None, interval_s=5.0, clock=lambda: now[0])
    checkpoints.store_if_due(10, "first")
    assert client.writes == []
    now[0] = 5.0
    checkpoints.store_if_due(10, "first")
    now[0] = 9.9
    checkpoints.store_if_due(20, "first")
    assert client.writes == [10]


def test_checkpoints_by_hand_only() -> None:
    client = Scripted(high_watermark=60)
    with client.consume(
        "s", cursor="c", checkpoint="manual", checkpoint_every=1, checkpoint_interval_s=0, follow=False
    ) as consumer:
        first, second = next(consumer), next(consumer)
        assert client.writes == [0]
        first.checkpoint()
        assert client.writes == [0, 10]
        consumer.checkpoint()
        first.checkpoint()
        second.checkpoint()
        assert client.writes == [0, 10, 20], "the batch in hand too, and never back"
        next(consumer).checkpoint()
        ranges(consumer)
    assert client.writes == [0, 10, 20, 30], "not at the end"


def test_exception_in_the_loop_leaves_the_batch_in_hand_unprocessed() -> None:
    client = Scripted()

    def work() -> None:
        with client.consume("s", cursor="c") as consumer:
            for batch in consumer:
                if batch.start_offset == 10:
                    raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    assert client.stored == 10
    assert ranges(client.consume("s", cursor="c", follow=False)) == [(10, 20), (20, 30)]


def test_loop_that_is_left_without_exception_has_processed_its_last_batch() -> None:
    client = Scripted()
    with client.consume("s", cursor="c") as consumer:
        for batch in consumer:
            if batch.start_offset == 10:
                break
    assert client.stored == 20


def test_close_without_context_stores_what_is_processed_for_sure() -> None:
    client = Scripted()
    consumer = client.consume("s", cursor="c")
    next(consumer), next(consumer)
    consumer.close()
    consumer.close()
    assert client.stored == 10
    assert list(consumer) == []
    assert client.stored == 20, "the loop requested another batch"


def test_cursor_that_cannot_be_set_for_a_while_does_not_stop_the_consumer(caplog: pytest.LogCaptureFixture) -> None:
    client = Scripted()
    consumer = client.consume("s", cursor="c", checkpoint_every=1, follow=False)
    client.cursor_failures = [BrokerUnavailable("no majority")]
    with caplog.at_level(logging.WARNING, "natslog.client"):
        assert ranges(consumer)[-1] == (20, 30)
    assert "cursor c on stream s was not set to 10" in caplog.text
    assert client.writes == [0, 30], "repeated later, at the end here"


def test_cursor_that_may_not_be_set_stops_the_consumer() -> None:
    client = Scripted()
    consumer = client.consume("s", cursor="c", checkpoint_every=1)
    client.cursor_failures = [Forbidden("no rule permits it")]
    next(consumer)
    with pytest.raises(Forbidden):
        next(consumer)


def test_failed_last_checkpoint_is_an_error_unless_there_is_one_already(caplog: pytest.LogCaptureFixture) -> None:
    client = Scripted()

    def work(error: BaseException | None) -> None:
        with client.consume("s", cursor="c") as consumer:
            next(consumer), next(consumer)
            client.cursor_failures = [Forbidden("no rule permits it")]
            if error is not None:
                raise error

    with pytest.raises(Forbidden):
        work(None)
    for error in (ZeroDivisionError(), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            work(error)
    assert "was not set to 10" in caplog.text


@pytest.mark.parametrize(("moved_to", "shown"), [(25, "set to 25"), (3, "set to 3"), (None, "deleted")])
def test_cursor_that_another_program_moved_is_logged(
    moved_to: int | None, shown: str, caplog: pytest.LogCaptureFixture
) -> None:
    client = Scripted()
    consumer = client.consume("s", cursor="c", checkpoint_every=1)
    next(consumer), next(consumer)
    assert "another program" not in caplog.text
    client.stored = moved_to
    next(consumer)
    assert f"{shown} by another program" in caplog.text
    assert client.stored == 20, "the last write is the one that is kept"


def test_write_whose_answer_was_lost_is_no_other_program(caplog: pytest.LogCaptureFixture) -> None:
    client, now = Scripted(), [0.0]
    checkpoints = Checkpoints(client, "c", "s", every_rows=1, interval_s=None, clock=lambda: now[0])
    checkpoints.store(0, "first")
    checkpoints.note(10)
    client.cursor_failures = [BrokerUnavailable("the connection was closed")]
    checkpoints.store_if_due(10, "first")
    client.stored, now[0] = 10, 100.0
    checkpoints.store_if_due(20, "first")
    assert client.stored == 20
    assert "another program" not in caplog.text


# ---- following ----


def test_filter_without_matches_moves_the_cursor_on() -> None:
    client = Scripted(high_watermark=50)
    client.matches = lambda offset: offset == 33
    assert ranges(client.consume("s", cursor="c", follow=False, subject="a.*", columns=["offset"])) == [(30, 40)]
    assert client.stored == 50
    assert {(one["subject"], tuple(one["columns"])) for one in client.asked} == {("a.*", ("offset",))}


def test_at_most_one_part_is_requested_ahead() -> None:
    client = Scripted(high_watermark=1000)
    consumer = client.consume("s", max_bytes=4096)
    next(consumer)
    eventually(lambda: len(client.asked) == 2)
    time.sleep(0.05)  # for a third request, which must not be sent
    assert [one["start"] for one in client.asked] == [0, 10]
    assert {(one["max_bytes"], one["max_decoded_bytes"]) for one in client.asked} == {(4096, 4096)}


def test_close_ends_a_wait_in_another_thread() -> None:
    client = Scripted(high_watermark=10)
    consumer = client.consume("s", cursor="c", wait_ms=60_000)
    seen: list[tuple[int, int]] = []
    waiting = threading.Thread(target=lambda: seen.extend(ranges(consumer)))
    waiting.start()
    eventually(lambda: len(client.asked) == 2, 30, "the long poll")
    consumer.close()
    waiting.join(2.0)
    assert not waiting.is_alive()
    assert (seen, client.stored) == ([(0, 10)], 10)


def test_outage_is_retried_at_the_same_position() -> None:
    client = Scripted()
    client.failures = [BrokerUnavailable("no broker answered") for _ in range(5)]
    assert ranges(client.consume("s", follow=False)) == [(0, 10), (10, 20), (20, 30)]


def test_outage_that_lasts_is_an_error_and_the_position_remains() -> None:
    client = Scripted()
    consumer = client.consume("s", patience_s=0)
    next(consumer)
    next(consumer)
    client.failures = [BrokerUnavailable("no broker answered") for _ in range(2)]
    assert next(consumer).start_offset == 20, "was requested ahead"
    with pytest.raises(BrokerUnavailable):
        next(consumer)
    client.failures, client.high_watermark = [], 40
    client.news.set()
    assert next(consumer).start_offset == 30


# ---- losses ----


def test_retention_that_overtook_the_cursor_is_an_error_that_names_range_and_remedy() -> None:
    client = Scripted(log_start=20)
    client.stored = 5
    with pytest.raises(DataLoss, match="offsets 5 to 19 are lost.*on_data_loss='skip'.*--max-age") as failed:
        next(client.consume("s", cursor="c"))
    assert (failed.value.facts["start"], failed.value.facts["end"]) == (5, 20)
    assert client.stored == 5


def test_loss_that_is_accepted_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    client = Scripted(log_start=20)
    client.stored = 5
    assert ranges(client.consume("s", cursor="c", follow=False, on_data_loss="skip")) == [(20, 30)]
    assert "offsets 5 to 19 are lost" in caplog.text
    assert client.stored == 30


@pytest.mark.parametrize("follow", [False, True])
def test_cursor_beyond_the_end_is_an_error_whatever_is_accepted(follow: bool) -> None:
    client = Scripted()
    client.stored = 31
    with pytest.raises(OffsetOutOfRange, match="has offsets 0 to 29.*natslog cursor set c s latest"):
        next(client.consume("s", cursor="c", follow=follow, on_data_loss="skip"))
    assert client.stored == 31


def test_start_that_the_log_does_not_have_is_not_stored() -> None:
    client = Scripted(log_start=10)
    for start in (5, 31):
        with pytest.raises(OffsetOutOfRange, match="has offsets 10 to"):
            next(client.consume("s", cursor="c", start=start))
    assert client.stored is None


def test_retention_between_start_and_first_answer_is_no_loss() -> None:
    client = Scripted()
    client.failures = [OffsetOutOfRange("the log has offsets 10 to 30")]
    consumer = client.consume("s", follow=False)
    client.log_start = 10
    assert ranges(consumer) == [(10, 20), (20, 30)]


def test_range_that_an_outdated_leader_refuses_is_requested_again_in_bounds() -> None:
    client = Scripted()
    client.failures = [OffsetOutOfRange("the log has offsets 0 to 0")] * 3
    assert ranges(client.consume("s", follow=False))[0] == (0, 10)
    client.failures = [OffsetOutOfRange("the log has offsets 0 to 0")] * 1000
    with pytest.raises(OffsetOutOfRange):
        next(client.consume("s"))
    assert len(client.failures) > 900


def recreate(client: Scripted) -> None:
    client.id, client.stored, client.high_watermark = "second", None, 8


def test_stream_that_was_created_again_is_detected() -> None:
    client = Scripted()
    consumer = client.consume("s", cursor="c")
    next(consumer)
    eventually(lambda: len(client.asked) == 2)
    recreate(client)
    assert next(consumer).start_offset == 10, "was requested ahead"
    with pytest.raises(StreamRecreated, match="from offset 20 on are lost.*on_data_loss='skip'"):
        next(consumer)
    assert client.stored is None


def test_stream_that_was_created_again_is_consumed_from_its_start_if_that_is_accepted() -> None:
    client = Scripted()
    with client.consume("s", cursor="c", checkpoint_every=1, on_data_loss="skip") as consumer:
        next(consumer), next(consumer)
        assert client.stored == 10
        eventually(lambda: len(client.asked) == 3)
        recreate(client)
        seen = [(batch.start_offset, batch.stream_id) for batch in (next(consumer), next(consumer))]
    assert seen == [(20, "first"), (0, "second")]
    assert client.stored == 8, "below the position in the old stream"


def test_deleted_stream_is_an_error_also_if_losses_are_accepted() -> None:
    client = Scripted(high_watermark=10)
    consumer = client.consume("s", on_data_loss="skip", wait_ms=1)
    next(consumer)
    client.exists = False
    with pytest.raises(StreamNotFound, match="was deleted while it was consumed, at offset 10"):
        next(consumer)
