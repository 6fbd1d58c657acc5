"""The checker of linearizability: histories of which the verdict is known, and a dumb one beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations
from random import Random
from typing import Any

import pytest

from tests.wgl import ABSENT, DELETED, Content, KeyModel, KeyOperation, KeyState, check, check_bucket

UNKNOWN = None


def did(
    kind: Any,
    began: float,
    ended: float | None,
    content: Content = ABSENT,
    revision: int | None = None,
    *,
    last: int = 0,
    is_refused: bool = False,
    key: str = "k",
) -> KeyOperation:
    outcome: Any = "unknown" if ended is None else "refused" if is_refused else "ok"
    return KeyOperation(0, key, kind, began, ended, outcome, content, last, revision)


LINEARIZABLE = {
    "nothing": [],
    "one after the other": [
        did("get", 0, 1, ABSENT, 0),
        did("update", 2, 3, b"a", 1, last=0),
        did("get", 4, 5, b"a", 1),
        did("update", 6, 7, b"b", 3, last=1),
        did("update", 8, 9, b"c", last=1, is_refused=True),
        did("delete", 10, 11, DELETED),
        did("get", 12, 13, DELETED, 4),
        did("update", 14, 15, b"d", 9, last=4),
    ],
    "a get sees a put that has not ended": [did("put", 0, 10, b"a", 1), did("get", 2, 3, b"a", 1)],
    "a get does not see a put that has not ended": [did("put", 0, 10, b"a", 1), did("get", 2, 3, ABSENT, 0)],
    "the later of two puts began first": [
        did("put", 0, 10, b"a", 2),
        did("put", 1, 9, b"b", 1),
        did("get", 11, 12, b"a", 2),
    ],
    "an unknown put takes effect late": [
        did("put", 0, UNKNOWN, b"a"),
        did("get", 1, 2, ABSENT, 0),
        did("get", 90, 91, b"a", 7),
    ],
    "an unknown put never takes effect": [did("put", 0, UNKNOWN, b"a"), did("update", 1, 2, b"b", 1, last=0)],
    "an unknown put is overwritten without a witness but a refusal": [
        did("put", 0, 1, b"a", 1),
        did("put", 2, UNKNOWN, b"b"),
        did("update", 3, 4, b"c", last=1, is_refused=True),
        did("put", 5, 6, b"d", 8),
    ],
    "an unknown delete between two creates": [
        did("update", 0, 1, b"a", 1, last=0),
        did("delete", 2, UNKNOWN, DELETED),
        did("update", 3, 4, b"b", 5, last=4),
    ],
    "one of two updates of a revision wins": [
        did("put", 0, 1, b"a", 1),
        did("update", 2, 9, b"b", 2, last=1),
        did("update", 2, 9, b"c", last=1, is_refused=True),
    ],
    "a refused update began before the write that it lost against": [
        did("update", 0, 9, b"b", last=0, is_refused=True),
        did("put", 5, 6, b"a", 3),
    ],
}
NOT_LINEARIZABLE = {
    "a get misses a put that has ended": [did("put", 0, 1, b"a", 1), did("get", 2, 3, ABSENT, 0)],
    "a get goes back": [
        did("put", 0, 1, b"a", 1),
        did("put", 2, 9, b"b", 2),
        did("get", 3, 4, b"b", 2),
        did("get", 5, 6, b"a", 1),
    ],
    "both updates of a revision win": [
        did("put", 0, 1, b"a", 1),
        did("update", 2, 9, b"b", 2, last=1),
        did("update", 2, 9, b"c", 3, last=1),
    ],
    "both creates win": [did("update", 0, 9, b"a", 1, last=0), did("update", 0, 9, b"b", 2, last=0)],
    "an update of the last revision is refused": [
        did("put", 0, 1, b"a", 1),
        did("update", 2, 3, b"b", last=1, is_refused=True),
    ],
    "revisions do not ascend": [did("put", 0, 1, b"a", 5), did("put", 2, 3, b"b", 4)],
    "a deleted value is found": [
        did("put", 0, 1, b"a", 1),
        did("delete", 2, 3, DELETED),
        did("get", 4, 5, b"a", 1),
    ],
    "a value that nothing wrote": [did("get", 0, 1, b"a", 1)],
    "an unknown put is seen before it begins": [did("get", 0, 1, b"a", 1), did("put", 2, UNKNOWN, b"a")],
    "an unknown put takes effect twice": [
        did("put", 0, UNKNOWN, b"a"),
        did("get", 1, 2, b"a", 1),
        did("put", 3, 4, b"b", 2),
        did("get", 5, 6, b"a", 1),
    ],
    "an acked put is lost": [
        did("put", 0, 1, b"a", 1),
        did("put", 2, 3, b"b", 2),
        did("update", 4, 5, b"c", 3, last=1),
    ],
    "a value is found with another revision": [did("put", 0, 1, b"a", 1), did("get", 2, 3, b"a", 2)],
    "two gets disagree on the revision of a deletion": [
        did("delete", 0, UNKNOWN, DELETED),
        did("get", 1, 2, DELETED, 3),
        did("get", 3, 4, DELETED, 4),
    ],
}


@pytest.mark.parametrize("name", LINEARIZABLE)
def test_linearizable_history_holds(name: str) -> None:
    history = LINEARIZABLE[name]
    assert all(one.holds for one in check_bucket(history).values()), check_bucket(history)


@pytest.mark.parametrize("name", NOT_LINEARIZABLE)
def test_other_history_does_not_hold(name: str) -> None:
    (verdict,) = check_bucket(NOT_LINEARIZABLE[name]).values()
    assert verdict.holds is False
    assert verdict.stuck


def test_keys_are_independent() -> None:
    found = check_bucket([*LINEARIZABLE["one after the other"], did("get", 0, 1, b"a", 1, key="other")])
    assert {key: verdict.holds for key, verdict in found.items()} == {"k": True, "other": False}


def test_too_much_to_try_is_neither() -> None:
    history = [did("put", 0, 1, b"%d" % at, at) for at in range(1, 30)]
    history += [did("get", 0, 1, b"%d" % at, at) for at in range(1, 30)]
    history.append(did("get", 1, 2, b"1", 1))
    assert check(history, KeyModel(history), most_states=100).holds is None


def test_a_thousand_operations_are_few_states() -> None:
    """As long as few of them are at the same time."""
    history = chance_history(Random(1), operations=1000)
    verdict = check(history, KeyModel(history))
    assert verdict.holds
    assert verdict.states < 100_000


# ---- beside a dumb checker ----


def chance_history(chance: Random, operations: int, *, clients: int = 3, lies: float = 0.0) -> list[KeyOperation]:
    """Of a real register, each operation at some time between its beginning and its end; some results are wrong."""
    state, revision, now = KeyState(ABSENT, 0, 0), 0, 0.0
    free_at = [0.0] * clients
    done: list[KeyOperation] = []
    for number in range(operations):
        client = min(range(clients), key=lambda one: free_at[one])
        now = max(now, free_at[client]) + chance.random()
        began, ended = now - chance.random(), now + chance.random()
        began = max(began, free_at[client])
        free_at[client] = ended
        kind = chance.choice(("put", "update", "delete", "get"))
        content: Content = b"%d" % number
        last = chance.choice((state.revision or 0, 0))
        is_unknown = chance.random() < 0.15 and kind != "get"
        found: int | None = None
        is_refused = False
        if kind == "get":
            content, found = state.content, state.revision
        elif kind == "update" and last != state.revision:
            is_refused = True
        elif not (is_unknown and chance.random() < 0.5):
            content = DELETED if kind == "delete" else content
            revision += chance.randint(1, 3)
            state, found = KeyState(content, revision, 0), revision if kind != "delete" else None
        if kind == "delete":
            content = DELETED
        if chance.random() < lies and not is_refused:
            content, found = chance.choice(((content, (found or 0) + 1), (b"%d" % chance.randrange(number + 1), found)))
        if is_unknown:
            done.append(did(kind, began, UNKNOWN, content, last=last))
        else:
            done.append(did(kind, began, ended, content, found, last=last, is_refused=is_refused))
    return done


def holds_by_trying_all(history: Sequence[KeyOperation]) -> bool:
    model = KeyModel(history)
    known = [one for one in history if one.ended is not None]
    unknown = [one for one in history if one.ended is None]
    chosen = [[one for at, one in enumerate(unknown) if mask >> at & 1] for mask in range(1 << len(unknown))]
    return any(_fits(order, model) for some in chosen for order in permutations(known + some) if _in_time(order))


def _in_time(order: Sequence[KeyOperation]) -> bool:
    return not any(
        later.ended is not None and later.ended < earlier.began
        for at, earlier in enumerate(order)
        for later in order[at + 1 :]
    )


def _fits(order: Sequence[KeyOperation], model: KeyModel) -> bool:
    states: set[KeyState] = {KeyModel.first}
    for one in order:
        states = {after for state in states for after in _all_after(model, state, one)}
    return bool(states)


def _all_after(model: KeyModel, state: KeyState, one: KeyOperation) -> Iterator[KeyState]:
    return model.after(state, one)


def test_verdicts_are_those_of_a_dumb_checker() -> None:
    chance = Random(5)
    verdicts = {True: 0, False: 0}
    for _ in range(400):
        history = chance_history(chance, operations=chance.randint(1, 6), lies=chance.choice((0.0, 0.3)))
        expected = holds_by_trying_all(history)
        assert check(history, KeyModel(history)).holds is expected, history
        verdicts[expected] += 1
    assert min(verdicts.values()) > 50, verdicts
