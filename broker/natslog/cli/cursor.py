"""`natslog cursor ls | get | set | rm`: positions of consumers and their lag."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from natslog.cli.common import JsonFlag, global_of, position_of
from natslog.cli.output import out, print_json, print_table
from natslog.units import format_size

app = typer.Typer(
    help="Show and change cursors. A change does not affect a running consumer. A consumer of the Python client "
    "resumes at its cursor when it starts. The cursor jetstream:NAME is the JetStream consumer NAME: it is only shown.",
    no_args_is_help=True,
)

Consumer = Annotated[str, typer.Argument(metavar="CONSUMER", help="The consumer's name.")]
Stream = Annotated[str, typer.Argument(metavar="STREAM", help="The stream's name.")]

_COLUMNS = ["consumer", "stream", "offset", "set", "behind", "bytes", "oldest", "state"]
_NUMBERS = {"num_pending": "pending", "num_ack_pending": "ack pending", "num_redelivered": "redelivered"}
_AGES = ((86400.0, "d"), (3600.0, "h"), (60.0, "m"))


@app.command("ls")
def list_cursors(
    context: typer.Context,
    consumer: Annotated[str | None, typer.Option("--consumer", help="Show only the cursors of this consumer.")] = None,
    stream: Annotated[str | None, typer.Option("--stream", help="Show only the cursors on this stream.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """List cursors with their lag, and JetStream consumers also with their pending and redelivered messages."""
    cursors = global_of(context).client().cursors(consumer=consumer, stream=stream)
    if as_json:
        print_json(cursors)
    elif not cursors:
        out.print('no cursors: a Spark source sets one with .option("cursor", NAME), or run natslog cursor set')
    else:
        numbers = _NUMBERS if any("jetstream" in body for body in cursors) else {}
        print_table([*_COLUMNS[:-1], *numbers.values(), _COLUMNS[-1]], [_row(body, tuple(numbers)) for body in cursors])


def _row(body: dict[str, Any], numbers: Sequence[str] = ()) -> list[Any]:
    """Args: numbers: of JetStream consumers, which are shown as well."""
    lag = body["lag"] or dict.fromkeys(("rows", "bytes", "seconds"))
    known = [_if_known(lag["rows"], str), _if_known(lag["bytes"], format_size), _if_known(lag["seconds"], _age)]
    known += [_if_known((body.get("jetstream") or {}).get(name), str) for name in numbers]
    return [body["consumer"], body["stream"], body["offset"], body["timestamp"][:19] + "Z", *known, _state(body)]


def _state(body: dict[str, Any]) -> str:
    lag = body["lag"]
    if lag is None:
        return "lag unknown"
    if lag["lost_rows"]:
        return f"{lag['lost_rows']} deleted by retention before they were read"
    if lag["beyond_rows"]:
        return f"{lag['beyond_rows']} beyond the end"
    if body["rewound"] is not None:
        return f"moved back from {body['rewound']['from']}"
    if body.get("stopped"):
        return "stopped"
    is_behind = body["offset"] < lag["high_watermark"] if lag["rows"] is None else lag["rows"] > 0
    return "behind" if is_behind else "ok"


def _if_known(value: Any, shown: Callable[[Any], str]) -> str:
    return "" if value is None else shown(value)


def _age(seconds: float) -> str:
    """`3.2 s`, `1.5 h`; empty where no message is unread."""
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
    lag, rewound, numbers = body.pop("lag"), body.pop("rewound"), body.pop("jetstream", {})
    rows = [[name, value] for name, value in body.items()]
    if rewound is not None:
        rows.append(["moved back", f"from {rewound['from']} at {rewound['timestamp']}"])
    rows += [[f"lag: {name}", lag[name]] for name in lag if name not in body] if lag else [["lag", "unknown"]]
    rows += [[f"jetstream: {name}", _shown(value)] for name, value in numbers.items()] if numbers is not None else []
    print_table(["of the cursor", "value"], rows)


def _shown(value: Any) -> Any:
    """Of a JetStream consumer."""
    if isinstance(value, dict):
        return f"consumer sequence {value['consumer_seq']}, stream sequence {value['stream_seq']}"
    return "unknown" if value is None else value


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
    """Set the cursor of a consumer. A consumer of the Python client starts there the next time; stop it before. Spark
    resumes from its checkpoint instead.
    """
    client = global_of(context).client()
    body = client.set_cursor(consumer, stream, position_of(client, stream, position))
    print_json(body) if as_json else out.print(f"cursor {consumer} on {stream} is at offset {body['offset']}")


@app.command("rm")
def remove(context: typer.Context, consumer: Consumer, stream: Stream) -> None:
    """Delete a cursor. A running query that uses it as its option creates it again."""
    global_of(context).client().delete_cursor(consumer, stream)
    out.print(f"cursor {consumer} on {stream} was deleted")
