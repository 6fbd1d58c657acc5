"""The locks of a log are always taken in one order: no two threads can wait for each other.

Each lock that `natslog.log` creates is named for the place that creates it. While a log is used in all ways, pairs of
locks that are held together are noted, with the order in which they were taken; the pairs must not form a circle.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from natslog.log.rules import Rule
from natslog.model import Epoch
from tests.unit.log.removal_model import Message, Settings, Stream

RULES = Settings((Rule(Epoch(0), 2, compacts=True),), max_bytes=50_000)


class Order:
    """Pairs of names: while the first one was held, the second one was taken."""

    def __init__(self) -> None:
        self.pairs: set[tuple[str, str]] = set()
        self._held = threading.local()

    def taken(self, name: str) -> None:
        held = self._held.__dict__.setdefault("names", [])
        if name not in held:  # a lock that may be taken again by its holder
            self.pairs |= {(other, name) for other in held}
        held.append(name)

    def given_back(self, name: str) -> None:
        self._held.names.remove(name)

    def circle(self) -> list[str]:
        """Names that were taken in a circle; empty: there is none."""
        after: dict[str, set[str]] = {}
        for first, second in self.pairs:
            after.setdefault(first, set()).add(second)
        for start in after:
            paths = [[start]]
            while paths:
                path = paths.pop()
                for name in after.get(path[-1], ()):
                    if name == start:
                        return [*path, start]
                    if name not in path:
                        paths.append([*path, name])
        return []


class NamedLock:
    def __init__(self, lock: Any, name: str, order: Order) -> None:
        self._lock, self._name, self._order = lock, name, order

    def acquire(self, *arguments: Any, **named: Any) -> bool:
        is_taken = bool(self._lock.acquire(*arguments, **named))
        if is_taken:
            self._order.taken(self._name)
        return is_taken

    def release(self) -> None:
        self._order.given_back(self._name)
        self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> Order:
    found = Order()

    def naming(kind: Any) -> Any:
        def create() -> Any:
            place = sys._getframe(1)
            path = Path(place.f_code.co_filename)
            if path.parent.name != "log":
                return kind()
            return NamedLock(kind(), f"{path.stem}:{place.f_lineno}", found)

        return create

    monkeypatch.setattr(threading, "Lock", naming(threading.Lock))
    monkeypatch.setattr(threading, "RLock", naming(threading.RLock))
    monkeypatch.setattr("natslog.log.shared.SegmentChain", _chain_of(found))
    return found


def _chain_of(order: Order) -> Any:
    """Its lock is created by a dataclass, and so at no place in its file."""
    from natslog.log.chain import SegmentChain

    return lambda: SegmentChain(lock=NamedLock(threading.RLock(), "chain", order))  # type: ignore[arg-type]


def test_locks_are_taken_in_one_order(tmp_path: Path, order: Order) -> None:
    stream = Stream(tmp_path, RULES)
    for _ in range(3):
        stream.append([Message("a", "k", ttl_s=2), Message("b"), Message("c", "l")])
        stream.seal_all()
        for number in (0, 1):
            stream.copy(number)
    stream.index("a")
    stream.begin_view()
    stream.delete(2)
    stream.erase("subject", "b")
    stream.wait(3)
    stream.expire()
    for number in range(3):
        for work in (stream.rewrite, stream.erase_next, stream.merge, stream.retain):
            work(number)
    stream.damage(1, 3)
    stream.scrub()
    stream.check()
    for replica in stream.replicas:
        log = replica.log
        log.message_bytes.total(log.first_readable_offset, log.high_watermark)
        log.limits.advance()
        log.ids.newest(60.0)
    stream.reopen(1, stores=True)
    stream.close()
    names = {name.partition(":")[0] for pair in order.pairs for name in pair}
    assert {"shared", "chain", "limits", "message_bytes", "visibility"} <= names, "the locks are noted"
    assert not order.circle()
