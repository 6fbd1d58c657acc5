"""`natslog activity`: the events of the cluster, a line each."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from natslog.cli.common import global_of
from natslog.cli.output import out, print_json

_STREAM = "__activity"
_WAIT_MS = 20_000
_FOLLOW_PATIENCE_S = 120.0


def activity(
    context: typer.Context,
    start: Annotated[
        str, typer.Option("--from", help="An offset, a time (ISO-8601), earliest or latest.")
    ] = "earliest",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing new events as they arrive.")] = False,
    subject: Annotated[
        str | None, typer.Option("--subject", help="Print only these events, for example 'activity.stream.>'.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per event.")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of events, and exit.")] = False,
) -> None:
    """Print what has happened in the cluster, who changed what, and from where."""
    if schema:
        from natslog.cluster.activity import schema as schema_of_events

        print_json(schema_of_events())
        return
    consumer = (
        global_of(context)
        .client()
        .consume(
            _STREAM,
            start=int(start) if start.isdecimal() else start,
            follow=follow,
            subject=subject,
            wait_ms=_WAIT_MS,
            patience_s=_FOLLOW_PATIENCE_S if follow else 0.0,
        )
    )
    for batch in consumer:
        for value in batch.record_batch.column("value").to_pylist():
            out.print(value.decode() if as_json else _line(json.loads(value)))
        sys.stdout.flush()


def _line(event: dict[str, Any]) -> str:
    about = event.get("stream") or (f"broker {event['broker']}" if "broker" in event else "")
    who = " ".join(filter(None, [event.get("identity"), event.get("address") and f"from {event['address']}"]))
    was, now = (json.dumps(event[name]) if event.get(name) else "" for name in ("before", "after"))
    what = f"{was} → {now}" if was and now else was or now
    parts = [event["time"], event["event"].removeprefix("activity."), about, what, event.get("message"), who]
    return "  ".join(filter(None, parts))
