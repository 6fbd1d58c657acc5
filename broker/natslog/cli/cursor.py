"""`natslog cursor ls | get | set | rm`: where consumers stand, and how far they are behind."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from natslog.cli.common import JsonFlag, global_of, out, position_of, print_json, print_table
from natslog.units import format_size

app = typer.Typer(help="See where consumers stand; readers do not depend on it.", no_args_is_help=True)

Consumer = Annotated[str, typer.Argument(metavar="CONSUMER", help="The consumer's name.")]
Stream = Annotated[str, typer.Argument(metavar="STREAM", help="The stream's name.")]

_COLUMNS = ["consumer", "stream", "offset", "set", "behind", "bytes", "oldest", "state"]
_AGES = ((86400.0, "d"), (3600.0, "h"), (60.0, "m"))


@app.command("ls")
def list_cursors(
    context: typer.Context,
    consumer: Annotated[str | None, typer.Option("--consumer", help="Only this one's.")] = None,
    stream: Annotated[str | None, typer.Option("--stream", help="Only on this one.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """List cursors with their lag."""
    cursors = global_of(context).client().cursors(consumer=consumer, stream=stream)
    if as_json:
        print_json(cursors)
    elif not cursors:
        out.print('no cursors: a Spark source sets one with .option("cursor", NAME), natslog cursor set by hand')
    else:
        print_table(_COLUMNS, [_row(body) for body in cursors])


def _row(body: dict[str, Any]) -> list[Any]:
    lag = body["lag"]
    known = [lag["rows"], format_size(lag["bytes"]), _age(lag["seconds"])] if lag else ["", "", ""]
    return [body["consumer"], body["stream"], body["offset"], body["timestamp"][:19] + "Z", *known, _state(body)]


def _state(body: dict[str, Any]) -> str:
    lag = body["lag"]
    if lag is None:
        return "lag unknown"
    if lag["lost_rows"]:
        return f"{lag['lost_rows']} lost to retention"
    if lag["beyond_rows"]:
        return f"{lag['beyond_rows']} beyond the end"
    if body["rewound"] is not None:
        return f"moved back from {body['rewound']['from']}"
    return "behind" if lag["rows"] else "ok"


def _age(seconds: float) -> str:
    """`3.2 s`, `1.5 h`; nothing where nothing waits."""
    for size, unit in _AGES:
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s" if seconds else ""


@app.command()
def get(context: typer.Context, consumer: Consumer, stream: Stream, as_json: JsonFlag = False) -> None:
    """Show one cursor."""
    body = global_of(context).client().cursor(consumer, stream)
    if as_json:
        print_json(body)
        return
    lag, rewound = body.pop("lag"), body.pop("rewound")
    rows = [[name, value] for name, value in body.items()]
    if rewound is not None:
        rows.append(["moved back", f"from {rewound['from']} at {rewound['timestamp']}"])
    rows += [[f"lag: {name}", lag[name]] for name in lag if name not in body] if lag else [["lag", "unknown"]]
    print_table(["of the cursor", "value"], rows)


@app.command("set")
def set_cursor(
    context: typer.Context,
    consumer: Consumer,
    stream: Stream,
    position: Annotated[
        str, typer.Argument(metavar="POSITION", help="An offset, a time (ISO-8601), earliest or latest.")
    ],
    as_json: JsonFlag = False,
) -> None:
    """Say where a consumer stands; no reader is moved by it."""
    client = global_of(context).client()
    body = client.set_cursor(consumer, stream, position_of(client, stream, position))
    print_json(body) if as_json else out.print(f"cursor {consumer} on {stream} stands at offset {body['offset']}")


@app.command("rm")
def remove(context: typer.Context, consumer: Consumer, stream: Stream) -> None:
    """Forget a cursor; a query that has it as its option sets it again."""
    global_of(context).client().delete_cursor(consumer, stream)
    out.print(f"cursor {consumer} on {stream} is gone")
