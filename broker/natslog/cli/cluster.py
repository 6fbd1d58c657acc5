"""`natslog cluster status | add | remove | drain | transfer | move | rebalance | log-level | finalize-upgrade |
recover`: for operators.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from natslog.cli import log_level, rebalancing
from natslog.cli.common import JsonFlag, confirm, global_of
from natslog.cli.health import problems_of, summary
from natslog.cli.output import err, out, print_json, print_table
from natslog.errors import InvalidRequest, NatslogError

if TYPE_CHECKING:
    from natslog.client import NatslogClient

app = typer.Typer(help="Show and change the cluster.", no_args_is_help=True)

_POLL_S = 0.5


@app.command()
def status(
    context: typer.Context,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until the cluster is healthy, for at most SECONDS.")
    ] = False,
    seconds: Annotated[
        float | None,
        typer.Argument(metavar="[SECONDS]", min=0, help="Time limit of --wait. Without SECONDS there is no limit."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Show the state, leaders, in-sync replicas and lag of the cluster. Exit code 1 if it is not healthy."""
    if seconds is not None and not wait:
        raise InvalidRequest("SECONDS requires --wait")
    client = global_of(context).client()
    if wait:
        _wait_until_healthy(client, seconds)
    body, streams, problems = _examined(client)
    if as_json:
        print_json(body | {"streams": streams, "healthy": not problems, "problems": problems})
    else:
        _show_status(body, streams)
        out.print()
        for problem in problems:
            out.print(f"problem: {problem}", style="bold red")
        if not problems:
            out.print(summary(body, streams))
    if problems:
        raise typer.Exit(1)


def _examined(client: NatslogClient) -> tuple[dict[str, Any], list[dict[str, Any]], list[str]]:
    """Returns the cluster, its streams and the list of problems."""
    body, streams = client.cluster(), client.streams()
    return body, streams, problems_of(client, body, streams)


def _wait_until_healthy(client: NatslogClient, seconds: float | None) -> None:
    """Returns when the cluster is healthy or the time limit is reached. Problems are printed on standard error
    meanwhile.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    shown: list[str] = []
    while True:
        try:
            problems = _examined(client)[2]
        except NatslogError as error:
            if not error.retriable:
                raise
            problems = [error.message]
        if not problems or (deadline is not None and time.monotonic() >= deadline):
            return
        if problems != shown:
            err.print(f"waiting: {problems[0]}" + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""))
            shown = problems
        time.sleep(_POLL_S)


def _show_status(body: dict[str, Any], streams: list[dict[str, Any]]) -> None:
    current = (
        "" if body["is_current"] else "  (no majority of the brokers could be reached: this is the state of one broker)"
    )
    out.print(f"cluster {body['cluster_id']}, metadata leader {body['metadata_leader']}{current}")
    out.print(_level_line(body))
    out.print(_JETSTREAM[body.get("jetstream", "off")])
    out.print(_leaf_line(body))
    columns = ["broker", "url", "rack", "state", "role", "leads", "replicas", "in sync"]
    print_table(columns, [_broker_row(one) for one in body["brokers"]])
    if streams:
        out.print()
        columns = ["stream", "leader", "epoch", "replicas", "in sync", "end", "state"]
        print_table(columns, [_row(one, is_current=body["is_current"]) for one in streams])


def _leaf_line(body: dict[str, Any]) -> str:
    state, problem = body.get("nats_leaf", "off"), body.get("nats_leaf_problem")
    if state == "off":
        return "leafnode connection to NATS: off, because nats_leaf_url is not set; there are no JetStream consumers"
    return f"leafnode connection to NATS: {state}" + (f": {problem}" if problem else "")


_JETSTREAM = {
    "off": "JetStream API: off",
    "on": "JetStream API: on",
    "forbidden": "JetStream API: off, because the NATS user of the broker lacks permissions (its log names them)",
    "conflict": "JetStream API: off, because another natslog cluster serves it in the same NATS account",
    "domain": "JetStream API: only in the domain natslog ($JS.natslog.API.>), because the NATS server has JetStream",
}


def _level_line(body: dict[str, Any]) -> str:
    line = f"feature level {body['feature_level']}, supported by all brokers: {body['supported_level']}"
    if not body["upgrade_waits"]:
        return line
    if body["upgrade_waits_for"]:
        names = ", ".join(map(str, body["upgrade_waits_for"]))
        return f"{line}; the upgrade can be completed when these brokers are connected and upgraded: {names}"
    return (
        f"{line}; to complete the upgrade, run natslog cluster finalize-upgrade (after it, no broker can be downgraded)"
    )


def _broker_row(body: dict[str, Any]) -> list[Any]:
    state = "up" if body["alive"] else "DOWN"
    state += ", stopping" if body.get("stopping") and body["alive"] else ""  # older brokers do not state it
    state += ", stopped" if body.get("stopping") and not body["alive"] else ""
    state += ", draining" if body["draining"] else ""
    if abs(body["clock_apart_s"]) > 30:
        state += f", clock {body['clock_apart_s']:+.0f} s"
    return [
        body["id"],
        body["url"],
        body["rack"],
        state,
        body["role"],
        body["leads"],
        body["replicas"],
        body["in_sync"],
    ]


def _row(body: dict[str, Any], *, is_current: bool) -> list[Any]:
    replicas, isr = body["replica_ids"], body["isr"]
    state = "under-replicated" if len(isr) < len(replicas) else "ok" if is_current else "unknown"
    if len(isr) < body["min_isr"]:
        state = "writes refused"
    if "problem" in body:
        state = "importing" if body.get("import_state") == "importing" else body["problem"]["code"]
    return [
        body["name"],
        body["leader"] or "none",
        body["leader_epoch"],
        " ".join(map(str, replicas)),
        " ".join(map(str, isr)),
        body.get("high_watermark", ""),
        state,
    ]


@app.command()
def add(
    context: typer.Context,
    url: Annotated[
        str,
        typer.Argument(metavar="URL", help="URL of a broker that was started with --seeds and an empty data folder."),
    ],
    as_json: JsonFlag = False,
) -> None:
    """Add a broker to the cluster. It copies the metadata first and then becomes a voter."""
    body = global_of(context).client().add_broker(url)
    if as_json:
        print_json(body)
    else:
        out.print(f"broker {body['id']} at {url} belongs to the cluster; new streams may be placed on it")


@app.command()
def remove(
    context: typer.Context,
    number: Annotated[int, typer.Argument(metavar="ID", help="The broker's number.")],
    force: Annotated[
        bool,
        typer.Option("--force", help="The broker is permanently lost: do not wait until its replicas have been moved."),
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait until its replicas have been moved to other brokers.")
    ] = True,
) -> None:
    """Remove a broker from the cluster. Its replicas are moved to other brokers first."""
    client = global_of(context).client()
    if not force:
        client.drain_broker(number)
        if not wait:
            out.print(
                f"broker {number} is being drained; when it has no replicas left, run: natslog cluster remove {number}"
            )
            return
        _wait_until_empty(client, number)
    client.remove_broker(number, force=force)
    out.print(
        f"broker {number} was removed from the cluster: stop it if it is still running, and delete its data folder"
    )


def _wait_until_empty(client: NatslogClient, number: int) -> None:
    shown = -1
    while (left := _replicas_of(client, number)) > 0:
        if left != shown:
            out.print(f"{left} replicas to move")
            shown = left
        time.sleep(_POLL_S)


def _replicas_of(client: NatslogClient, number: int) -> int:
    found = [one for one in client.cluster()["brokers"] if one["id"] == number]
    if not found:
        raise InvalidRequest(f"there is no broker {number}")
    return int(found[0]["replicas"])


@app.command()
def drain(
    context: typer.Context,
    number: Annotated[int, typer.Argument(metavar="ID", help="The broker's number.")],
    undo: Annotated[bool, typer.Option("--undo", help="Stop draining: the broker may hold replicas again.")] = False,
) -> None:
    """Move a broker's replicas and leaderships to other brokers. The broker stays in the cluster."""
    global_of(context).client().drain_broker(number, not undo)
    out.print(f"broker {number} {'may hold replicas again' if undo else 'is being drained'}")


@app.command()
def transfer(
    context: typer.Context,
    to: Annotated[int, typer.Argument(metavar="ID", help="The broker that becomes the leader.")],
    stream: Annotated[
        str | None,
        typer.Option(
            "--stream",
            help="Transfer the leadership of this stream. Without --stream, the metadata leadership is transferred.",
        ),
    ] = None,
) -> None:
    """Transfer the leadership of a stream, or of the metadata, to another broker."""
    client = global_of(context).client()
    if stream is not None:
        client.transfer_stream(stream, to)
        out.print(f"broker {to} leads stream {stream}")
        return
    client.transfer_metadata(to)
    deadline = time.monotonic() + 5
    while client.cluster()["metadata_leader"] != to:
        if time.monotonic() > deadline:
            raise NatslogError(
                f"broker {to} did not become metadata leader within 5 s; the metadata leader is unchanged or is "
                "another broker"
            )
        time.sleep(0.1)
    out.print(f"broker {to} is metadata leader")


@app.command()
def move(
    context: typer.Context,
    stream: Annotated[str, typer.Argument(metavar="STREAM")],
    brokers: Annotated[
        str,
        typer.Argument(
            metavar="IDS",
            help="One broker number per replica, for example 1,2,4. The first one becomes the preferred leader.",
        ),
    ],
) -> None:
    """Move a stream's replicas to these brokers. The stream stays available."""
    try:
        numbers = [int(part) for part in brokers.split(",")]
    except ValueError as error:
        raise InvalidRequest(f"{brokers!r} must be a list of broker numbers, for example 1,2,4") from error
    global_of(context).client().move_stream(stream, numbers)
    out.print(
        f"stream {stream} is being moved to brokers {brokers}; natslog cluster status shows when the move is complete"
    )


app.command("rebalance")(rebalancing.rebalance)
app.command("log-level")(log_level.log_level)


@app.command("finalize-upgrade")
def finalize_upgrade(
    context: typer.Context,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Complete an upgrade: brokers may then use the formats of the new version. No broker can be downgraded
    afterwards.
    """
    client = global_of(context).client()
    level = client.cluster()["feature_level"]
    if not yes:
        confirm(
            f"The feature level is {level}. After it is raised, no broker can be downgraded. Raise it?",
            or_else="the feature level was not raised (after raising it, no broker can be downgraded)",
        )
    body = client.finalize_upgrade()
    if as_json:
        print_json(body)
    else:
        out.print(f"the feature level is {body['feature_level']}" + ("" if body["raised"] else " already"))


@app.command()
def recover(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Data folder of the stopped broker that the new cluster starts from.")
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Last resort after the permanent loss of a majority: create a new cluster from the data folder of one stopped
    broker.

    Messages that only the lost brokers stored are lost, including acked messages. Old brokers cannot join with their
    old data folders.
    """
    from natslog.node.metadata.recover import recover as recover_folder

    os.umask(0o077)  # files that are created here are readable by their owner only
    planned = recover_folder(folder, is_dry_run=True)
    if not yes:
        out.print(
            f"broker {planned.broker} holds replicas of {len(planned.kept)} streams; each of them will have one replica"
        )
        if planned.lost:
            out.print(f"lost, because this broker has no replica of them: {', '.join(planned.lost)}", style="bold red")
        confirm(
            "Messages that only the lost brokers stored are lost. Create a new cluster from this broker?",
            or_else="nothing was changed",
        )
    done = recover_folder(folder, is_dry_run=False)
    if as_json:
        print_json(done)
    else:
        out.print(
            f"broker {done.broker} now forms the new cluster {done.cluster_id}: start it, then add brokers and move "
            "streams"
        )
