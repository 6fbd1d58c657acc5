"""What the source is told: which streams, from where to where, in which portions and columns."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, cast

from natslog.client import ClientOptions, NatslogClient, parse_servers
from natslog.errors import ConfigError, did_you_mean
from natslog.subjects import check_name, check_subject
from pyspark_natslog.options import CONNECTION, Given, client_options, naming

Position: TypeAlias = int | Literal["earliest", "latest"]

SOURCE_COLUMNS = ("stream", "offset", "timestamp", "subject", "key", "value")
ALL_COLUMNS = (*SOURCE_COLUMNS, "headers")

_SOURCE = (
    "servers", "stream", "startingOffsets", "startingTimestamp", "endingOffsets", "endingTimestamp", "failOnDataLoss",
    "maxOffsetsPerTrigger", "minPartitions", "maxRecordsPerPartition", "includeHeaders", "columns", "subjectFilter",
    "path", "lag", "cursor", *CONNECTION,
)  # fmt: skip
_BATCH_ONLY = ("endingOffsets", "endingTimestamp")
_STREAM_ONLY = ("maxOffsetsPerTrigger", "lag", "cursor")


@dataclass(frozen=True, slots=True)
class Bound:
    """Where to start or end: a time if one is given, else a position per stream, else the default."""

    timestamp_us: int | None
    positions: Mapping[str, Position]
    default: Position

    def of(self, stream: str) -> Position:
        return self.positions.get(stream, self.default)


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """What the source was told. Picklable; holds no secret but a `token` given in clear."""

    servers: tuple[str, ...]
    streams: tuple[str, ...]
    start: Bound
    end: Bound
    fail_on_data_loss: bool
    max_offsets_per_trigger: int | None
    min_partitions: int | None
    max_records_per_partition: int | None
    include_headers: bool
    columns: tuple[str, ...] | None
    subject_filter: str | None
    reports_lag: bool
    cursor: str | None
    client_options: ClientOptions = field(repr=False)

    @classmethod
    def parse(cls, options: Mapping[str, str], *, streaming: bool | None = None) -> SourceOptions:
        """Checked options.

        Args:
            streaming: whether for a stream; None where Spark only wants the schema and does not say.

        Raises:
            ConfigError: unknown (the nearest known one is named), missing, wrong or clashing.
        """
        given = Given(options, _SOURCE)
        for name in _BATCH_ONLY if streaming else ():
            if given.has(name):
                raise ConfigError(f"option {name} is for batch reads (spark.read); a stream has no end", option=name)
        for name in () if streaming is not False else _STREAM_ONLY:
            if given.has(name):
                raise ConfigError(f"option {name} is for streaming reads (spark.readStream)", option=name)
        streams = _streams(given)
        columns = _columns(given)
        subject_filter = given.text("subjectFilter")
        if subject_filter is not None:
            with naming("subjectFilter"):
                check_subject(subject_filter, wildcards=True)
        return cls(
            servers=parse_servers(given.text("servers")),
            streams=streams,
            start=_bound(given, "starting", streams, "earliest"),
            end=_bound(given, "ending", streams, "latest"),
            fail_on_data_loss=given.flag("failOnDataLoss", True),
            max_offsets_per_trigger=given.whole("maxOffsetsPerTrigger", None),
            min_partitions=given.whole("minPartitions", None),
            max_records_per_partition=given.whole("maxRecordsPerPartition", None),
            include_headers=given.flag("includeHeaders", False),
            columns=columns,
            subject_filter=subject_filter,
            reports_lag=given.flag("lag", True),
            cursor=_cursor(given),
            client_options=client_options(given),
        )

    def selected_columns(self) -> tuple[str, ...]:
        """Columns of the source where Spark was given no schema."""
        return self.columns or (ALL_COLUMNS if self.include_headers else SOURCE_COLUMNS)

    def client(self) -> NatslogClient:
        return NatslogClient(self.servers, self.client_options)


def _streams(given: Given) -> tuple[str, ...]:
    text, path = given.text("stream"), given.text("path")
    if text is not None and path is not None and text != path:
        raise ConfigError(
            f"option stream {text!r} and load({path!r}) name different streams: give one", option="stream"
        )
    names = tuple(name.strip() for name in (text or path or "").split(",") if name.strip())
    if not names:
        raise ConfigError('option stream is missing: .option("stream", "orders")', option="stream")
    for name in names:
        with naming("stream"):
            check_name(name)
    if len(set(names)) != len(names):
        raise ConfigError(f"option stream names {', '.join(names)}: each once, please", option="stream")
    return names


def _cursor(given: Given) -> str | None:
    text = given.text("cursor")
    if text is not None:
        with naming("cursor"):
            check_name(text, "consumer name")
    return text


def _columns(given: Given) -> tuple[str, ...] | None:
    text = given.text("columns")
    if text is None:
        return None
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in ALL_COLUMNS:
            raise ConfigError(
                f"option columns: unknown column {name!r}{did_you_mean(name, ALL_COLUMNS)}", option="columns"
            )
    if not names or len(set(names)) != len(names):
        raise ConfigError("option columns must name at least one column, each once", option="columns")
    if given.flag("includeHeaders", False) and "headers" not in names:
        raise ConfigError("options includeHeaders and columns clash: name headers in columns", option="columns")
    return names


def _bound(given: Given, which: str, streams: tuple[str, ...], default: Position) -> Bound:
    timestamp_us = given.time_us(f"{which}Timestamp")
    name = f"{which}Offsets"
    text = given.text(name)
    if text is None or text in ("earliest", "latest"):
        return Bound(timestamp_us, {}, cast(Position, text or default))
    try:
        positions = json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f"option {name} {text!r} must be earliest, latest or JSON like " + '{"orders": 42, "returns": "latest"}',
            option=name,
        ) from error
    if not isinstance(positions, dict):
        raise ConfigError(f"option {name} {text!r} must be a JSON object of stream to offset", option=name)
    for stream, position in positions.items():
        if stream not in streams:
            raise ConfigError(
                f"option {name} names {stream!r}, which is not read{did_you_mean(stream, streams)}", option=name
            )
        whole = isinstance(position, int) and not isinstance(position, bool) and position >= 0
        if not whole and position not in ("earliest", "latest"):
            raise ConfigError(f"option {name}: {position!r} must be an offset, earliest or latest", option=name)
    return Bound(timestamp_us, positions, default)
