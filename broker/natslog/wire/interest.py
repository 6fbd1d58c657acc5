"""Which subjects the NATS account has subscribers for, as a server states it to a leafnode (`LS+` and `LS-`).

Theory of operation. A server sends one line for each subject that has plain subscribers, and one for each pair of
subject and queue group; it counts the subscribers itself. Subjects without wildcards are looked up in a dict. Patterns
are in a trie of their tokens: a look-up follows at most two branches at each token, the token itself and `*`, so its
cost depends on the tokens of the subject and not on the number of subscriptions.

Invariant: a branch of the trie exists only while a pattern needs it.

Source: sublist.go of nats-server.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

__all__ = ["Interest"]

_Groups = frozenset[str | None]
"""Who subscribes to one subject or pattern: queue groups, and None for plain subscribers."""

_NO_GROUPS: _Groups = frozenset()
_PLAIN: _Groups = frozenset([None])  # one object for most subjects


@dataclass(slots=True)
class _Branch:
    """`ends`: of the pattern that ends at this token. `rest`: of the one that has `>` as its next and last token."""

    branches: dict[str, _Branch] = field(default_factory=dict)
    ends: _Groups = _NO_GROUPS
    rest: _Groups = _NO_GROUPS

    @property
    def is_empty(self) -> bool:
        return not (self.branches or self.ends or self.rest)


class Interest:
    """Starts empty."""

    def __init__(self) -> None:
        self._literals: dict[str, _Groups] = {}
        self._patterns = _Branch()

    def add(self, subject: str, group: str | None = None, count: int = 1) -> bool:
        """There are `count` subscribers to the subject, which may have wildcards; returns whether this is new.

        Args:
            group: the queue group; None: plain subscribers.
            count: of the members of the group, in total and not in addition; 0 removes it.
        """
        if count < 1:
            return self.remove(subject, group)
        return self._change(subject, _PLAIN if group is None else frozenset([group]), _NO_GROUPS)

    def remove(self, subject: str, group: str | None = None) -> bool:
        """There is no such subscriber any more; returns whether there was one."""
        return self._change(subject, _NO_GROUPS, _PLAIN if group is None else frozenset([group]))

    def has(self, subject: str, group: str | None = None) -> bool:
        """Whether a message with this subject, which has no wildcards, has a subscriber.

        Args:
            group: a member of this queue group; None: any subscriber, plain or of a queue group.
        """
        return any(group is None or group in groups for groups in self._matching(subject))

    def groups(self, subject: str) -> frozenset[str]:
        """The queue groups of which a member gets messages with this subject; a leafnode must name them."""
        found = _NO_GROUPS.union(*self._matching(subject))
        return frozenset(group for group in found if group is not None)

    def clear(self) -> None:
        """There are no subscribers."""
        self._literals.clear()
        self._patterns = _Branch()

    def _change(self, subject: str, more: _Groups, less: _Groups) -> bool:
        if _is_pattern(subject):
            return _change_pattern(self._patterns, subject.split("."), 0, more, less)
        before = self._literals.get(subject, _NO_GROUPS)
        after = _changed(before, more, less)
        if after:
            self._literals[subject] = after
        else:
            self._literals.pop(subject, None)
        return after != before

    def _matching(self, subject: str) -> Iterator[_Groups]:
        if (groups := self._literals.get(subject)) is not None:
            yield groups
        if not self._patterns.is_empty:
            yield from _matching_patterns(self._patterns, subject.split("."))


def _is_pattern(subject: str) -> bool:
    """A `*` or `>` is a wildcard only if it is a whole token, and `>` only at the end."""
    if "*" not in subject and ">" not in subject:
        return False
    tokens = subject.split(".")
    return "*" in tokens or tokens[-1] == ">"


def _changed(groups: _Groups, more: _Groups, less: _Groups) -> _Groups:
    if not groups:
        return more
    return (groups | more) - less


def _change_pattern(branch: _Branch, tokens: list[str], at: int, more: _Groups, less: _Groups) -> bool:
    if at == len(tokens):
        before = branch.ends
        branch.ends = _changed(before, more, less)
        return branch.ends != before
    token = tokens[at]
    if token == ">" and at == len(tokens) - 1:
        before = branch.rest
        branch.rest = _changed(before, more, less)
        return branch.rest != before
    below = branch.branches.get(token)
    if below is None:
        if not more:
            return False
        below = branch.branches[token] = _Branch()
    has_changed = _change_pattern(below, tokens, at + 1, more, less)
    if below.is_empty:
        del branch.branches[token]
    return has_changed


def _matching_patterns(root: _Branch, tokens: list[str]) -> Iterator[_Groups]:
    reached = [root]
    for token in tokens:
        yield from (branch.rest for branch in reached if branch.rest)
        names = (token, "*") if token != "*" else ("*",)
        reached = [branch.branches[name] for branch in reached for name in names if name in branch.branches]
    yield from (branch.ends for branch in reached if branch.ends)
