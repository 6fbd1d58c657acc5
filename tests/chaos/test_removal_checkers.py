"""Tests of the checkers of removals: each gets a small correct history, and one in which a promise is broken."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from natslog.arrow.schema import MESSAGE_SCHEMA
from natslog.client import Fetched
from tests.chaos.checkers import Copy
from tests.chaos.removal_checkers import check_stored, judge_removals, must_be_hidden
from tests.chaos.removal_history import KeyedMessage, Removal, RemovalHistory
from tests.chaos.removal_recorders import LeaderReader

NOW_S = 1000.0


def history_of(stream: str, *subjects: str, keys: tuple[str | None, ...] = (), ttl_s: float = 1e9) -> RemovalHistory:
    """Messages that were acked at offsets 0, 1, …, at second 900."""
    history = RemovalHistory(stream)
    for number, subject in enumerate(subjects):
        key = keys[number] if keys else None
        history.messages.append(KeyedMessage(number, subject, key, None, ttl_s, False, 900.0, tries=1))
        history.ack(number, number, 900.0)
    return history


def copy_of(history: RemovalHistory, offsets: list[int], broker: int = 1, where: str = "served") -> Copy:
    columns: dict[str, Any] = {field.name: pa.nulls(len(offsets), field.type) for field in MESSAGE_SCHEMA}
    shown = [history.messages[offset] for offset in offsets]
    columns["offset"] = pa.array(offsets, MESSAGE_SCHEMA.field("offset").type)
    columns["subject"] = pa.array([one.subject for one in shown], MESSAGE_SCHEMA.field("subject").type)
    columns["value"] = pa.array([one.value for one in shown], MESSAGE_SCHEMA.field("value").type)
    return Copy(broker, where, pa.table([columns[name] for name in MESSAGE_SCHEMA.names], MESSAGE_SCHEMA.names))


def removal(outcome: Any = "done", end: int = 6, **what: Any) -> Removal:
    return Removal(outcome, 910.0, 911.0, end, **what)


def broken(history: RemovalHistory, *copies: list[int]) -> set[str]:
    read = [copy_of(history, offsets, broker) for broker, offsets in enumerate(copies, 1)]
    return {one.promise for one in judge_removals(history, read, NOW_S)}


LOST, REMOVED, DIFFERENT = "1 no acked loss", "9 removed", "2 one history"


@pytest.mark.parametrize(
    ("copies", "expected"),
    [
        ([[2, 3, 4, 5], [2, 3, 4, 5]], set()),
        ([[2, 3, 5], [2, 3, 5]], {LOST}),
        ([[1, 2, 3, 4, 5]], {REMOVED}),
        ([[2, 3, 4, 5], [2, 3, 4]], {DIFFERENT}),
    ],
)
def test_limit_per_subject(copies: list[list[int]], expected: set[str]) -> None:
    history = history_of("newest", "a", "a", "a", "a", "a", "b")  # three of each
    assert broken(history, *copies) == expected


@pytest.mark.parametrize(("shown", "expected"), [([1, 2, 3], set()), ([0, 1, 2, 3], {REMOVED}), ([2, 3], {LOST})])
def test_newest_of_each_key(shown: list[int], expected: set[str]) -> None:
    history = history_of("states", "a", "a", "a", "a", keys=("k", "l", "k", None))
    assert broken(history, shown) == expected


@pytest.mark.parametrize(
    ("removals", "shown", "expected"),
    [
        ([removal(offset=1)], [0, 2, 3], set()),
        ([removal(offset=1)], [0, 1, 2, 3], {REMOVED}),
        ([removal(outcome="missing", offset=1)], [0, 1, 2, 3], {REMOVED}),
        ([removal(outcome="unknown", offset=1)], [0, 1, 2, 3], set()),
        ([removal(outcome="unknown", offset=1)], [0, 2, 3], set()),
        ([removal(subject="b", below=3)], [0, 3], set()),
        ([removal(subject="b", below=3)], [0, 2, 3], {REMOVED}),
        ([removal(subject="b", below=3)], [3], {LOST}),
        ([removal(subject="b", keep=1)], [0, 3], set()),
        ([removal(subject="b", keep=1)], [0, 1, 3], {REMOVED}),
        ([], [0, 1, 3], {LOST}),
    ],
)
def test_requests(removals: list[Removal], shown: list[int], expected: set[str]) -> None:
    history = history_of("states", "a", "b", "b", "b")
    history.removals = removals
    assert broken(history, shown) == expected


@pytest.mark.parametrize(
    ("ttl_s", "shown", "expected"), [(10, [], set()), (10, [0], {REMOVED}), (200, [], {LOST}), (200, [0], set())]
)
def test_times_to_live(ttl_s: float, shown: list[int], expected: set[str]) -> None:
    assert broken(history_of("fading", "a", ttl_s=ttl_s), shown) == expected


def test_a_message_that_may_be_stored_twice_may_hide_one_more() -> None:
    history = history_of("newest", "a", "a", "a")
    history.messages[0].tries = 2
    assert broken(history, [1, 2]) == set()


def test_what_a_reader_found_hidden_stays_hidden() -> None:
    history = history_of("newest", "a", "b")
    reader = LeaderReader(history, cluster=None, seed=0)  # type: ignore[arg-type]

    def got(*offsets: int) -> None:
        rows = copy_of(history, list(offsets)).rows.combine_chunks().to_batches()
        reader.note(0, Fetched(rows, 2, 2, 0, "id"), must_be_hidden(history, NOW_S))

    got(0, 1)
    got(1)
    assert history.violations == []
    got(0, 1)
    assert {one.promise for one in history.violations} == {REMOVED}
    assert broken(history, [0, 1]) == {REMOVED}
    history.removals = [removal(offset=1)]
    got(1)
    assert "it was deleted" in history.violations[-1].text


def test_files_may_have_more_than_is_visible_and_nothing_less() -> None:
    history = history_of("newest", "a", "b", "c")
    served = copy_of(history, [1, 2])
    assert check_stored(history, served, [copy_of(history, [0, 1, 2], where="stored")], NOW_S) == []
    assert check_stored(history, served, [copy_of(history, [0, 1], where="stored")], NOW_S)
