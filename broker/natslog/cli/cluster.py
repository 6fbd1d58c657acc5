"""`natslog cluster status | add | remove | drain | transfer | move | finalize-upgrade | recover`: for operators."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from natslog.cli.common import JsonFlag, broker_extra, confirm, err, global_of, out, print_json, print_table
from natslog.cli.health import problems_of, summary
from natslog.errors import InvalidRequest, NatslogError

if TYPE_CHECKING:
    from natslog.client import NatslogClient

app = typer.Typer(help="Look at the cluster, and change it.", no_args_is_help=True)

_POLL_S = 0.5


@app.command()
def status(
    context: typer.Context,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the cluster is healthy, SECONDS at most.")] = False,
    seconds: Annotated[
        float | None, typer.Argument(metavar="[SECONDS]", min=0, help="Of --wait; without it, no limit.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Who is up, who leads what, which replicas are in sync and how far; exit code 1 where something is wrong."""
    if seconds is not None and not wait:
        raise InvalidRequest("SECONDS needs --wait")
    client = global_of(context).client()
    if wait:
        _wait_until_healthy(client, seconds)
    body, streams, problems = _look(client)
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


def _look(client: NatslogClient) -> tuple[dict[str, Any], list[dict[str, Any]], list[str]]:
    """The cluster, its streams, and what is wrong."""
    body, streams = client.cluster(), client.streams()
    return body, streams, problems_of(client, body, streams)


def _wait_until_healthy(client: NatslogClient, seconds: float | None) -> None:
    """Returns when the cluster is healthy, or the time is over; what is wrong meanwhile is on standard error."""
    deadline = None if seconds is None else time.monotonic() + seconds
    shown: list[str] = []
    while True:
        try:
            problems = _look(client)[2]
        except NatslogError as error:
            problems = [error.message]
        if not problems or (deadline is not None and time.monotonic() >= deadline):
            return
        if problems != shown:
            err.print(f"waiting: {problems[0]}" + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""))
            shown = problems
        time.sleep(_POLL_S)


def _show_status(body: dict[str, Any], streams: list[dict[str, Any]]) -> None:
    current = "" if body["is_current"] else "  (no majority could be asked: this is what one broker knows)"
    out.print(f"cluster {body['cluster_id']}, metadata leader {body['metadata_leader']}{current}")
    out.print(_level_line(body))
    columns = ["broker", "url", "rack", "state", "role", "leads", "replicas", "in sync"]
    print_table(columns, [_broker_row(one) for one in body["brokers"]])
    if streams:
        out.print()
        columns = ["stream", "leader", "epoch", "replicas", "in sync", "end", "state"]
        print_table(columns, [_row(one, is_current=body["is_current"]) for one in streams])


def _level_line(body: dict[str, Any]) -> str:
    line = f"feature level {body['feature_level']}, supported by all brokers: {body['supported_level']}"
    if not body["upgrade_waits"]:
        return line
    if body["upgrade_waits_for"]:
        names = ", ".join(map(str, body["upgrade_waits_for"]))
        return f"{line}; an upgrade waits for these brokers to be connected and upgraded: {names}"
    return f"{line}; an upgrade waits: natslog cluster finalize-upgrade (no broker can be downgraded after it)"


def _broker_row(body: dict[str, Any]) -> list[Any]:
    state = "up" if body["alive"] else "DOWN"
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
        state = body["problem"]["code"]
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
        str, typer.Argument(metavar="URL", help="Of a broker with an empty data folder, started with --seeds.")
    ],
    as_json: JsonFlag = False,
) -> None:
    """Make a broker a member; it learns all there is and then votes."""
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
        bool, typer.Option("--force", help="It is lost for good: do not wait for its replicas to be moved.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until its replicas are on others.")] = True,
) -> None:
    """Take a broker out: its replicas are moved to others first."""
    client = global_of(context).client()
    if not force:
        client.drain_broker(number)
        if not wait:
            out.print(f"broker {number} is being drained; when it keeps nothing: natslog cluster remove {number}")
            return
        _wait_until_empty(client, number)
    client.remove_broker(number, force=force)
    out.print(f"broker {number} is out of the cluster: stop it, if it still runs, and delete its data folder")


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
    undo: Annotated[bool, typer.Option("--undo", help="It may keep replicas again.")] = False,
) -> None:
    """Move a broker's replicas and leaderships to others, and keep it in the cluster."""
    global_of(context).client().drain_broker(number, not undo)
    out.print(f"broker {number} {'may keep replicas again' if undo else 'is being drained'}")


@app.command()
def transfer(
    context: typer.Context,
    to: Annotated[int, typer.Argument(metavar="ID", help="The broker that shall lead.")],
    stream: Annotated[
        str | None, typer.Option("--stream", help="This stream's leadership; without it, the metadata leadership.")
    ] = None,
) -> None:
    """Hand leadership over, in order."""
    client = global_of(context).client()
    if stream is not None:
        client.transfer_stream(stream, to)
        out.print(f"broker {to} leads stream {stream}")
        return
    client.transfer_metadata(to)
    deadline = time.monotonic() + 5
    while client.cluster()["metadata_leader"] != to:
        if time.monotonic() > deadline:
            raise NatslogError(f"broker {to} did not take the metadata leadership within 5 s; another one leads on")
        time.sleep(0.1)
    out.print(f"broker {to} is metadata leader")


@app.command()
def move(
    context: typer.Context,
    stream: Annotated[str, typer.Argument(metavar="STREAM")],
    brokers: Annotated[str, typer.Argument(metavar="IDS", help="As many as it has replicas: 1,2,4; the first leads.")],
) -> None:
    """Bring a stream's replicas onto these brokers, while it goes on."""
    try:
        numbers = [int(part) for part in brokers.split(",")]
    except ValueError as error:
        raise InvalidRequest(f"{brokers!r} must be brokers' numbers: 1,2,4") from error
    global_of(context).client().move_stream(stream, numbers)
    out.print(f"stream {stream} moves to brokers {brokers}; natslog cluster status shows when it is done")


@app.command("finalize-upgrade")
def finalize_upgrade(
    context: typer.Context,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """End an upgrade: the brokers may write what the new version adds. No broker can be downgraded after it."""
    client = global_of(context).client()
    level = client.cluster()["feature_level"]
    if not yes:
        confirm(
            f"The feature level is {level}. After it is raised no broker can be downgraded. Raise it?",
            or_else="the feature level is not raised (no broker can be downgraded after it)",
        )
    body = client.finalize_upgrade()
    if as_json:
        print_json(body)
    else:
        out.print(f"the feature level is {body['feature_level']}" + ("" if body["raised"] else " already"))


@app.command()
def recover(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Data folder of the stopped broker to go on with.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Last resort, a majority lost for good: begin a new cluster from what one stopped broker has.

    What only the lost brokers had is gone, acked messages included. Old brokers cannot join with their old folders.
    """
    with broker_extra("natslog cluster recover"):
        from natslog.node.metadata.recover import recover as recover_folder
    planned = recover_folder(folder, is_dry_run=True)
    if not yes:
        out.print(
            f"broker {planned.broker} keeps a replica of {len(planned.kept)} streams, with one replica from then on"
        )
        if planned.lost:
            out.print(f"lost, as no replica is here: {', '.join(planned.lost)}", style="bold red")
        confirm(
            "Messages that only the lost brokers had are gone. Begin a new cluster from this broker?",
            or_else="nothing is changed",
        )
    done = recover_folder(folder, is_dry_run=False)
    if as_json:
        import msgspec

        print_json(msgspec.to_builtins(done))
    else:
        out.print(f"broker {done.broker} is cluster {done.cluster_id} now: start it, then add brokers and move streams")
