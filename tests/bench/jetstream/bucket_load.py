"""A key-value bucket as clients use it: puts with acks, gets by direct requests; many in flight, or one at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from natslog.wire.frames import Frames
from natslog.wire.layout import HEADER_LEN, PAYLOAD, PAYLOAD_LEN
from tests.bench.jetstream.connection import Api, Connection, headers_of, payload_of, wait
from tests.bench.raw_nats import payload
from tests.bench.sides import SUBJECT

BUCKET_STREAM = "KV_bench"
KEYS = 10_000
_VALUE_BYTES = 128
_WARM_SINGLES = 100
_SENDS_FOR_S = 10.0
_ANSWERED_WITHIN_S = 40.0
_SUBJECTS = [f"$KV.bench.k{number:05}" for number in range(KEYS)]

Check = Callable[[Frames], None]
Requests = tuple[memoryview, int, Check]
"""Frames of equal length one after another, that length, and what every answer must be."""


def bucket_config() -> dict[str, object]:
    """Of the stream of a bucket with one value for each key, as clients create it."""
    return {
        "name": BUCKET_STREAM,
        "subjects": ["$KV.bench.>"],
        "storage": "file",
        "num_replicas": 1,
        "max_msgs_per_subject": 1,
        "discard": "new",
        "allow_rollup_hdrs": True,
        "allow_direct": True,
        "deny_delete": True,
    }


def check_puts(frames: Frames) -> None:
    """Each answer begins with `{"stream"`: it is no refusal, and no status."""
    rows = frames.rows
    bad = (rows[:, HEADER_LEN] > 0) | (frames.buffer[rows[:, PAYLOAD] + 2] != ord("s"))
    assert not bad.any(), f"a put failed: {_text(frames, bad)!r}"


def check_gets(frames: Frames) -> None:
    """Each answer has a value."""
    bad = frames.rows[:, PAYLOAD_LEN] != _VALUE_BYTES
    assert not bad.any(), f"a get failed: {_text(frames, bad)!r}"


def _text(frames: Frames, bad: npt.NDArray[np.bool_]) -> bytes:
    at = int(bad.argmax())
    return headers_of(frames, at) + payload_of(frames, at)


def _frames(subjects: list[str], reply: str, body: bytes) -> tuple[memoryview, int]:
    each = [b"PUB %s %s %d\r\n%s\r\n" % (subject.encode(), reply.encode(), len(body), body) for subject in subjects]
    assert len(set(map(len, each))) == 1, "frames have the same length"
    return memoryview(b"".join(each)), len(each[0])


def put_requests(reply: str) -> Requests:
    return *_frames(_SUBJECTS, reply, payload(_VALUE_BYTES)), check_puts


def get_requests(reply: str) -> Requests:
    calls = [f"$JS.API.DIRECT.GET.{BUCKET_STREAM}.{subject}" for subject in _SUBJECTS]
    return *_frames(calls, reply, b""), check_gets


def requests_to_subscriber(reply: str) -> Requests:
    """To the one of `answering`."""
    return *_frames([SUBJECT], reply, b""), check_gets


class Bucket:
    """The bucket exists and is empty."""

    def __init__(self, port: int) -> None:
        self._api = Api(port)
        self._connection = Connection(port)
        reply = f"{self._connection.inbox}.r"
        self._connection.subscribe(reply)
        self._put, self._get = put_requests(reply), get_requests(reply)
        self._puts = 0

    def put(self, count: int, window: int) -> int:
        """Returns how many puts are acked."""
        done = exchange(self._connection, self._put, count, window)
        self._puts += done
        return done

    def get(self, count: int, window: int) -> int:
        """Returns how many gets are answered."""
        return exchange(self._connection, self._get, count, window)

    def verify(self) -> None:
        """Every key has a value, and every put is stored."""
        state = self._api.request(f"STREAM.INFO.{BUCKET_STREAM}")["state"]
        found = (state["messages"], state["last_seq"])
        assert found == (KEYS, self._puts), f"{found} keys and puts are stored of {KEYS}, {self._puts}"


def exchange(connection: Connection, requests: Requests, count: int, window: int) -> int:
    """Keeps `window` requests unanswered until `count` are sent, or for 10 s; the frames are used in a circle.

    Returns:
        How many were sent, and answered.
    """
    data, each, check = requests
    frames_in_all = len(data) // each
    sent = answered = 0
    started = time.monotonic()
    while answered < count:
        if time.monotonic() > started + _SENDS_FOR_S:
            count = sent
        while (room := min(window + answered, count) - sent) > 0:
            at = sent % frames_in_all
            number = min(room, frames_in_all - at)
            connection.send(data[at * each : (at + number) * each])
            sent += number
        wait([connection], 0.1)
        for frames in connection.received():
            check(frames)
            answered += len(frames.rows)
        assert time.monotonic() < started + _ANSWERED_WITHIN_S, f"{answered} of {sent} requests were answered"
    assert answered == sent, f"{answered} answers to {sent} requests"
    return sent


def single_latencies(port: int, kinds: Mapping[str, Callable[[str], Requests]], count: int) -> dict[str, float]:
    """p50 and p99 in µs of requests that are sent one after the other, by kind."""
    found: dict[str, float] = {}
    for name, requests_of in kinds.items():
        connection = Connection(port)
        reply = f"{connection.inbox}.r"
        connection.subscribe(reply)
        data, each, check = requests_of(reply)
        frames_in_all, times = len(data) // each, []
        for number in range(_WARM_SINGLES + count):
            at = number % frames_in_all * each
            started = time.perf_counter()
            exchange(connection, (data[at : at + each], each, check), 1, 1)
            times.append((time.perf_counter() - started) * 1e6)
        p50, p99 = np.percentile(times[_WARM_SINGLES:], [50, 99])
        found |= {f"{name}_p50_us": float(p50), f"{name}_p99_us": float(p99)}
    return found
