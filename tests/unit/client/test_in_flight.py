"""Which messages wait for acks: against a model with sets, with lost, repeated and foreign acks."""

from __future__ import annotations

import time

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from natslog.client.in_flight import InFlight
from natslog.ingest import acks
from natslog.ingest.columns import Texts
from natslog.wire.frames import FrameParser, Frames
from natslog.wire.outgoing import BY_REPLY
from natslog.wire.outgoing_rows import Rows

INBOX = "_INBOX.a"
STREAMS = ("orders", "copies")


def rows_of(count: int, subject: str = "s", counts: int | None = None) -> Rows:
    carried = None if counts is None else pa.array([counts] * count, pa.int64())
    return Rows(pa.array([subject] * count), pa.array([b"x"] * count), ids=pa.array(["id"] * count), counts=carried)


def answers(payloads: list[tuple[int, bytes]]) -> Frames:
    parser = FrameParser()
    for number, payload in payloads:
        parser.receive_data(b"MSG %s.~%d 1 %d\r\n%s\r\n" % (INBOX.encode(), number, len(payload), payload))
    [frames] = list(parser.frames())
    return Frames(frames.buffer.copy(), frames.rows.copy())


def ack(stream: str, rows: int = 1) -> bytes:
    return b'{"stream":"%s","seq":7,"offset":6%s}' % (stream.encode(), b',"count":%d' % rows if rows > 1 else b"")


STEPS = st.lists(
    st.one_of(
        st.integers(1, 8).map(lambda count: ("add", count)),
        st.lists(st.tuples(st.integers(0, 40), st.sampled_from([*STREAMS, "other"])), min_size=1, max_size=12).map(
            lambda acks: ("acks", acks)
        ),
    ),
    max_size=30,
)


@settings(deadline=None, max_examples=80)
@given(STEPS, st.sampled_from([(), ("orders",), STREAMS]), st.sampled_from([0, 10**11]))
def test_waiting_messages_are_those_of_a_model(
    steps: list[tuple[str, object]], streams: tuple[str, ...], first: int
) -> None:
    in_flight = InFlight(INBOX, streams, 8)
    in_flight._first = in_flight._end = first
    missing: dict[int, set[str]] = {}
    end = first
    for step, given_ in steps:
        if step == "add":
            assert isinstance(given_, int)
            has_room = in_flight.has_room_for(given_)
            waiting_from = min(missing, default=end)
            assert has_room == (
                waiting_from == end or (len(missing) + given_ <= 8 and end + given_ - waiting_from <= 16)
            )
            if has_room:
                sent = in_flight.add(rows_of(given_, counts=3), BY_REPLY)
                assert (sent.first, sent.end) == (end, end + given_)
                missing |= {number: set(streams) or {"any"} for number in range(end, end + given_)}
                end += given_
        else:
            assert isinstance(given_, list)
            expected, is_progress = [], False
            for number, stream in given_:
                left = missing.get(first + number)
                if left is None or (streams and stream not in left):
                    continue
                is_progress = True
                left.discard(stream if streams else "any")
                if not left:
                    del missing[first + number]
                    expected.append(first + number)
            acked = in_flight.take_acks(answers([(first + number, ack(stream, 3)) for number, stream in given_]))
            assert acked.sequences.tolist() == expected
            assert (acked.rows, acked.is_progress, acked.refusal) == (3 * len(expected), is_progress, None)
        assert (in_flight.messages, in_flight.rows) == (len(missing), 3 * len(missing))
        assert in_flight.is_empty() == (not missing)
        late = {sent.first + row for sent, rows in in_flight.late(time.monotonic() + 1) for row in rows.tolist()}
        assert late == set(missing)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 25), st.booleans(), st.booleans(), st.sampled_from(["a", "b"])), max_size=25),
    st.integers(0, 3),
)
def test_acks_of_consecutive_messages_together_are_for_the_same_messages(
    rows_: list[tuple[int, bool, bool, str]], spare: int
) -> None:
    """From the kernel that writes acks to the one that reads them, for messages of two publishers."""
    replies = [f"_INBOX.{publisher}.~{number}".encode() for number, _, _, publisher in rows_]
    protocol = acks.stored(
        Texts.of([b"" if is_silent else reply for reply, (_, is_silent, _, _) in zip(replies, rows_, strict=True)]),
        np.arange(100, 100 + len(rows_)),
        stream="orders",
        epoch=1,
        duplicate=np.array([is_duplicate for _, _, is_duplicate, _ in rows_], np.bool_),
    )
    for publisher in "ab":
        in_flight = InFlight(f"_INBOX.{publisher}", (), 32)
        in_flight.add(rows_of(26 + spare), BY_REPLY)
        parser = FrameParser()
        for frame in bytes(protocol).split(b"PUB ")[1:]:
            if frame.startswith(f"_INBOX.{publisher}.".encode()):
                parser.receive_data(b"MSG " + frame.replace(b" ", b" 1 ", 1))
        found = [number for frames in parser.frames() for number in in_flight.take_acks(frames).sequences.tolist()]
        assert sorted(found) == sorted(
            {number for number, is_silent, _, one in rows_ if one == publisher and not is_silent}
        )


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b'{"stream":"orders"}',
        b'{"error":{"code":503,"description":"storage full"},"stream":"orders","seq":0}',
        b'{"stream":"orders","seq":0,"error":{"code":400}}',
        b"not JSON",
    ],
)
def test_answers_that_are_no_acks_are_refusals(payload: bytes) -> None:
    in_flight = InFlight(INBOX, (), 8)
    in_flight.add(rows_of(3), BY_REPLY)
    acked = in_flight.take_acks(answers([(0, ack("orders")), (1, payload), (2, b"second")]))
    assert (acked.sequences.tolist(), acked.refusal, in_flight.messages) == ([0], payload, 2)
    assert in_flight.first_waiting() == ("s", "")


@pytest.mark.parametrize(("carried", "stated"), [(3, 1), (3, 2), (3, 4)])
def test_ack_of_another_number_of_rows_is_no_ack(carried: int, stated: int) -> None:
    """A stream that does not know envelopes has stored the envelope itself."""
    in_flight = InFlight(INBOX, (), 8)
    in_flight.add(rows_of(1, counts=carried), BY_REPLY)
    acked = in_flight.take_acks(answers([(0, ack("orders", stated))]))
    assert (acked.rows, acked.is_progress, acked.refusal, acked.mismatch) == (0, False, None, ack("orders", stated))
    assert in_flight.rows == carried
    assert in_flight.take_acks(answers([(0, ack("orders", carried))])).rows == carried


def test_message_whose_value_a_stream_stores_as_rows_is_acked() -> None:
    """The caller may publish envelopes that it has made."""
    in_flight = InFlight(INBOX, (), 8)
    in_flight.add(rows_of(1), BY_REPLY)
    acked = in_flight.take_acks(answers([(0, ack("orders", 3))]))
    assert (acked.rows, acked.mismatch, in_flight.is_empty()) == (1, None, True)


def test_any_number_of_messages_in_flight_takes_little_memory() -> None:
    in_flight = InFlight(INBOX, (), 2**62)
    in_flight.add(rows_of(3), BY_REPLY)
    assert in_flight.has_room_for(1_000_000)
    assert not in_flight.has_room_for(2**20)
    in_flight.clear()
    assert in_flight.is_empty()


def test_envelope_among_messages_that_are_acked_together_is_not_acked() -> None:
    """It was stored as one message."""
    in_flight = InFlight(INBOX, (), 8)
    rows = rows_of(4)
    counts = pa.array([1, 50, 1, 1], pa.int64())
    in_flight.add(Rows(rows.subjects, rows.values, ids=rows.ids, counts=counts), BY_REPLY)
    joined = b'{"stream":"orders","seq":7,"offset":6,"messages":4}'
    acked = in_flight.take_acks(answers([(3, joined)]))
    assert (acked.sequences.tolist(), acked.rows, acked.mismatch) == ([0, 2, 3], 3, joined)
    assert (in_flight.messages, in_flight.rows) == (1, 50)


def test_acks_that_claim_more_messages_than_wait_are_for_those_that_wait() -> None:
    in_flight = InFlight(INBOX, (), 8)
    in_flight.add(rows_of(6), BY_REPLY)
    forged = b'{"stream":"orders","seq":7,"messages":999999999999999999}'
    assert in_flight.take_acks(answers([(2, forged), (2, forged), (9, forged)])).sequences.tolist() == [0, 1, 2]
    assert in_flight.messages == 3


def test_messages_without_an_id_are_not_sent_again() -> None:
    in_flight = InFlight(INBOX, (), 8)
    rows = rows_of(4)
    in_flight.add(Rows(rows.subjects, rows.values, ids=pa.array(["a", None, "b", None])), BY_REPLY)
    in_flight.add(Rows(rows.subjects, rows.values), BY_REPLY)
    later = time.monotonic() + 1
    assert [(sent.first, again.tolist()) for sent, again in in_flight.late(later)] == [(0, [0, 2])]
    assert list(in_flight.late(time.monotonic() - 60)) == []


def test_missing_stream_is_named() -> None:
    in_flight = InFlight(INBOX, STREAMS, 8)
    in_flight.add(rows_of(1, "a"), BY_REPLY)
    in_flight.add(rows_of(1, "b"), BY_REPLY)
    in_flight.take_acks(answers([(0, ack("copies")), (0, ack("orders")), (1, ack("orders"))]))
    assert in_flight.first_waiting() == ("b", "copies")


def test_acks_that_come_after_all_was_given_up_are_ignored() -> None:
    in_flight = InFlight(INBOX, (), 8)
    in_flight.add(rows_of(5), BY_REPLY)
    in_flight.clear()
    assert in_flight.is_empty()
    assert in_flight.take_acks(answers([(2, ack("orders"))])).rows == 0
    in_flight.add(rows_of(8), BY_REPLY)
    assert (in_flight.messages, in_flight.has_room_for(1)) == (8, False)
    assert in_flight.take_acks(answers([(number, ack("orders")) for number in range(13)])).rows == 8


def test_large_messages_wait_for_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("natslog.client.in_flight._MOST_BYTES", 10)
    in_flight = InFlight(INBOX, (), 8)
    in_flight.add(Rows(pa.array(["s"]), pa.array([b"x" * 11])), BY_REPLY)
    assert not in_flight.has_room_for(1)
    in_flight.take_acks(answers([(0, ack("orders"))]))
    assert in_flight.has_room_for(1)


def test_times_since_messages_were_first_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    in_flight = InFlight(INBOX, (), 16)
    for now, count in ((10.0, 4), (12.0, 3)):
        monkeypatch.setattr(time, "monotonic", lambda now=now: now)
        in_flight.add(rows_of(count, counts=2), BY_REPLY)
    acked = in_flight.take_acks(answers([(number, ack("orders", 2)) for number in (1, 2, 5)]))
    assert sorted(in_flight.waited(acked, 13.0)) == [(1.0, 2), (3.0, 4)]
