"""`natslog apply`: streams as files declare them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from natslog.cli.common import JsonFlag, confirm, global_of
from natslog.cli.output import out, print_json
from natslog.errors import InvalidRequest
from natslog.stream_settings import SIZE_NAMES
from natslog.units import format_exact_size

if TYPE_CHECKING:
    from natslog.declared.applying import Outcome
    from natslog.declared.plan import Planned

DIFFERS_EXIT_CODE = 3
_SIGNS = {"create": "+", "change": "~", "delete": "-", "refused": "!", "protected": "!", "unlisted": "?"}
_COUNTED = {
    "create": "to create",
    "change": "to change",
    "unchanged": "unchanged",
    "delete": "to delete",
    "unlisted": "not declared any more",
    "refused": "refused",
    "protected": "protected",
}
_NOT_POSSIBLE = {"refused", "protected"}
_DONE = {"create": "created", "change": "changed", "delete": "deleted"}


def apply(
    context: typer.Context,
    files: Annotated[
        list[str],
        typer.Option("--file", "-f", help="TOML file of streams; - is standard input. May be repeated."),
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan only, and change nothing.")] = False,
    prune: Annotated[
        bool,
        typer.Option(
            "--prune", help="Delete streams with a managed_by of the files that no file declares, and their messages."
        ),
    ] = False,
    max_deletions: Annotated[
        int, typer.Option("--max-deletions", min=0, help="If --prune would delete more streams, change nothing.")
    ] = 3,
    delete_all: Annotated[
        bool,
        typer.Option(
            "--delete-all", help="With --prune: also if the files declare no stream of a managed_by any more."
        ),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation of deletions.")] = False,
    wait_s: Annotated[
        float, typer.Option("--wait", min=0.0, help="Seconds to repeat requests for while no broker responds.")
    ] = 0.0,
    as_json: JsonFlag = False,
) -> None:
    """Create and change streams so that they are as TOML files declare them. Settings that no file states are kept.

    A stream that was edited between plan and change is not changed. Exit codes: 0 the streams are as declared; 1 an
    error, or a stream cannot be as declared; 2 wrong usage; 3 with --dry-run, there are changes to apply.
    """
    from natslog.declared.applying import apply_plan
    from natslog.declared.plan import plan_of, require_few_deletions
    from natslog.declared.reading import read_files

    declared = read_files(files)
    if prune and not declared.managed_by:
        raise InvalidRequest(
            "--prune deletes streams by their managed_by, and no file states one: write managed_by under [defaults]"
        )
    client = global_of(context).client(wait_s)
    listed = client.streams(current=True)
    steps = plan_of(declared, listed, prune=prune)
    report: dict[str, Any] = {"plan": [step.to_json() for step in steps]}
    if not as_json:
        print_plan(steps)
    elif dry_run:
        print_json(report)
    require_few_deletions(steps, declared, listed, most=max_deletions, delete_all=delete_all)
    actions = {step.action for step in steps}
    if dry_run:
        raise typer.Exit(1 if actions & _NOT_POSSIBLE else DIFFERS_EXIT_CODE if actions & _DONE.keys() else 0)
    if "delete" in actions and not yes:
        _confirm_deletions([step for step in steps if step.action == "delete"])
    outcomes = apply_plan(client, steps)
    if as_json:
        print_json(report | {"results": [one.to_json() for one in outcomes]})
    else:
        _print_outcomes(outcomes)
    if any(one.outcome != "done" for one in outcomes):
        raise typer.Exit(1)


def _confirm_deletions(steps: Sequence[Planned]) -> None:
    """Raises InvalidRequest: nothing was changed."""
    described = ", ".join(f"{step.stream} ({_messages(step)})" for step in steps)
    confirm(f"Apply this plan, and delete {described}?", or_else=f"nothing was changed, and {described} not deleted")


def _messages(step: Planned) -> str:
    return "unknown number of messages" if step.messages is None else f"{step.messages} messages"


def print_plan(steps: Sequence[Planned]) -> None:
    for step in steps:
        out.print(f"{_SIGNS.get(step.action, ' ')} {step.stream}: {_described(step)}")
        for name, (was, wanted) in step.changes.items():
            before = "" if step.action == "create" else f"{_shown(name, was)} → "
            out.print(f"    {name}: {before}{_shown(name, wanted)}")
        if step.keeps:
            kept = ", ".join(f"{name} {_shown(name, value)}" for name, value in step.keeps.items())
            out.print(f"    not declared, and kept: {kept}")
    counts = Counter[str](step.action for step in steps)
    out.print(
        "plan: " + (", ".join(f"{counts[one]} {text}" for one, text in _COUNTED.items() if counts[one]) or "none")
    )


def _described(step: Planned) -> str:
    if step.reason:
        return step.reason
    if step.action == "delete":
        return f"delete, with {_messages(step)}"
    return "not declared any more; --prune would delete it" if step.action == "unlisted" else step.action


def _shown(setting: str, value: Any) -> str:
    match value:
        case None:
            return "none"
        case bool():
            return str(value).lower()
        case list():
            return ", ".join(value) or "none"
        case _:
            return format_exact_size(value) if setting in SIZE_NAMES else str(value)


def _print_outcomes(outcomes: Sequence[Outcome]) -> None:
    for one in outcomes:
        if one.outcome == "done":
            out.print(f"stream {one.stream} {_DONE[one.action]}")
        elif one.action not in _NOT_POSSIBLE:  # those are in the plan
            what = "failed" if one.outcome == "failed" else "was not tried"
            out.print(f"stream {one.stream}: {one.action} {what}: {'' if one.error is None else one.error.message}")
    counts = Counter(one.outcome for one in outcomes)
    if outcomes:
        out.print(
            f"applied: {counts['done']} done, {counts['failed']} failed or refused, {counts['skipped']} not tried"
        )
