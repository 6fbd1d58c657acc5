"""The load of `make bench ARGS="--only jetstream"`: what it sends for received frames, and what fails a run."""

from __future__ import annotations

import pytest

from natslog.wire.frames import FrameParser, Frames
from tests.bench.jetstream.bucket_load import check_gets, check_puts, get_requests, put_requests
from tests.bench.jetstream.connection import acks_of, stream_sequence
from tests.bench.jetstream.consumer_load import answers_to_statuses, check_has_no_status, status_rows


def _message(payload: bytes, *, reply: str = "", headers: bytes = b"") -> bytes:
    to = f" {reply}" if reply else ""
    if headers:
        return (
            b"HMSG in 1%s %d %d\r\n" % (to.encode(), len(headers), len(headers + payload)) + headers + payload + b"\r\n"
        )
    return b"MSG in 1%s %d\r\n%s\r\n" % (to.encode(), len(payload), payload)


def _frames(*messages: bytes) -> Frames:
    parser = FrameParser()
    parser.receive_data(b"".join(messages))
    (frames,) = parser.frames()
    return frames


def test_ack_goes_to_the_reply_subject_of_each_message_in_order() -> None:
    replies = [f"$JS.ACK.S.C.1.{number}.{number}.1700000000000000000.{100 - number}" for number in (9, 10, 11)]
    frames = _frames(*(_message(b"x" * length, reply=reply) for length, reply in enumerate(replies)))
    assert acks_of(frames).tobytes().decode() == "".join(f"PUB {reply} 4\r\n+ACK\r\n" for reply in replies)
    assert [stream_sequence(frames, at) for at in range(3)] == [9, 10, 11]


def test_flow_control_and_stalled_heartbeats_are_answered_and_other_heartbeats_are_not() -> None:
    frames = _frames(
        _message(b"", reply="$JS.FC.S.C.1", headers=b"NATS/1.0 100 FlowControl Request\r\n\r\n"),
        _message(b"", headers=b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Consumer: 7\r\nNats-Last-Stream: 7\r\n\r\n"),
        _message(b"", headers=b"NATS/1.0 100 Idle Heartbeat\r\nNats-Consumer-Stalled: $JS.FC.S.C.2\r\n\r\n"),
    )
    assert status_rows(frames).all()
    assert answers_to_statuses(frames) == b"PUB $JS.FC.S.C.1 0\r\n\r\nPUB $JS.FC.S.C.2 0\r\n\r\n"


def test_end_of_a_delivery_fails_the_run() -> None:
    frames = _frames(_message(b"x"), _message(b"", headers=b"NATS/1.0 409 Consumer Deleted\r\n\r\n"))
    with pytest.raises(AssertionError, match="409 Consumer Deleted"):
        check_has_no_status(frames)
    with pytest.raises(AssertionError, match="409 Consumer Deleted"):
        answers_to_statuses(frames.select(status_rows(frames)))


@pytest.mark.parametrize(
    "answer",
    [
        _message(b'{"error":{"code":503,"err_code":10077}}'),
        _message(b"", headers=b"NATS/1.0 503\r\n\r\n"),
    ],
)
def test_refused_put_fails_the_run(answer: bytes) -> None:
    stored = _message(b'{"stream":"KV_bench","seq":1}')
    check_puts(_frames(stored, stored))
    with pytest.raises(AssertionError, match="503"):
        check_puts(_frames(stored, answer))


def test_get_without_a_value_fails_the_run() -> None:
    found = _message(b"x" * 128, headers=b"NATS/1.0\r\nNats-Stream: KV_bench\r\n\r\n")
    check_gets(_frames(found))
    with pytest.raises(AssertionError, match="404 Message Not Found"):
        check_gets(_frames(found, _message(b"", headers=b"NATS/1.0 404 Message Not Found\r\n\r\n")))


def test_requests_for_keys_have_the_same_length_and_different_subjects() -> None:
    for requests_of in (put_requests, get_requests):
        data, each, _ = requests_of("_INBOX.r")
        parts = {bytes(data[at : at + each]) for at in range(0, len(data), each)}
        assert len(parts) == len(data) // each == 10_000
        assert all(part.startswith(b"PUB $") and part.endswith(b"\r\n") for part in parts)
