"""`natslog cluster rebalance`: replicas are moved until all brokers have even loads."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Annotated, Any

import typer

from natslog.cli.common import JsonFlag, global_of
from natslog.cli.output import err, out, print_json, print_table

if TYPE_CHECKING:
    from natslog.client import NatslogClient

_AT_ONCE = 4  # streams of which replicas are copied at the same time
_POLL_S = 1.0


def rebalance(
    context: typer.Context,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the moves, and move nothing.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Even out the replicas, preferred leaders and bytes of the brokers with as few moves as possible, for example
    after a broker was added. Racks and placement tags are respected.

    At most four streams are copied at the same time; all streams stay available. ^C stops it: moves that have begun are
    completed, and the same command goes on later.
    """
    client = global_of(context).client(patience_s=30.0)
    plan = client.plan()
    if as_json and dry_run:
        print_json(plan)
        return
    if not as_json:
        _show(plan)
    if dry_run:
        return
    skipped = _run(client, plan, shows=not as_json)
    if as_json:
        print_json({"moved": len(plan["moves"]) - len(skipped), "skipped": skipped})
    elif plan["moves"]:
        out.print(f"{len(plan['moves']) - len(skipped)} streams were moved, {len(skipped)} were not")
    if skipped:
        raise typer.Exit(1)


def _show(plan: dict[str, Any]) -> None:
    columns = ["broker", "replicas", "after", "leaders", "after", "bytes", "after"]
    fields = ("id", "replicas", "replicas_after", "leaders", "leaders_after", "bytes", "bytes_after")
    print_table(columns, [[one[field] for field in fields] for one in plan["brokers"]])
    out.print()
    if not plan["moves"]:
        out.print("the brokers have even loads: nothing is to be moved")
        return
    print_table(
        ["stream", "replicas", "after", "bytes to copy"],
        [
            [one["stream"], " ".join(map(str, one["before"])), " ".join(map(str, one["after"])), one["copied_bytes"]]
            for one in plan["moves"]
        ],
    )
    copied = sum(one["copied_bytes"] for one in plan["moves"])
    out.print(f"{len(plan['moves'])} streams to move, {copied:,} bytes to copy")


def _run(client: NatslogClient, plan: dict[str, Any], *, shows: bool) -> list[dict[str, str]]:
    """Returns the streams that were not moved, and why."""
    waiting, skipped = deque(plan["moves"]), list[dict[str, str]]()
    while True:
        streams = {one["name"]: one for one in client.streams()}
        under_way = [name for name, one in streams.items() if "target_replica_ids" in one]
        while waiting and len(under_way) < _AT_ONCE:
            move = waiting.popleft()
            if (why_not := _begin(client, streams.get(move["stream"]), move)) is not None:
                skipped.append({"stream": move["stream"], "reason": why_not})
                err.print(f"stream {move['stream']} is not moved: {why_not}")
            elif set(move["before"]) != set(move["after"]):
                under_way.append(move["stream"])
        if not waiting and not under_way:
            return skipped
        if shows:
            err.print(f"{len(waiting)} streams to go, {len(under_way)} under way: {', '.join(sorted(under_way))}")
        time.sleep(_POLL_S)


def _begin(client: NatslogClient, stream: dict[str, Any] | None, move: dict[str, Any]) -> str | None:
    """Why it was not begun."""
    from natslog.errors import NatslogError

    if stream is None:
        return "it was deleted"
    if stream.get("target_replica_ids", stream["replica_ids"]) != move["before"]:
        return "its replicas were moved meanwhile: run the command again"
    try:
        client.move_stream(move["stream"], move["after"])
    except NatslogError as error:
        return error.message
    return None
