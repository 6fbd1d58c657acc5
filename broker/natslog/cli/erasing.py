"""`natslog stream erase`: the bytes of messages are removed from all replicas, with a receipt."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from natslog.cli.common import JsonFlag, confirm, global_of
from natslog.cli.output import out, print_json, print_table
from natslog.errors import InvalidRequest

if TYPE_CHECKING:
    from natslog.client import NatslogClient

_POLL_S, _PATIENCE_S = 0.5, 300.0


def erase(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The stream's name.")],
    subject: Annotated[
        str | None, typer.Option("--subject", help="Erase the messages on this subject; * and > as in NATS.")
    ] = None,
    key: Annotated[str | None, typer.Option("--key", help="Erase the messages with this key (Natslog-Key).")] = None,
    receipt: Annotated[
        str | None, typer.Option("--receipt", metavar="ID", help="Show the receipt of an earlier erasure instead.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until all replicas have finished.")] = True,
    yes: Annotated[bool, typer.Option("--yes", "-y", "--force", "-f", help="Do not ask for confirmation.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Erase all messages on a subject, or with a key, from the files of all replicas. Asks for confirmation; without a
    terminal, --yes is required.

    They cannot be read any more at once; then the files that have them are written again, and the receipt lists these.
    ^C ends the waiting only: --receipt ID shows the receipt later. The exit code is 1 if a replica has not finished.
    """
    client = global_of(context).client()
    if sum(one is not None for one in (subject, key, receipt)) != 1:
        raise InvalidRequest("give what to erase: --subject or --key, one of them; or --receipt ID")
    if receipt is not None:
        body = client.erasure(name, receipt)
    else:
        if not yes:
            described = f"all messages of stream {name} " + (f"on {subject}" if key is None else f"with the key {key}")
            confirm(f"Erase {described}? They cannot be restored.", or_else=f"{described} were not erased")
        body = client.erase(name, subject=subject, key=key)
    if wait and not body["complete"]:
        body = _wait_for_erasure(client, name, body, shows=not as_json)
    print_json(body) if as_json else _print_receipt(body)
    if wait and not body["complete"]:
        raise typer.Exit(1)


def _wait_for_erasure(client: NatslogClient, name: str, body: dict[str, Any], *, shows: bool) -> dict[str, Any]:
    """The receipt when all replicas have finished, or no replica that is left makes progress."""
    if shows:
        out.print(f"erasure {body['id']}: {body['messages']} messages are hidden; their files are written again")
    silent_until_s = time.monotonic() + _PATIENCE_S
    while not body["complete"] and time.monotonic() < silent_until_s:
        time.sleep(_POLL_S)
        before, body = body, client.erasure(name, body["id"])
        if _progress_of(body) != _progress_of(before):
            silent_until_s = time.monotonic() + _PATIENCE_S
            if shows:
                files, done = _progress_of(body)
                out.print(f"{files} files written again, {done} of {len(body['replicas'])} replicas have finished")
    return body


def _progress_of(body: dict[str, Any]) -> tuple[int, int]:
    replicas = body["replicas"]
    return sum(len(one["files"]) for one in replicas), sum(one["completed_at"] is not None for one in replicas)


def _print_receipt(body: dict[str, Any]) -> None:
    if body["id"] is None:
        out.print(f"stream {body['name']} has no such messages: nothing was erased")
        return
    columns = ["broker", "file", "bytes before", "bytes after", "messages", "at"]
    rows = [
        [one["broker"], *(file[name] for name in ("name", "bytes_before", "bytes_after", "rows", "at"))]
        for one in body["replicas"]
        for file in one["files"]
    ]
    print_table(columns, rows)
    for one in body["replicas"]:
        state = one.get("problem", {}).get("message") or f"finished at {one['completed_at']}"
        out.print(f"broker {one['broker']}: {state if one['completed_at'] or 'problem' in one else 'not finished yet'}")
        for kept in one["remaining"]:
            out.print(f"broker {one['broker']}: {kept} was kept because it is damaged, and may have them: remove it")
    out.print(
        f"erasure {body['id']} of stream {body['name']}, {body['messages']} messages: "
        + ("complete on all replicas" if body["complete"] else "not complete yet")
    )
    out.print(
        "Not changed: backups (repeat natslog export into each folder), copies at readers, files that they have open"
    )
