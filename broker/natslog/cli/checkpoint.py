"""`natslog checkpoint show DIR`: the offsets that a Spark query has committed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from natslog.cli.common import JsonFlag
from natslog.cli.output import err, out, print_json
from natslog.errors import ConfigError, InvalidRequest

if TYPE_CHECKING:
    from natslog.client.spark_checkpoint import SourcePositions, SparkCheckpoint

app = typer.Typer(help="Read checkpoints of Spark queries.", no_args_is_help=True)


@app.callback()
def checkpoint() -> None:
    """Read checkpoints of Spark queries."""


@app.command()
def show(
    location: Annotated[
        str,
        typer.Argument(
            metavar="DIR", help="The query's checkpointLocation: a folder, or a URL (file:, s3:, gs:, hdfs:, abfs:)."
        ),
    ],
    batch: Annotated[
        int | None, typer.Option("--batch", min=0, help="Show the end of this batch, not of the last committed one.")
    ] = None,
    source: Annotated[
        str | None, typer.Option("--source", help="Of a query with several natslog sources: the one with this number.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Print the offsets up to which a query has committed, as JSON for the option startingOffsets.

    A query with a new checkpoint that begins there continues without loss, provided that the old query has ended. A
    batch that was begun and not committed is stated on stderr. Neither a broker nor Spark is needed.
    """
    from natslog.client.spark_checkpoint import read_spark_checkpoint

    found = read_spark_checkpoint(location, batch)
    if as_json:
        print_json(_body(found))
        return
    chosen = _chosen(location, found, source)
    for warning in [*found.warnings, *_begun(found, chosen)]:
        err.print(f"note: {warning}")
    out.print(chosen.starting_offsets)


def _chosen(location: str, found: SparkCheckpoint, source: str | None) -> SourcePositions:
    ours = {one.source: one for one in found.sources if one.streams is not None}
    if not ours:
        raise ConfigError(f"the query of {location} reads no natslog stream")
    if source is None and len(ours) > 1:
        shown = "; ".join(f"--source {name}: {', '.join(sorted(one.streams or {}))}" for name, one in ours.items())
        raise InvalidRequest(f"the query of {location} has several natslog sources: choose one by {shown}")
    if source is not None and source not in ours:
        raise InvalidRequest(f"source {source} reads no natslog stream; these do: {', '.join(ours)}")
    return next(iter(ours.values())) if source is None else ours[source]


def _begun(found: SparkCheckpoint, chosen: SourcePositions) -> list[str]:
    """What the next batch was to contain."""
    after = next((one for one in found.planned or [] if one.source == chosen.source), None)
    if after is None or after.streams is None:
        return []
    before = chosen.streams or {}
    moved = [
        f"{name} to offset {at.offset}"
        for name, at in sorted(after.streams.items())
        if name not in before or at.offset != before[name].offset
    ]
    upto = f" ({', '.join(moved)})" if moved else ""
    return [f"batch {found.batch + 1} was begun{upto}, and is not shown here: its rows may be in the sink already"]


def _body(found: SparkCheckpoint) -> dict[str, object]:
    import msgspec

    body: dict[str, object] = msgspec.to_builtins(found)
    body["sources"] = [
        msgspec.to_builtins(one) | ({} if one.streams is None else {"startingOffsets": one.starting_offsets})
        for one in found.sources
    ]
    return body
