"""Pull requests that wait for messages.

Source: nats-server, `waitQueue`, `nextWaiting` and `nextReqFromMsg` in `server/consumer.go`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from natslog.jetstream.errors import ApiError
from natslog.jetstream.requests import ApiRequest, Signed, decoded

HasInterest = Callable[[str], bool]

NS_PER_US = 1000
FOREVER_US = 2**62


class Status(NamedTuple):
    """A message without a subject of a stream: `headers` to `to`, with a reply subject or none."""

    to: str
    headers: bytes
    reply: str = ""


def status(to: str, line: str, headers: Mapping[str, object] = MappingProxyType({}), reply: str = "") -> Status:
    """`line`: code and text."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return Status(to, f"NATS/1.0 {line}\r\n{lines}\r\n".encode(), reply)


class Refusal(Exception):
    """The status that a request gets instead of messages."""


class PullRequest(ApiRequest, frozen=True, kw_only=True):
    """Durations in nanoseconds."""

    expires: Signed = 0
    batch: Signed = 0
    max_bytes: Signed = 0
    no_wait: bool = False
    idle_heartbeat: Signed = 0
    group: str = ""
    min_pending: Signed = 0
    min_ack_pending: Signed = 0
    id: str = ""
    priority: Signed = 0


def pull_request_of(payload: bytes) -> PullRequest:
    """A number of messages, JSON, or nothing: one message. Raises Refusal."""
    text = payload.strip()
    if text[:1] != b"{":
        try:
            return PullRequest(batch=int(text) if text else 1)
        except ValueError:
            return PullRequest(batch=1)
    try:
        request = decoded(text, PullRequest, ignores_unknown=True)
    except ApiError as error:
        raise Refusal(f"400 Bad Request - {_in_short(text, error)}") from error
    if request.idle_heartbeat > 0 and request.idle_heartbeat * 2 > request.expires:
        raise Refusal("400 Bad Request - heartbeat value too large")
    if request.min_pending or request.min_ack_pending:
        raise Refusal("400 Bad Request - Not a Overflow Priority consumer")
    if request.id:
        raise Refusal("400 Bad Request - Not a Pinned Client Priority consumer")
    if not 0 <= request.priority <= 9:
        raise Refusal("400 Bad Request - Priority must be between 0 and 9")
    return request


def _in_short(text: bytes, error: ApiError) -> str:
    """Why the JSON cannot be read. Clients find some of these texts in the answer."""
    return "unexpected end of JSON input" if "truncated" in error.description else error.description


@dataclass(slots=True)
class Pull:
    """A request that waits.

    Attributes:
        left: messages that it still takes. `left_bytes`: the same of bytes; 0: any number. sent: messages it has got.
        expires_us, heartbeat_us: when it ends, and when it gets the next heartbeat; far away if never.
    """

    reply: str
    left: int
    left_bytes: int
    no_wait: bool
    expires_us: int
    every_us: int
    heartbeat_us: int
    sent: int = 0

    @classmethod
    def of(cls, reply: str, request: PullRequest, now_us: int) -> Pull:
        every_us = max(0, request.idle_heartbeat) // NS_PER_US
        return cls(
            reply,
            request.batch,
            max(0, request.max_bytes),
            request.no_wait,
            now_us + request.expires // NS_PER_US if request.expires else FOREVER_US,
            every_us,
            now_us + every_us if every_us else FOREVER_US,
        )

    @property
    def has_expiry(self) -> bool:
        return self.expires_us < FOREVER_US

    @property
    def rest(self) -> dict[str, object]:
        """Headers of the status that ends it."""
        return {"Nats-Pending-Messages": self.left, "Nats-Pending-Bytes": self.left_bytes}

    def took(self, count: int, now_us: int) -> None:
        self.left -= count
        self.sent += count
        if self.every_us:
            self.heartbeat_us = now_us + self.every_us


_NO_PULLS: deque[Pull] = deque()
"""Of all consumers without a request, because an empty one takes 0.6 KB; never changed."""


class WaitingPulls:
    """In the order in which they get messages: one message each in turn, where several wait.

    Args:
        has_interest: whether a reply subject has a subscriber. `most`: how many may wait.
    """

    __slots__ = (
        "_has_interest",
        "_waiting",
        "most",
    )

    def __init__(self, most: int, has_interest: HasInterest) -> None:
        self.most = most
        self._waiting = _NO_PULLS
        self._has_interest = has_interest

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, pull: Pull) -> bool:
        """False: too many wait."""
        if len(self._waiting) >= self.most:
            return False
        if self._waiting is _NO_PULLS:
            self._waiting = deque()
        self._waiting.append(pull)
        return True

    def end(self, line: str) -> list[Status]:
        """What all of them get when the consumer is deleted, or served by another broker: `line`."""
        pulls, self._waiting = list(self._waiting), _NO_PULLS
        return [status(pull.reply, line) for pull in pulls]

    @property
    def counts_bytes(self) -> bool:
        """Whether one of them takes a limited number of bytes."""
        return any(pull.left_bytes for pull in self._waiting)

    @property
    def none_waits(self) -> bool:
        """Whether all of them end at once if there are no messages."""
        return len(self._waiting) > 0 and all(pull.no_wait and not pull.has_expiry for pull in self._waiting)

    @property
    def wanted(self) -> int:
        """How many messages they take together."""
        return sum(max(1, pull.left) for pull in self._waiting)

    @property
    def due_us(self) -> int:
        return min((min(pull.expires_us, pull.heartbeat_us) for pull in self._waiting), default=FOREVER_US)

    def due_statuses(
        self, now_us: int, heartbeat: Callable[[str], Status], *, at_end: bool, is_stalled: bool
    ) -> list[Status]:
        """Ends what has expired or has no subscriber any more; with `at_end` also the requests that do not wait.

        Args:
            at_end: there are no messages now. is_stalled: there may be some, which wait for acks of others: a request
                that does not wait, and has got some, ends with its first heartbeat.
        """
        found: list[Status] = []
        kept: deque[Pull] = deque()
        for pull in self._waiting:
            if now_us >= pull.expires_us:
                found.append(status(pull.reply, "408 Request Timeout", pull.rest))
            elif pull.no_wait and (
                (at_end and (pull.sent or not pull.has_expiry))
                or (is_stalled and pull.sent and now_us >= pull.heartbeat_us)
            ):
                found.append(status(pull.reply, "404 No Messages"))
            elif self._has_interest(pull.reply):
                kept.append(pull)
                if now_us >= pull.heartbeat_us:
                    found.append(heartbeat(pull.reply))
                    pull.heartbeat_us = now_us + pull.every_us
        self._waiting = kept
        return found

    def assign(self, sizes: npt.NDArray[np.int64], now_us: int) -> Assigned:
        """Which request gets which of some messages of these sizes; the first ones, as far as requests take them."""
        taken = Assigned(len(sizes))
        self._drop_expired(taken, now_us)
        while taken.count < len(sizes) and self._waiting:
            left = len(sizes) - taken.count
            if len(self._waiting) == 1 and not self._waiting[0].left_bytes:
                self._to_first(taken, left, now_us)
            elif left >= len(self._waiting) and not self.counts_bytes:
                self._in_turn(taken, left, now_us)
            else:
                self._one(taken, int(sizes[taken.count]), now_us)
        return taken

    def _drop_expired(self, taken: Assigned, now_us: int) -> None:
        """Those that have expired, or have no subscriber any more."""
        if all(now_us < pull.expires_us and self._has_interest(pull.reply) for pull in self._waiting):
            return
        for pull in self._waiting:
            if now_us >= pull.expires_us:
                taken.note(status(pull.reply, "408 Request Timeout", pull.rest))
        self._waiting = deque(
            pull for pull in self._waiting if now_us < pull.expires_us and self._has_interest(pull.reply)
        )

    def _to_first(self, taken: Assigned, left: int, now_us: int) -> None:
        pull = self._waiting[0]
        count = min(max(1, pull.left), left)
        taken.add(taken.index_of(pull.reply), count)
        pull.took(count, now_us)
        if pull.left <= 0:
            self._waiting.popleft()

    def _in_turn(self, taken: Assigned, left: int, now_us: int) -> None:
        """Whole rounds: one message for each request."""
        rounds = min(left // len(self._waiting), min(max(1, pull.left) for pull in self._waiting))
        indices = [taken.index_of(pull.reply) for pull in self._waiting]
        taken.add_all(np.tile(np.array(indices, np.int64), rounds))
        for pull in self._waiting:
            pull.took(rounds, now_us)
        self._waiting = deque(pull for pull in self._waiting if pull.left > 0)

    def _one(self, taken: Assigned, size_bytes: int, now_us: int) -> None:
        pull = self._waiting[0]
        if pull.left_bytes:
            if size_bytes > pull.left_bytes:
                taken.note(status(pull.reply, "409 Message Size Exceeds MaxBytes", pull.rest))
                self._waiting.popleft()
                return
            pull.left_bytes -= size_bytes
            if not pull.left_bytes:
                pull.left = 1
        taken.add(taken.index_of(pull.reply), 1)
        pull.took(1, now_us)
        if pull.left <= 0:
            self._waiting.popleft()
            if pull.left_bytes > 0:
                taken.note(status(pull.reply, "409 Batch Completed", pull.rest))
        else:
            self._waiting.rotate(-1)


class Assigned:
    """Messages, each for a reply subject, and statuses between them.

    Attributes:
        count: how many messages. replies: the reply subjects. statuses: with the number of messages before each.
    """

    def __init__(self, most: int) -> None:
        self.count = 0
        self.replies: list[str] = []
        self.statuses: list[tuple[int, Status]] = []
        self._index: dict[str, int] = {}
        self._reply_of = np.empty(most, np.int64)

    @property
    def reply_of(self) -> npt.NDArray[np.int64]:
        """The number of the reply subject of each message."""
        return self._reply_of[: self.count]

    def index_of(self, reply: str) -> int:
        at = self._index.setdefault(reply, len(self.replies))
        if at == len(self.replies):
            self.replies.append(reply)
        return at

    def add(self, index: int, count: int) -> None:
        self._reply_of[self.count : self.count + count] = index
        self.count += count

    def add_all(self, indices: npt.NDArray[np.int64]) -> None:
        self._reply_of[self.count : self.count + len(indices)] = indices
        self.count += len(indices)

    def note(self, one: Status) -> None:
        self.statuses.append((self.count, one))


__all__ = ["Assigned", "Pull", "PullRequest", "Refusal", "Status", "WaitingPulls", "pull_request_of", "status"]
