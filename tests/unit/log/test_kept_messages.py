"""What is kept of single messages, against a dictionary; and that it stays within its room."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from natslog.log.kept_messages import MOST_BYTES, KeptMessages, KeptRoom


def add(kept: KeptMessages, messages: dict[int, bytes], version: int | None = None) -> None:
    data = b"#".join(messages.values())
    ends = np.cumsum([len(one) + 1 for one in messages.values()])
    lengths = np.array([len(one) for one in messages.values()])
    places = np.stack([ends - lengths - 1, lengths // 2, lengths], axis=1)
    array = np.frombuffer(data + b"#", np.uint8)
    kept.add(np.array(list(messages)), places, array, kept.version if version is None else version)


def found(kept: KeptMessages, offsets: list[int]) -> dict[int, bytes]:
    places, data, missing, size_bytes = kept.find(np.array(offsets, np.int64))
    assert [one for one, place in zip(offsets, places[:, 0].tolist(), strict=True) if place == -1] == [
        one for one in offsets if one < 0
    ]
    assert missing == int((places[:, 0] == -2).sum())
    assert size_bytes == int(places[:, 2].sum())
    held = {}
    for offset, (start, head, total) in zip(offsets, places.tolist(), strict=True):
        if start >= 0:
            assert head == total // 2
            held[offset] = data[start : start + total].tobytes()
    return held


messages = st.dictionaries(st.integers(0, 40).map(lambda at: at**9), st.binary(max_size=300), min_size=1, max_size=12)


@settings(deadline=None, max_examples=80)
@given(st.lists(messages | st.none(), max_size=12))
def test_what_is_kept_is_what_was_added(steps: list[dict[int, bytes] | None]) -> None:
    kept, model = KeptMessages(KeptRoom(10**6)), dict[int, bytes]()
    for step in steps:
        if step is None:
            kept.clear()
            model.clear()
        else:
            add(kept, step)
            model |= step
        assert found(kept, [*(at**9 for at in range(41)), -1, -7]) == model


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 3), messages), max_size=30), st.integers(9_000, 60_000))
def test_all_logs_stay_within_their_room(steps: list[tuple[int, dict[int, bytes]]], size_bytes: int) -> None:
    room = KeptRoom(size_bytes)
    logs, ever = [KeptMessages(room) for _ in range(4)], [dict[int, bytes]() for _ in range(4)]
    for which, step in steps:
        add(logs[which], step)
        ever[which] |= step
        assert room.used_bytes <= size_bytes
        held = found(logs[which], list(ever[which]))
        assert held.items() <= ever[which].items()
    assert sum(one.nbytes for one in logs) == room.used_bytes


def test_the_log_that_was_used_least_recently_makes_room() -> None:
    room = KeptRoom(90_000)
    first, second, third = (KeptMessages(room) for _ in range(3))
    add(first, {1: b"x" * 10_000})
    add(second, {1: b"x" * 10_000})
    assert found(first, [1])
    add(third, dict.fromkeys(range(4), b"x" * 10000))
    assert found(first, [1])
    assert not found(second, [1])
    assert len(found(third, [0, 1, 2, 3])) == 4


def test_a_log_that_needs_all_of_the_room_begins_again() -> None:
    kept = KeptMessages(KeptRoom(100_000))
    for at in range(40):
        add(kept, {at: b"%d" % at * 2_000})
    assert 1 <= len(found(kept, list(range(40)))) < 40
    assert found(kept, [39])


def test_large_messages_are_not_kept() -> None:
    kept = KeptMessages(KeptRoom(10**6))
    add(kept, {1: bytes(MOST_BYTES + 1), 2: bytes(MOST_BYTES)})
    assert list(found(kept, [1, 2])) == [2]


def test_what_was_read_before_it_was_cleared_is_not_added() -> None:
    kept = KeptMessages(KeptRoom(10**6))
    version = kept.version
    kept.clear()
    add(kept, {1: b"x"}, version)
    assert not found(kept, [1])


def test_arrays_in_use_stay_as_they_are() -> None:
    kept = KeptMessages(KeptRoom(10**6))
    add(kept, {1: b"abc"})
    places, data, _, _ = kept.find(np.array([1]))
    for at in range(2, 300):
        add(kept, {at: b"x" * 1_000})
    kept.clear()
    start, total = int(places[0, 0]), int(places[0, 2])
    held: Any = data[start : start + total]
    assert held.tobytes() == b"abc"
