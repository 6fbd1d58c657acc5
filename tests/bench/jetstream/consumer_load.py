"""Consumers as unchanged clients use them: pull with batches and acks, push with flow control.

Both return a run that ends when the last message was received and, with acks, when `CONSUMER.INFO` confirms the last
one; it returns how many there were. What is set up before (subscriptions, the pull consumer) is not part of the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from natslog.wire.frames import Frames
from natslog.wire.layout import HEADER_LEN, PAYLOAD_LEN
from tests.bench.jetstream.connection import (
    Api,
    Connection,
    acks_of,
    headers_of,
    reply_of,
    stream_sequence,
    wait,
)
from tests.bench.sides import STREAM

CONSUMER = "bench"
FETCHES_IN_FLIGHT = 2
_EXPIRES_NS = 60_000_000_000
_HEARTBEAT_NS = 5_000_000_000
_MAX_ACK_PENDING = 10_000
_CONFIRM_EVERY_S = 0.001
_STALLED_AFTER_S = 30.0
_STALLED = b"Nats-Consumer-Stalled: "


class Deadline:
    """Fails a run that makes no progress."""

    def __init__(self, what: str) -> None:
        self._what = what
        self.progressed()

    def progressed(self) -> None:
        self._until = time.monotonic() + _STALLED_AFTER_S

    def check(self, so_far: object) -> None:
        assert time.monotonic() < self._until, f"no progress within {_STALLED_AFTER_S} s: {self._what}: {so_far}"


class Member:
    """One connection that fetches and acks."""

    def __init__(self, port: int, batch: int) -> None:
        self.connection = Connection(port)
        inbox = f"{self.connection.inbox}.fetch"
        self.connection.subscribe(inbox)
        body = f'{{"batch":{batch},"expires":{_EXPIRES_NS}}}'
        self._fetch = f"PUB $JS.API.CONSUMER.MSG.NEXT.{STREAM}.{CONSUMER} {inbox} {len(body)}\r\n{body}\r\n".encode()
        self._batch = batch
        self._requested = 0
        self.received = 0
        self.last_sequence = 0

    def fetch(self) -> None:
        """Sends fetches until so many are in flight: the server answers them in order."""
        while self._requested - self.received <= self._batch * (FETCHES_IN_FLIGHT - 1):
            self.connection.send(self._fetch)
            self._requested += self._batch

    def receive(self) -> int:
        """How many messages one read had; all of them are acked, and their place is requested again."""
        before = self.received
        for frames in self.connection.received():
            check_has_no_status(frames)
            self.connection.send(acks_of(frames))
            self.received += len(frames.rows)
            self.last_sequence = stream_sequence(frames, -1)
            self.fetch()
        return self.received - before


def pull(port: int, messages: int, batch: int, members: int) -> Callable[[], int]:
    """A durable pull consumer with explicit acks that `members` connections share; two fetches each in flight."""
    api = Api(port)
    create_consumer(api, {"ack_policy": "explicit", "max_ack_pending": _MAX_ACK_PENDING})
    fetching = [Member(port, batch) for _ in range(members)]
    connections = [member.connection for member in fetching]

    def run() -> int:
        deadline, received = Deadline("fetched messages"), 0
        for member in fetching:
            member.fetch()
        while received < messages:
            wait(connections, 0.1)
            if more := sum(member.receive() for member in fetching):
                received += more
                deadline.progressed()
            assert members > 1 or fetching[0].last_sequence == received, "messages come in order, and once"
            deadline.check(received)
        assert received == messages, f"{received} messages were delivered of {messages}"
        while any(one.has_unsent for one in connections):
            wait(connections, 0.1)
            assert not sum(member.receive() for member in fetching), "a message was delivered again"
        await_acked(api, messages)
        return received

    return run


def await_acked(api: Api, messages: int) -> None:
    """Until the consumer states that each message is acked."""
    deadline = Deadline("acks are confirmed")
    while True:
        info = api.request(f"CONSUMER.INFO.{STREAM}.{CONSUMER}")
        if info["num_ack_pending"] == 0 and info["ack_floor"]["stream_seq"] == messages:
            break
        deadline.check(info)
        time.sleep(_CONFIRM_EVERY_S)
    assert info["num_redelivered"] == 0, f"{info['num_redelivered']} messages were delivered again"


def push(port: int, messages: int) -> Callable[[], int]:
    """A durable push consumer without acks, with flow control and heartbeats; creating it belongs to the run."""
    api, connection = Api(port), Connection(port)
    subject = f"{connection.inbox}.push"
    connection.subscribe(subject)
    config = {
        "deliver_subject": subject,
        "ack_policy": "none",
        "flow_control": True,
        "idle_heartbeat": _HEARTBEAT_NS,
    }

    def run() -> int:
        deadline, received = Deadline("pushed messages"), 0
        create_consumer(api, config)
        while received < messages:
            wait([connection], 0.1)
            for frames in connection.received():
                is_status = status_rows(frames)
                if is_status.any():
                    connection.send(answers_to_statuses(frames.select(is_status)))
                    frames = frames.select(~is_status)
                received += len(frames.rows)
                assert not len(frames.rows) or stream_sequence(frames, -1) == received, "in order, and once"
                deadline.progressed()
            deadline.check(received)
        return received

    return run


def create_consumer(api: Api, config: dict[str, Any]) -> None:
    given = {"durable_name": CONSUMER, "deliver_policy": "all", "replay_policy": "instant", **config}
    api.request(f"CONSUMER.CREATE.{STREAM}.{CONSUMER}", {"stream_name": STREAM, "config": given, "action": "create"})


def status_rows(frames: Frames) -> npt.NDArray[np.bool_]:
    """Marks frames that are no message: those that were published have a payload."""
    return np.asarray((frames.rows[:, HEADER_LEN] > 0) & (frames.rows[:, PAYLOAD_LEN] == 0))


def check_has_no_status(frames: Frames) -> None:
    marks = status_rows(frames)
    assert not marks.any(), f"a fetch ended early: {headers_of(frames, int(marks.argmax()))!r}"


def answers_to_statuses(frames: Frames) -> bytes:
    """An empty message to the reply subject of a flow control request, and to the subject that a heartbeat names."""
    subjects = []
    for at in range(len(frames.rows)):
        headers = headers_of(frames, at)
        assert headers.startswith(b"NATS/1.0 100 "), f"the delivery ended: {headers!r}"
        if reply := reply_of(frames, at):
            subjects.append(reply)
        elif _STALLED in headers:
            subjects.append(headers.split(_STALLED)[1].split(b"\r\n")[0])
    return b"".join(b"PUB %s 0\r\n\r\n" % subject for subject in subjects)
