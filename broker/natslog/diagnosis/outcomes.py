"""What a check has found."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

State = Literal["ok", "warning", "problem", "not checked"]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Of one check; several of one check are about different things (two servers, two findings).

    Attributes:
        check: its name, as in docs/OPERATIONS.md; checks leave it to `doctor.CHECKS`, which names them. found: what was
            measured, or why it was not checked. remedy: what to do; empty if nothing is to be done. facts: the same for
            programs.
    """

    check: str = ""
    state: State
    found: str
    remedy: str = ""
    facts: dict[str, Any] = {}


def ok(found: str, **facts: Any) -> Outcome:
    return Outcome(state="ok", found=found, facts=facts)


def warning(found: str, remedy: str, **facts: Any) -> Outcome:
    return Outcome(state="warning", found=found, remedy=remedy, facts=facts)


def problem(found: str, remedy: str, **facts: Any) -> Outcome:
    return Outcome(state="problem", found=found, remedy=remedy, facts=facts)


def not_checked(why: str, remedy: str = "") -> Outcome:
    return Outcome(state="not checked", found=why, remedy=remedy)


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All outcomes. `at`: RFC 3339. `problems` and `warnings`: how many."""

    version: str
    at: str
    problems: int
    warnings: int
    outcomes: list[Outcome]
