"""`natslog stream create | ls | info | edit | pause | resume | purge | roll | scrub | seal | rm`."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from natslog.cli.common import JsonFlag, confirm, global_of, out, print_json, print_table
from natslog.errors import InvalidRequest
from natslog.model import subject_setting, subjects_of
from natslog.units import format_size

_SCRUB_POLL_S = 1.0

app = typer.Typer(help="Create, show, change and delete streams.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="NAME", help="The stream's name.")]
MaxAge = Annotated[
    str | None, typer.Option("--max-age", help="Delete messages older than this: 12h, 7d; none: no limit.")
]
MaxBytes = Annotated[str | None, typer.Option("--max-bytes", help="Keep at most this size: 10GiB; none: no limit.")]
MaxMessages = Annotated[
    str | None, typer.Option("--max-messages", help="Keep at most this number of messages; none: no limit.")
]
Window = Annotated[
    str | None,
    typer.Option("--dedupe-window", help="Store each Nats-Msg-Id once within this time: 2m; 0: no deduplication."),
]
Compression = Annotated[
    str | None, typer.Option("--compression", help="Compression of sealed segments: zstd, lz4 or none.")
]

Replicas = Annotated[int | None, typer.Option("--replicas", help="Number of replicas.")]
MinIsr = Annotated[int | None, typer.Option("--min-isr", help="Number of replicas that must be in sync for writes.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", "--force", "-f", help="Do not ask for confirmation.")]

Acks = Annotated[
    str | None,
    typer.Option(
        "--acks",
        help="Where acks go: reply (to each message's reply subject), header (to the subject in Natslog-Ack-To) or "
        "never. To record the requests to a service, use header or never.",
    ),
]


def _settings(**given: Any) -> dict[str, Any]:
    """The given options in the form of the API; `none` removes a limit."""
    return {
        name: None if value == "none" and name != "compression" else value
        for name, value in given.items()
        if value is not None
    }


def _count(text: str | None) -> int | str | None:
    if text is None or text == "none":
        return text
    if not text.isdecimal():
        raise InvalidRequest(f"--max-messages {text!r} must be a whole number or none")
    return int(text)


@app.command()
def create(
    context: typer.Context,
    name: Name,
    subject: Annotated[
        list[str], typer.Option("--subject", help="NATS subject to record; * and > as in NATS. May be repeated.")
    ],
    replicas: Replicas = None,
    min_isr: MinIsr = None,
    group: Annotated[
        str | None, typer.Option("--group", help="Share the subject with the group's other streams.")
    ] = None,
    max_age: MaxAge = None,
    max_bytes: MaxBytes = None,
    max_messages: MaxMessages = None,
    compression: Compression = None,
    dedupe_window: Window = None,
    acks: Acks = None,
    as_json: JsonFlag = False,
) -> None:
    """Create a stream. If it exists with the same settings, nothing changes."""
    settings = _settings(
        replicas=replicas,
        min_isr=min_isr,
        group=group,
        max_age=max_age,
        max_bytes=max_bytes,
        max_messages=_count(max_messages),
        compression=compression,
        dedupe_window=dedupe_window,
        acks=acks,
    )
    body = global_of(context).client().create_stream(name, subject, **settings)
    print_json(body) if as_json else out.print(f"stream {name} records {_subjects(body)}")


@app.command("ls")
def list_streams(context: typer.Context, as_json: JsonFlag = False) -> None:
    """List all streams."""
    streams = global_of(context).client().streams()
    if as_json:
        print_json(streams)
    elif not streams:
        out.print("no streams yet: natslog stream create NAME --subject SUBJECT")
        return
    else:
        columns = ["name", "subject", "messages", "bytes", "start", "end", "leader", "state"]
        print_table(columns, [_row(body) for body in streams])


def _subjects(body: dict[str, Any]) -> str:
    return ", ".join(subjects_of(body))


def _row(body: dict[str, Any]) -> list[Any]:
    start, end = body.get("log_start_offset", 0), body.get("high_watermark", 0)
    refusing = "sealed" if body.get("sealed") else "paused" if body["paused"] else "ok"
    state = "problem" if "problem" in body else refusing
    return [
        body["name"],
        _subjects(body),
        end - start,
        "" if body.get("bytes", 0) is None else format_size(body.get("bytes", 0)),
        start,
        end,
        body["leader"],
        state,
    ]


@app.command()
def info(context: typer.Context, name: Name, as_json: JsonFlag = False) -> None:
    """Show one stream."""
    body = global_of(context).client().stream(name)
    if as_json:
        print_json(body)
        return
    problem, scrub = body.pop("problem", None), body.pop("scrub", None)
    if scrub is not None:  # of the leader
        body |= {"scrubbed_at": scrub["scrubbed_at"], "scrub_progress": scrub["scrub_progress"]}
    body["subject"] = _subjects(body)
    body.pop("subjects", None)
    print_table(["setting", "value"], [[key, value] for key, value in body.items()])
    if problem:
        out.print(f"problem: {problem['message']}", style="bold red")


@app.command()
def edit(
    context: typer.Context,
    name: Name,
    subject: Annotated[
        list[str] | None,
        typer.Option("--subject", help="Record this subject from now on. May be repeated: name all that are recorded."),
    ] = None,
    replicas: Replicas = None,
    min_isr: MinIsr = None,
    max_age: MaxAge = None,
    max_bytes: MaxBytes = None,
    max_messages: MaxMessages = None,
    compression: Compression = None,
    dedupe_window: Window = None,
    acks: Acks = None,
    as_json: JsonFlag = False,
) -> None:
    """Change settings; other settings remain unchanged. New replicas are copied in the background before they count."""
    settings = _settings(
        **(subject_setting(subject) if subject else {}),
        replicas=replicas,
        min_isr=min_isr,
        max_age=max_age,
        max_bytes=max_bytes,
        max_messages=_count(max_messages),
        compression=compression,
        dedupe_window=dedupe_window,
        acks=acks,
    )
    if not settings:
        raise InvalidRequest("nothing to change: name a setting, as in --max-age 7d")
    body = global_of(context).client().edit_stream(name, **settings)
    if as_json:
        print_json(body)
        return
    out.print(f"stream {name} changed: {', '.join(settings)}")
    if target := body.get("target_replica_ids"):
        out.print(
            f"its replicas are being moved to brokers {', '.join(map(str, target))}; replicas and min_isr change "
            f"when this is complete (see natslog stream info {name})"
        )


@app.command()
def pause(context: typer.Context, name: Name, as_json: JsonFlag = False) -> None:
    """Pause a stream: messages are refused until it is resumed. Reads continue."""
    body = global_of(context).client().edit_stream(name, paused=True)
    print_json(body) if as_json else out.print(f"stream {name} is paused: new messages are refused")


@app.command()
def resume(context: typer.Context, name: Name, as_json: JsonFlag = False) -> None:
    """Resume a paused stream: messages are accepted again."""
    body = global_of(context).client().edit_stream(name, paused=False)
    print_json(body) if as_json else out.print(f"stream {name} accepts messages")


@app.command()
def roll(context: typer.Context, name: Name, as_json: JsonFlag = False) -> None:
    """Close the active segment, so that other programs can read all stored messages (at the stream's leader)."""
    body = global_of(context).client().roll(name)
    print_json(body) if as_json else out.print(
        f"all offsets below {body['sealed_end']} are in {body['folder']}/*.arrow"
    )


@app.command()
def scrub(
    context: typer.Context,
    name: Name,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until all replicas were read.")] = True,
    as_json: JsonFlag = False,
) -> None:
    """Read all sealed segments of a stream back from the disks of all replicas now, at the configured rate.

    Damage is repaired from another replica, where there is one. The exit code is 1 if a replica is damaged or does not
    answer. ^C ends the waiting only; GET /v1/streams/NAME/scrub shows the state.
    """
    client = global_of(context).client()
    body = client.scrub(name, begin=True)
    while wait and any(one["scrub_progress"] is not None for one in body["replicas"]):
        time.sleep(_SCRUB_POLL_S)
        body = client.scrub(name)
    if as_json:
        print_json(body)
    else:
        columns = ["broker", "scrubbed at", "progress", "damaged offsets", "problem"]
        print_table(columns, [_scrub_row(one) for one in body["replicas"]])
    if any(one["damaged"] or "problem" in one for one in body["replicas"]):
        raise typer.Exit(1)


def _scrub_row(replica: dict[str, Any]) -> list[Any]:
    progress, damaged = replica["scrub_progress"], replica["damaged"]
    return [
        replica["broker"],
        replica["scrubbed_at"] or "never",
        "" if progress is None else f"{progress:.0%}",
        ", ".join(f"{one['start']} to {one['end']}" for one in damaged) or "none",
        replica.get("problem", {}).get("message", ""),
    ]


@app.command()
def purge(
    context: typer.Context,
    name: Name,
    below: Annotated[
        int | None, typer.Option("--below", min=0, help="Delete only the messages below this offset.")
    ] = None,
    yes: Yes = False,
    as_json: JsonFlag = False,
) -> None:
    """Delete all messages, or those below an offset. Asks for confirmation; without a terminal, --yes is required.

    Offsets are never used again: the next message gets the offset that it would have got.
    """
    client = global_of(context).client()
    if not yes:
        body = client.position(name)
        start, end = body["log_start_offset"], body["high_watermark"]
        upto = end if below is None else min(max(below, start), end)
        described = f"{upto - start} of {end - start} messages of stream {name} (offsets {start} to {upto - 1})"
        confirm(f"Delete {described}?", or_else=f"{described} were not deleted")
    body = client.purge(name, below)
    print_json(body) if as_json else out.print(
        f"{body['purged']} messages were deleted: stream {name} now starts at offset {body['log_start_offset']}"
    )


@app.command()
def seal(context: typer.Context, name: Name, yes: Yes = False, as_json: JsonFlag = False) -> None:
    """Make a stream permanently read-only. Asks first; without a terminal, --yes is required.

    Nothing is added to a sealed stream or removed from it any more, by retention neither. It can be read, given another
    number of replicas, and deleted as a whole. It no longer subscribes to its subject.
    """
    client = global_of(context).client()
    if not yes:
        client.stream(name)
        confirm(f"Make stream {name} permanently read-only?", or_else=f"stream {name} was not sealed")
    body = client.seal(name)
    print_json(body) if as_json else out.print(f"stream {name} is sealed: it is permanently read-only")


@app.command("rm")
def remove(
    context: typer.Context,
    name: Name,
    yes: Yes = False,
    as_json: JsonFlag = False,
) -> None:
    """Delete a stream; its files are deleted after a grace period. Asks for confirmation; without a terminal, --yes is
    required.
    """
    client = global_of(context).client()
    body = client.stream(name)
    messages = body.get("high_watermark", 0) - body.get("log_start_offset", 0)
    if not yes:
        described = f"stream {name} with {messages} messages"
        confirm(f"Delete {described}?", or_else=f"{described} was not deleted")
    client.delete_stream(name)
    print_json({"deleted": name, "messages": messages}) if as_json else out.print(f"stream {name} was deleted")
