"""What the access rules permit. Pure; of one state of the rules, so what was found once is kept.

A rule permits its action on a stream whose name its pattern matches, for the subjects that its wildcard covers. `admin`
includes all other actions. A stream may have recorded subjects that its wildcard does not cover any more: `recorded` is
the list of all wildcards that it ever had. Internal streams are readable by rules that permit `monitor` or `admin` on
everything, and by rules whose pattern begins with `__`; other rules do not include them. An identity is *limited* on a
stream if its rules do not cover them all.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import translate
from functools import lru_cache
from typing import TypeAlias

from natslog.security.records import (
    ALL_STREAMS,
    ALL_SUBJECTS,
    ANONYMOUS,
    EVERYONE,
    ROLE_PREFIX,
    Action,
    Rule,
    Security,
)
from natslog.subjects import INTERNAL_PREFIX, MAX_NAME_CHARS, includes, is_internal, overlap

Patterns: TypeAlias = tuple[str, ...]
"""Wildcards of subjects."""

_MOST_KEPT = 20_000


class Decisions:
    """Of one `Security`."""

    def __init__(self, security: Security) -> None:
        self.security = security
        self._by_who: dict[str, list[Rule]] = {}
        for rule in security.rules.values():
            self._by_who.setdefault(rule.who, []).append(rule)
        self._found: dict[tuple[str, Action, str | None], tuple[Rule, ...]] = {}

    def roles(self, identity: str) -> Patterns:
        return self.security.roles.get(identity, ())

    def rules(self, identity: str, action: Action, stream: str | None = None) -> tuple[Rule, ...]:
        """Those that permit the action on a stream; without a stream, those for all streams and subjects."""
        if stream is not None and len(stream) > MAX_NAME_CHARS:
            return ()  # no stream has such a name, and what is kept must be small
        key = identity, action, stream
        found = self._found.get(key)
        if found is None:
            if len(self._found) >= _MOST_KEPT:
                self._found.clear()
            found = self._found[key] = tuple(rule for rule in self._of(identity) if _applies(rule, action, stream))
        return found

    def rules_of(self, identity: str, action: Action) -> list[Rule]:
        """Those that permit the action on any stream."""
        return [rule for rule in self._of(identity) if rule.action in (action, "admin")]

    def _of(self, identity: str) -> list[Rule]:
        whos = [identity, *(f"{ROLE_PREFIX}{role}" for role in self.roles(identity))]
        if identity != ANONYMOUS:
            whos.append(EVERYONE)
        return [rule for who in whos for rule in self._by_who.get(who, ())]

    def subjects(self, identity: str, action: Action, stream: str) -> Patterns:
        """The subjects on which the identity may do this in the stream; () where it may not at all."""
        patterns = tuple(dict.fromkeys(rule.subject for rule in self.rules(identity, action, stream)))
        return (ALL_SUBJECTS,) if ALL_SUBJECTS in patterns else patterns


def _applies(rule: Rule, action: Action, stream: str | None) -> bool:
    if action == "read" and stream is not None and is_internal(stream) and rule.action == "monitor":
        return rule.is_for_everything
    if rule.action not in (action, "admin"):
        return False
    if stream is None:
        return rule.is_for_everything
    if is_internal(stream) and rule.action != "admin" and not rule.stream.startswith(INTERNAL_PREFIX):
        return False
    return rule.stream == ALL_STREAMS or _name_regex(rule.stream).match(stream) is not None


@lru_cache(maxsize=1024)
def _name_regex(pattern: str) -> re.Pattern[str]:
    return re.compile(translate(pattern))


def touches(patterns: Patterns, recorded: Sequence[str]) -> bool:
    """Whether any message of the stream may be within the patterns."""
    return any(overlap(pattern, subject) for pattern in patterns for subject in recorded)


def is_whole(patterns: Patterns, recorded: Sequence[str]) -> bool:
    """Whether every message of the stream is within the patterns."""
    return all(any(includes(pattern, subject) for pattern in patterns) for subject in recorded)
