"""`natslog repair`: what is damaged, and continuing behind offsets that no replica has any more."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from natslog.cli.common import JsonFlag, confirm, global_of
from natslog.cli.output import out, print_json
from natslog.cli.stream import Name, Yes
from natslog.units import offsets_between


def repair(
    context: typer.Context,
    name: Name,
    accept_loss: Annotated[
        bool, typer.Option("--accept-loss", help="Give up the offsets that are damaged on every replica.")
    ] = False,
    yes: Yes = False,
    as_json: JsonFlag = False,
) -> None:
    """Show what scrubbing found damaged in sealed segments, or give up what cannot be repaired.

    Damage is repaired automatically where another replica is intact. With --accept-loss, offsets that are damaged on
    every replica become removed ones: readers continue behind them. Asks first; without a terminal, --yes is required.
    Without --accept-loss nothing is changed, and the exit code is 1 if there is damage.
    """
    client = global_of(context).client()
    damaged = [one for one in client.scrub(name)["replicas"] if one["damaged"] or "problem" in one]
    if not accept_loss:
        print_json({"name": name, "damaged": damaged}) if as_json else out.print(_explained(name, damaged))
        raise typer.Exit(1 if damaged else 0)
    if not yes:
        confirm(
            f"{_described(damaged)}. Give up those of these offsets that no replica can supply?",
            or_else=f"stream {name} was not changed",
        )
    body = client.accept_loss(name)
    print_json(body) if as_json else out.print(_outcome(name, body["replicas"]))
    if any("problem" in one for one in body["replicas"]):
        raise typer.Exit(1)


def _explained(name: str, damaged: list[dict[str, Any]]) -> str:
    if not damaged:
        return f"stream {name} has no known damage (natslog stream scrub {name} reads all of it)"
    return (
        f"{_described(damaged)}. Damage is repaired from another replica, if one is intact there. To give up offsets "
        f"that are damaged on every replica: natslog repair {name} --accept-loss"
    )


def _described(damaged: list[dict[str, Any]]) -> str:
    if not damaged:
        return "No damage is known"
    return "; ".join(f"broker {one['broker']}: {_ranges(one, 'damaged')}" for one in damaged)


def _outcome(name: str, replicas: list[dict[str, Any]]) -> str:
    lost = "; ".join(f"broker {one['broker']}: {_ranges(one, 'lost')}" for one in replicas)
    return f"stream {name} continues. {lost}"


def _ranges(replica: dict[str, Any], which: str) -> str:
    if "problem" in replica:
        return str(replica["problem"]["message"])
    texts = [offsets_between(one["start"], one["end"]) for one in replica[which] if one["start"] < one["end"]]
    frames = [f"the file of offset {one['start']}" for one in replica[which] if one["start"] == one["end"]]
    return f"{', '.join(texts + frames) or 'nothing'} {'damaged' if which == 'damaged' else 'lost'}"
