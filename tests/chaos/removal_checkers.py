"""What must hold of streams whose messages are removed: nothing else is missing, and nothing removed returns."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tests.chaos.checkers import Copy, check_same, served_copies
from tests.chaos.history import Violation
from tests.chaos.removal_history import KeyedMessage, RemovalHistory
from tests.cluster_harness import Cluster

EXPIRES_WITHIN_S = 20.0
"""The leader takes what expires once a second; what expired while there was none, soon after."""
_CLOCKS_S = 5.0
_SAME_WITHIN_S = 60.0
_NAMED = 5

# ---- what must be hidden, and what may be ----


def must_be_hidden(
    history: RemovalHistory, now_s: float, start: int = 0, expires_within_s: float = EXPIRES_WITHIN_S
) -> dict[int, str]:
    """Offsets from `start` on that a leader hides from requests that are sent from now on, and why."""
    rules, found = history.rules, dict[int, str]()
    newer, keys = Counter[str](), set[str]()
    deleted, purged = _removed_for_sure(history)
    for offset in range(history.acked_end - 1, start - 1, -1):
        one = history.stored.get(offset)
        if offset in deleted:
            found[offset] = "it was deleted"
        if one is None:
            continue
        if offset < purged[one.subject]:
            found[offset] = f"{one.subject} was purged below {purged[one.subject]}"
        if rules.per_subject is not None and newer[one.subject] >= rules.per_subject:
            found[offset] = f"{newer[one.subject]} messages of {one.subject} are newer"
        if one.key is not None and one.key in keys:
            found[offset] = f"a message with the key {one.key} is newer"
        if (one.acked_s or now_s) + one.ttl_s + expires_within_s < now_s:
            found[offset] = f"acked {now_s - (one.acked_s or now_s):.1f} s ago, with {one.ttl_s} s to live"
        newer[one.subject] += 1
        keys |= {one.key} if one.key is not None else set()
    return found


def _removed_for_sure(history: RemovalHistory) -> tuple[set[int], Counter[str]]:
    """Deleted offsets, and below which offset each subject was purged."""
    deleted, purged = set[int](), Counter[str]()
    for removal in list(history.removals):
        if removal.outcome == "unknown" or removal.keep:
            continue
        if removal.offset is not None:
            deleted.add(removal.offset)
        elif removal.subject is not None and removal.below is not None:
            purged[removal.subject] = max(purged[removal.subject], removal.below)
    return deleted, purged


class Excuses:
    """Why a message may be hidden: also because of what may have been stored, or done, without an answer."""

    def __init__(self, history: RemovalHistory, now_s: float) -> None:
        self.history, self.now_s = history, now_s
        self._copies: Counter[str] = Counter()  # of a subject, or a key, that are stored perhaps
        for one in history.messages:
            self._copies[one.subject] += one.unknown_copies
            if one.key is not None:
                self._copies[f"key {one.key}"] += one.unknown_copies
        self._newer: dict[int, tuple[int, int]] = {}  # offset → known newer ones of its subject, and with its key
        count: Counter[str] = Counter()
        for offset in sorted(history.stored, reverse=True):
            one = history.stored[offset]
            self._newer[offset] = count[one.subject], count[f"key {one.key}"]
            count[one.subject] += 1
            count[f"key {one.key}"] += 1

    def may_be_hidden(self, offset: int, one: KeyedMessage) -> bool:
        rules = self.history.rules
        of_subject, with_key = self._newer[offset]
        if _may_have_expired(one, self.now_s):
            return True
        if rules.per_subject is not None and of_subject + self._copies[one.subject] >= rules.per_subject:
            return True
        if one.key is not None and rules.keys and with_key + self._copies[f"key {one.key}"] > 0:
            return True
        return any(removal.names(offset, one.subject) for removal in self.history.removals)


# ---- judging ----


def check_nothing_lost(history: RemovalHistory, copy: Copy, now_s: float) -> list[Violation]:
    """Every acked message that nothing removed is readable, with its value."""
    visible = dict(zip(copy.offsets(), copy.values(), strict=True))
    excuses, found = Excuses(history, now_s), []
    for offset, one in sorted(history.stored.items()):
        if offset in visible:
            if visible[offset] != one.value:
                found.append(Violation("2 one history", f"{copy.name}: offset {offset} has another value"))
        elif not excuses.may_be_hidden(offset, one):
            text = f"{copy.name}: offset {offset}, acked for message {one.number} on {one.subject}, is hidden or lost"
            found.append(Violation("1 no acked loss", text))
    return found[:_NAMED]


def check_removed(history: RemovalHistory, copy: Copy, now_s: float) -> list[Violation]:
    """Nothing is visible that was removed, that a rule hides, or that has expired."""
    hidden = must_be_hidden(history, now_s)
    shown = [offset for offset in copy.offsets() if offset in hidden]
    found = [
        Violation("9 removed", f"{copy.name}: offset {offset} is visible: {hidden[offset]}")
        for offset in shown[:_NAMED]
    ]
    again = sorted(history.passed.intersection(copy.offsets()))
    if again:
        text = f"{copy.name}: {len(again)} offsets are visible that were hidden, the first is {again[0]}"
        found.append(Violation("9 removed", text))
    return found + _check_kept(history, copy)


def _check_kept(history: RemovalHistory, copy: Copy) -> list[Violation]:
    """Of what a purge that keeps some was about, at most so many are left."""
    visible = defaultdict(list)
    for offset, subject in zip(copy.offsets(), copy.rows.column("subject").to_pylist(), strict=True):
        visible[subject].append(offset)
    return [
        Violation("9 removed", f"{copy.name}: {left} messages are left by {removal}")
        for removal in history.removals
        if removal.keep and removal.outcome == "done" and removal.subject is not None
        if (left := sum(offset < removal.end for offset in visible[removal.subject])) > removal.keep
    ][:_NAMED]


def check_stored(history: RemovalHistory, copy: Copy, stored: list[Copy], now_s: float) -> list[Violation]:
    """The files of each replica have every visible message, unchanged, but for what has expired since. They may have
    others that are hidden.
    """
    lasting = [offset for offset in copy.offsets() if not _may_have_expired(history.stored.get(offset), now_s)]
    first, *cut = (_only(one, lasting) for one in (copy, *stored))
    lacking = [
        Violation("1 no acked loss", f"{one.name} has {one.rows.num_rows} of {len(lasting)} visible messages")
        for one in cut
        if one.rows.num_rows != len(lasting)
    ]
    return lacking or check_same([first, *cut])


def _may_have_expired(one: KeyedMessage | None, now_s: float) -> bool:
    return one is not None and one.sent_s + one.ttl_s - _CLOCKS_S < now_s


def _only(copy: Copy, offsets: list[int]) -> Copy:
    column = copy.rows.column("offset")
    return Copy(copy.broker, copy.where, copy.rows.filter(pc.is_in(column, value_set=pa.array(offsets, column.type))))


def check_same_visible(copies: list[Copy]) -> list[Violation]:
    first, found = copies[0], []
    for other in copies[1:]:
        apart = sorted(set(first.offsets()) ^ set(other.offsets()))
        if apart:
            text = f"{first.name} and {other.name} show different messages: {apart[:_NAMED]}"
            found.append(Violation("2 one history", text))
    return found + check_same(copies)


def judge_removals(history: RemovalHistory, copies: list[Copy], now_s: float) -> list[Violation]:
    """Of copies that were read when all was quiet and in sync."""
    return [
        *history.violations,
        *check_same_visible(copies),
        *check_nothing_lost(history, copies[0], now_s),
        *check_removed(history, copies[0], now_s),
    ]


def settled_copies(cluster: Cluster, stream: str) -> tuple[list[Copy], list[Violation]]:
    """Of every replica, when all show the same: what is removed reaches followers a moment later."""
    deadline = time.monotonic() + _SAME_WITHIN_S
    while True:
        copies, found = served_copies(cluster, stream)
        is_same = bool(copies) and not found and not check_same_visible(copies)
        if is_same or time.monotonic() > deadline:
            return copies, found
        time.sleep(0.5)


def figures(history: RemovalHistory, copies: list[Copy]) -> dict[str, Any]:
    outcomes = Counter(("delete" if one.offset is not None else "purge", one.outcome) for one in history.removals)
    stored = [one.rows.num_rows for one in copies if one.where == "stored"]
    return {
        "sent": len(history.messages),
        "acked": history.acked,
        "removals": {f"{kind} {outcome}": count for (kind, outcome), count in sorted(outcomes.items())},
        "visible": copies[0].rows.num_rows if copies else None,
        "rows in the files": stored,
        "copies": len(copies),
        "reads": history.looks,
    }
