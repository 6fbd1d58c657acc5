"""`natslog stream create | ls | info | edit | pause | resume | purge | erase | roll | scrub | seal | rm`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from natslog.cli.common import JsonFlag, confirm, global_of
from natslog.cli.erasing import erase
from natslog.cli.option_groups import OptionGroup, options_of, takes
from natslog.cli.output import out, print_json, print_table
from natslog.errors import InvalidRequest
from natslog.model import SETTINGS, subject_setting, subjects_of
from natslog.units import format_size

_SCRUB_POLL_S = 1.0

app = typer.Typer(help="Create, show, change and delete streams.", no_args_is_help=True)
app.command()(erase)

Name = Annotated[str, typer.Argument(metavar="NAME", help="The stream's name.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", "--force", "-f", help="Do not ask for confirmation.")]

_SHOWN_WHERE_SET = ("former_subjects", "lineage", "import_state")


def _stated(**given: Any) -> dict[str, Any]:
    """The given settings in the form of the API. Raises InvalidRequest."""
    body: dict[str, Any] = {}
    for one in SETTINGS:
        value = given[one.name]
        if isinstance(value, str):
            body[one.name] = one.setting.from_text(value, f"--{one.name.replace('_', '-')}")
        elif value is not None and value != []:
            body[one.name] = [] if value == ["none"] else value
    return body


_settings = OptionGroup(options_of(SETTINGS), _stated)


@app.command()
@takes(settings=_settings)
def create(
    context: typer.Context,
    name: Name,
    subject: Annotated[
        list[str], typer.Option("--subject", help="NATS subject to record; * and > as in NATS. May be repeated.")
    ],
    settings: dict[str, Any],
    as_json: JsonFlag = False,
) -> None:
    """Create a stream. If it exists with the same settings, nothing changes."""
    body = global_of(context).client().create_stream(name, subject, **settings)
    print_json(body) if as_json else out.print(f"stream {name} records {_subjects(body)}")


@app.command("ls")
def list_streams(
    context: typer.Context,
    internal: Annotated[
        bool, typer.Option("--internal", help="Also list the streams that natslog itself writes.")
    ] = False,
    as_toml: Annotated[
        bool, typer.Option("--toml", help="Print their settings as a file for natslog apply, without other facts.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """List all streams."""
    if as_toml and (as_json or internal):
        raise InvalidRequest("--toml cannot be combined with --json or --internal: give one of them")
    streams = global_of(context).client().streams(internal=internal)
    if as_toml:
        from natslog.declared.writing import as_file

        out.print(as_file(streams), end="")
    elif as_json:
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
    refusing = body.get("import_state") or refusing
    state = "problem" if "problem" in body and refusing != "importing" else refusing
    return [
        body["name"],
        _subjects(body),
        body.get("messages", end - start),
        "" if body.get("bytes", 0) is None else format_size(body.get("bytes", 0)),
        start,
        end,
        body["leader"],
        state,
    ]


@app.command()
def info(
    context: typer.Context,
    name: Name,
    subjects: Annotated[
        bool, typer.Option("--subjects", help="Show its subjects instead. Reads the subjects of all messages.")
    ] = False,
    pattern: Annotated[
        str | None, typer.Option("--pattern", help="With --subjects: only those that it covers; * and > as in NATS.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Show one stream, or the subjects of its messages with their numbers."""
    if pattern is not None and not subjects:
        raise InvalidRequest("--pattern is for --subjects: give both")
    client = global_of(context).client()
    if subjects:
        _show_subjects(client.subjects(name, pattern=pattern), as_json=as_json)
        return
    body = client.stream(name)
    if as_json:
        print_json(body)
        return
    problem, scrub = body.pop("problem", None), body.pop("scrub", None)
    if scrub is not None:  # of the leader
        body |= {"scrubbed_at": scrub["scrubbed_at"], "scrub_progress": scrub["scrub_progress"]}
        if lost := scrub.get("lost"):
            body["lost_offsets"] = _ranges(lost)
    if (compressed := body.pop("compressed", None)) is not None:
        stored, whole = format_size(compressed["bytes"]), format_size(compressed["uncompressed_bytes"])
        body["compressed"] = f"{whole} in {stored}, ratio {compressed['ratio']:.2f}"
    body["subject"] = _subjects(body)
    body.pop("subjects", None)
    jetstream = body.pop("jetstream", {})
    body["retention"] = jetstream.pop("retention", "limits")
    body |= {f"jetstream {key}": value for key, value in jetstream.items()}
    if "lineage" in body:
        forks = [f"{fork['id']} up to offset {fork['offset']}" for fork in body["lineage"]]
        body["lineage"] = ", ".join(forks) or None
        body["former_subjects"] = ", ".join(body["former_subjects"]) or None
        body = {key: value for key, value in body.items() if value or key not in _SHOWN_WHERE_SET}
    print_table(["setting", "value"], [[key, value] for key, value in body.items()])
    if problem:
        out.print(f"problem: {problem['message']}", style="bold red")


def _show_subjects(found: Iterator[dict[str, Any]], *, as_json: bool) -> None:
    listed = list(found)
    if as_json:
        print_json(listed)
        return
    columns = ["subject", "messages", "first offset", "last offset"]
    print_table(columns, [[one["subject"], one["count"], one["first"], one["last"]] for one in listed])


@app.command()
@takes(settings=_settings)
def edit(
    context: typer.Context,
    name: Name,
    subject: Annotated[
        list[str] | None,
        typer.Option("--subject", help="Record this subject from now on. May be repeated: name all that are recorded."),
    ] = None,
    *,
    settings: dict[str, Any],
    if_version: Annotated[
        int | None,
        typer.Option("--if-version", min=0, help="Change nothing if settings_version (stream info) is another one."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Change settings; other settings remain unchanged. New replicas are copied in the background before they count."""
    settings = (subject_setting(subject) if subject else {}) | settings
    if not settings:
        raise InvalidRequest("nothing to change: name a setting, as in --max-age 7d")
    condition = {} if if_version is None else {"if_version": if_version}
    body = global_of(context).client().edit_stream(name, **settings, **condition)
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
def resume(context: typer.Context, name: Name, yes: Yes = False, as_json: JsonFlag = False) -> None:
    """Resume a paused stream: messages are accepted again.

    Asks for confirmation if this removes messages: those of an imported stream with the JetStream retention interest,
    as far as no consumer needs them. Without a terminal, --yes is then required.
    """
    client = global_of(context).client()
    if not yes:
        _confirm_interest(client.stream(name))
    body = client.edit_stream(name, paused=False)
    print_json(body) if as_json else out.print(f"stream {name} accepts messages")


def _confirm_interest(body: dict[str, Any]) -> None:
    """Raises InvalidRequest: the stream would lose messages, and the user does not want that."""
    retention = body.get("jetstream", {}).get("retention")
    if body.get("import_state") == "imported" and retention == "interest" and body.get("messages"):
        name = body["name"]
        confirm(
            f"Resume stream {name}, and remove those of its {body['messages']} messages that none of its consumers "
            "needs? (natslog import --switch-over creates the consumers first)",
            or_else=f"stream {name} was not resumed, because messages that none of its consumers needs would be "
            "removed; natslog import --switch-over creates the consumers first",
        )


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
        _ranges(damaged) or "none",
        replica.get("problem", {}).get("message", ""),
    ]


@app.command("delete-message")
def delete_message(
    context: typer.Context,
    name: Name,
    offset: Annotated[int, typer.Argument(metavar="OFFSET", min=0, help="The message's offset.")],
    yes: Yes = False,
    as_json: JsonFlag = False,
) -> None:
    """Delete one message. Asks for confirmation; without a terminal, --yes is required. Other offsets do not change."""
    if not yes:
        described = f"the message at offset {offset} of stream {name}"
        confirm(f"Delete {described}?", or_else=f"{described} was not deleted")
    body = global_of(context).client().delete_message(name, offset)
    print_json(body) if as_json else out.print(f"the message at offset {offset} of stream {name} was deleted")


@app.command()
def purge(
    context: typer.Context,
    name: Name,
    below: Annotated[
        int | None, typer.Option("--below", min=0, help="Delete only the messages below this offset.")
    ] = None,
    subject: Annotated[
        str | None, typer.Option("--subject", help="Delete only messages on this subject; * and > as in NATS.")
    ] = None,
    keep: Annotated[int | None, typer.Option("--keep", min=0, help="Keep so many of the newest messages.")] = None,
    yes: Yes = False,
    as_json: JsonFlag = False,
) -> None:
    """Delete all messages, or those below an offset or on some subjects, or all but the newest. Asks for confirmation;
    without a terminal, --yes is required.

    Offsets are never used again: the next message gets the offset that it would have got.
    """
    client = global_of(context).client()
    if not yes:
        body = client.position(name)
        start, end = body["log_start_offset"], body["high_watermark"]
        upto = end if below is None else min(max(below, start), end)
        messages, behind = (client.lag(name, offset)["rows"] for offset in (start, upto))
        described = f"{messages - behind} of {messages} messages of stream {name} (offsets {start} to {upto - 1})"
        if subject:
            described = f"the messages of stream {name} on {subject} with offsets {start} to {upto - 1}"
        described += f", but for the newest {keep}" if keep else ""
        confirm(f"Delete {described}?", or_else=f"{described} were not deleted")
    body = client.purge(name, below, subject=subject, keep=keep)
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
    messages = body.get("messages", 0)
    if not yes:
        described = f"stream {name} with {messages} messages"
        confirm(f"Delete {described}?", or_else=f"{described} was not deleted")
    client.delete_stream(name)
    print_json({"deleted": name, "messages": messages}) if as_json else out.print(f"stream {name} was deleted")


def _ranges(found: list[dict[str, int]]) -> str:
    """Offsets `[start, end)` with their last one; an empty range is the frame of a file."""
    return ", ".join(f"{one['start']} to {max(one['start'], one['end'] - 1)}" for one in found)
