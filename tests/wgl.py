"""Is a history of concurrent operations linearizable? After Wing, Gong and Lowe.

Theory of operation. A search tries every order in which the operations may have taken effect: one that ended before
another began comes before it, and each result must be the one that a model of the object gives at that place. States
that were met before, with the same operations done, are not searched again.

An operation whose outcome is unknown took effect at some time after it began, or never. It is tried only immediately
before one that needs it: before any other it can as well come later, or never, because an operation either leaves the
state as it is or replaces it. Among unknown ones with equal effects, the one that began first is tried.

Operations on different keys do not affect each other, so that a history is checked key by key (`by_key`): a history is
linearizable if that of each key is.

Source: Wing and Gong, "Testing and verifying concurrent objects" (1993); Lowe, "Testing for linearizability" (2017).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeVar

State = TypeVar("State")
_MOST_STATES = 500_000


class Spans(Protocol):
    """When an operation began and ended, in any unit; None: its outcome is unknown."""

    @property
    def began(self) -> float: ...

    @property
    def ended(self) -> float | None: ...


Operation = TypeVar("Operation", bound=Spans)
Operation_contra = TypeVar("Operation_contra", bound=Spans, contravariant=True)


class Model(Protocol[State, Operation_contra]):
    """An object with one client: an operation leaves its state as it is, or replaces it. States can be hashed."""

    @property
    def first(self) -> State: ...

    def after(self, state: State, operation: Operation_contra) -> Iterator[State]:
        """The states in which this operation, with this result, may leave the object; none if it cannot be."""
        ...

    def effect(self, operation: Operation_contra) -> Hashable:
        """Operations without a known outcome and with equal effects are interchangeable."""
        ...


@dataclass(frozen=True, slots=True)
class Verdict:
    """`holds`: None if there was too much to try. `stuck`: operations of which none can be next, and before which most
    of the others could be ordered.
    """

    holds: bool | None
    states: int
    stuck: tuple[object, ...] = ()


def check(history: Iterable[Operation], model: Model[State, Operation], most_states: int = _MOST_STATES) -> Verdict:
    """Whether this history is linearizable."""
    known = sorted((one for one in history if one.ended is not None), key=lambda one: one.began)
    unknown = sorted((one for one in history if one.ended is None), key=lambda one: one.began)
    search = _Search(known, unknown, model)
    start = deepest = _Node(0, frozenset(), frozenset(), model.first)
    seen, path = {start}, [search.options(start)]
    while path and deepest.done < len(known):
        option = next(path[-1], None)
        if option is None:
            path.pop()
        elif option not in seen:
            if len(seen) >= most_states:
                return Verdict(None, len(seen), search.next_known(deepest))
            seen.add(option)
            path.append(search.options(option))
            deepest = max(deepest, option, key=lambda node: node.done)
    if deepest.done == len(known):
        return Verdict(True, len(seen))
    return Verdict(False, len(seen), search.next_known(deepest))


class _Node(NamedTuple):
    """Of the known operations, in the order of their beginning, those before `low` and those in `beyond` are done, and
    of the unknown ones those in `used`.
    """

    low: int
    beyond: frozenset[int]
    used: frozenset[int]
    state: object

    @property
    def done(self) -> int:
        """How many known operations."""
        return self.low + len(self.beyond)


class _Search:
    def __init__(
        self, known: Sequence[Operation], unknown: Sequence[Operation], model: Model[State, Operation]
    ) -> None:
        self._known, self._unknown = known, unknown
        self._model: Model[Any, Any] = model
        self._effects = [model.effect(one) for one in unknown]

    def _may_be_next(self, node: _Node) -> tuple[list[int], float]:
        """Known operations that began before any that is not done ended, and when the first of these ended."""
        found: list[int] = []
        until = float("inf")
        for at in range(node.low, len(self._known)):
            one = self._known[at]
            if one.began > until:
                break
            if at not in node.beyond:
                assert one.ended is not None, "it is known"
                found.append(at)
                until = min(until, one.ended)
        return [at for at in found if self._known[at].began <= until], until

    def next_known(self, node: _Node) -> tuple[object, ...]:
        return tuple(self._known[at] for at in self._may_be_next(node)[0])

    def options(self, node: _Node) -> Iterator[_Node]:
        """What may come next."""
        candidates, until = self._may_be_next(node)
        needing = []
        for at in candidates:
            states = list(self._after(node.state, self._known[at]))
            if not states:
                needing.append(at)
            for state in states:
                yield self._done(node, at, state)
        if needing:
            yield from self._through_unknown(node, needing, until)

    def _through_unknown(self, node: _Node, needing: Sequence[int], until: float) -> Iterator[_Node]:
        """Known operations behind unknown ones that they need."""
        tried: set[Hashable] = set()
        for at, unknown in enumerate(self._unknown):
            if unknown.began > until:
                break
            effect = self._effects[at]
            if at in node.used or effect in tried:
                continue
            tried.add(effect)
            for state in self._after(node.state, unknown):
                between = _Node(node.low, node.beyond, node.used | {at}, state)
                for known in needing:
                    for after in self._after(state, self._known[known]):
                        yield self._done(between, known, after)
                if self._enables_unknown(node, between, until):
                    yield from self._through_unknown(between, needing, until)

    def _enables_unknown(self, node: _Node, between: _Node, until: float) -> bool:
        return any(
            at not in between.used and self._is_possible(between.state, one) and not self._is_possible(node.state, one)
            for at, one in enumerate(self._unknown)
            if one.began <= until
        )

    def _is_possible(self, state: object, operation: object) -> bool:
        return next(self._after(state, operation), None) is not None

    def _after(self, state: object, operation: object) -> Iterator[object]:
        return self._model.after(state, operation)

    def _done(self, node: _Node, at: int, state: object) -> _Node:
        low, beyond = node.low, node.beyond
        if at != low:
            return _Node(low, beyond | {at}, node.used, state)
        low += 1
        while low in beyond:
            beyond = beyond - {low}
            low += 1
        return _Node(low, beyond, node.used, state)


# ---- a key of a key-value bucket ----

DELETED: Final = "deleted"
ABSENT: Final = "absent"
Content = bytes | Literal["deleted", "absent"]


@dataclass(frozen=True, slots=True)
class KeyOperation:
    """On one key. Each value is written once.

    Attributes:
        kind: `update` writes if the last revision of the key is `last`; 0: the key was never written.
        outcome: `refused`: an update found another revision.
        content: what a write wrote, or a `get` found.
        revision: that of what was written or found; None if it is not known. 0: nothing was found.
    """

    client: int
    key: str
    kind: Literal["put", "update", "delete", "get"]
    began: float
    ended: float | None
    outcome: Literal["ok", "refused", "unknown"]
    content: Content
    last: int = 0
    revision: int | None = None


class KeyState(NamedTuple):
    """`revision`: None if it is not known; it is above `above` then."""

    content: Content
    revision: int | None
    above: int


class KeyModel:
    """A key of a bucket. Args: history: all operations on this key, from which revisions of values are known."""

    first = KeyState(ABSENT, 0, 0)

    def __init__(self, history: Iterable[KeyOperation]) -> None:
        self._revision_of = {
            one.content: one.revision
            for one in history
            if one.revision is not None and one.content not in (DELETED, ABSENT)
        }

    def after(self, state: KeyState, operation: KeyOperation) -> Iterator[KeyState]:
        match operation.kind:
            case "get":
                if state.content == operation.content:
                    yield from _found(state, operation.revision)
            case "update" if operation.outcome == "refused":
                if state.revision is None or state.revision != operation.last:
                    yield state
            case "update":
                for was in _found(state, operation.last):
                    yield from self._written(was, operation)
            case "put" | "delete":
                yield from self._written(state, operation)

    def effect(self, operation: KeyOperation) -> Hashable:
        is_seen = operation.content in self._revision_of or operation.content in (DELETED, ABSENT)
        return operation.kind, operation.last, operation.content if is_seen else None

    def _written(self, state: KeyState, operation: KeyOperation) -> Iterator[KeyState]:
        """Revisions ascend."""
        top = state.above if state.revision is None else state.revision
        revision = operation.revision
        if revision is None:
            revision = self._revision_of.get(operation.content)
        if revision is None or revision > top:
            yield KeyState(operation.content, revision, top if revision is None else 0)


def _found(state: KeyState, revision: int | None) -> Iterator[KeyState]:
    """The state, if this may be its revision."""
    if revision is None or revision == state.revision:
        yield state
    elif state.revision is None and revision > state.above:
        yield KeyState(state.content, revision, 0)


def by_key(history: Iterable[KeyOperation]) -> dict[str, list[KeyOperation]]:
    found: dict[str, list[KeyOperation]] = defaultdict(list)
    for one in history:
        found[one.key].append(one)
    return dict(found)


def check_bucket(history: Iterable[KeyOperation]) -> dict[str, Verdict]:
    """The verdict on each key."""
    return {key: check(one, KeyModel(one)) for key, one in by_key(history).items()}
