"""Interest of an account, compared with a list of subscriptions that is searched from end to end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from natslog.wire.interest import Interest

TOKENS = st.sampled_from(["a", "b", "a*", ">b", "*", ">", ""])
SUBJECTS = st.lists(TOKENS, min_size=1, max_size=4).map(".".join)
LITERALS = st.lists(st.sampled_from(["a", "b", "a*", ">b", "c", ""]), min_size=1, max_size=4).map(".".join)
GROUPS = st.sampled_from([None, "g", "h"])


def matches(pattern: str, subject: str) -> bool:
    """As NATS does."""
    wanted, tokens = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        wanted = wanted[:-1]
        if len(tokens) <= len(wanted):
            return False
        tokens = tokens[: len(wanted)]
    return len(wanted) == len(tokens) and all(one in ("*", other) for one, other in zip(wanted, tokens, strict=True))


class InterestMachine(RuleBasedStateMachine):
    """The model is a set of pairs."""

    @initialize()
    def begin(self) -> None:
        self.interest = Interest()
        self.model: set[tuple[str, str | None]] = set()

    @rule(subject=SUBJECTS, group=GROUPS, count=st.integers(0, 3))
    def add(self, subject: str, group: str | None, count: int) -> None:
        is_there = (subject, group) in self.model
        assert self.interest.add(subject, group, count) == (is_there != (count > 0))
        (self.model.add if count else self.model.discard)((subject, group))

    @rule(subject=SUBJECTS, group=GROUPS)
    def remove(self, subject: str, group: str | None) -> None:
        assert self.interest.remove(subject, group) == ((subject, group) in self.model)
        self.model.discard((subject, group))

    @rule()
    def clear(self) -> None:
        self.interest.clear()
        self.model.clear()

    @rule(subject=LITERALS)
    def has(self, subject: str) -> None:
        found = {group for pattern, group in self.model if matches(pattern, subject)}
        assert self.interest.has(subject) == bool(found)
        for group in ("g", "h"):
            assert self.interest.has(subject, group) == (group in found)
        assert self.interest.groups(subject) == found - {None}

    @invariant()
    def keeps_nothing_that_ended(self) -> None:
        patterns = {
            tuple(one.split(".")) for one, _ in self.model if "*" in one.split(".") or one.split(".")[-1] == ">"
        }
        lengths = {tokens: len(tokens) - (tokens[-1] == ">") for tokens in patterns}
        needed = {tokens[:length] for tokens, most in lengths.items() for length in range(1, most + 1)}
        assert _branches(self.interest) == needed


def _branches(interest: Interest) -> set[tuple[str, ...]]:
    found, open_ends = set(), [((), interest._patterns)]
    while open_ends:
        path, branch = open_ends.pop()
        for token, below in branch.branches.items():
            found.add((*path, token))
            open_ends.append(((*path, token), below))
    return found


TestInterest = InterestMachine.TestCase


@given(st.lists(st.tuples(SUBJECTS, GROUPS)), LITERALS)
def test_order_of_subscriptions_does_not_matter(subscriptions: list[tuple[str, str | None]], subject: str) -> None:
    forwards, backwards = Interest(), Interest()
    for one in subscriptions:
        forwards.add(*one)
    for one in reversed(subscriptions):
        backwards.add(*one)
    assert forwards.groups(subject) == backwards.groups(subject)
    assert forwards.has(subject) == backwards.has(subject)


def test_group_counts_are_totals_and_not_sums() -> None:
    interest = Interest()
    assert interest.add("jobs", "workers", 1)
    assert not interest.add("jobs", "workers", 2), "a second member is nothing new"
    assert not interest.add("jobs", "workers", 1)
    assert interest.remove("jobs", "workers")
    assert not interest.has("jobs")
