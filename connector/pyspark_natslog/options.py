"""Options of source and sink: parsed once, checked before any job starts, never silently ignored."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, cast

from natslog.client import ClientOptions, NatslogClient, parse_servers
from natslog.errors import ConfigError, InvalidRequest, did_you_mean
from natslog.model import MAX_IN_FLIGHT, Ack
from natslog.subjects import check_name, check_subject
from natslog.times import parse_timestamp_us
from natslog.units import parse_duration_s

Position: TypeAlias = int | Literal["earliest", "latest"]

SOURCE_COLUMNS = ("stream", "offset", "timestamp", "subject", "key", "value")
ALL_COLUMNS = (*SOURCE_COLUMNS, "headers")

_CONNECTION = ("token", "tokenFile", "tlsCaFile", "tlsCertFile", "tlsKeyFile")
_SOURCE = (
    "servers", "stream", "startingOffsets", "startingTimestamp", "endingOffsets", "endingTimestamp", "failOnDataLoss",
    "maxOffsetsPerTrigger", "minPartitions", "maxRecordsPerPartition", "includeHeaders", "columns", "subjectFilter",
    "fetchTimeout", "fetchRetries", "retryInterval", "path", *_CONNECTION,
)  # fmt: skip
_BATCH_ONLY = ("endingOffsets", "endingTimestamp")
_STREAM_ONLY = ("maxOffsetsPerTrigger",)
_SINK = (
    "natsServers", "subject", "ack", "msgIdColumn", "maxInFlight", "ackTimeout", "natsCredsFile", "natsUser",
    "natsPasswordFile",
)  # fmt: skip
_SPARKS_OWN = ("checkpointlocation", "queryname", "outputmode")
"""Options that Spark adds or keeps for itself."""


class _Given:
    """Options as given, by lower-case name; those not read at the end are unknown."""

    def __init__(self, options: Mapping[str, str], known: tuple[str, ...]) -> None:
        self._values = {name.lower(): str(value).strip() for name, value in options.items()}
        by_lower = {name.lower(): name for name in known}
        for name in options:
            if name.lower() not in by_lower and name.lower() not in _SPARKS_OWN:
                raise ConfigError(f"unknown option {name!r}{did_you_mean(name, known)}", option=name)

    def has(self, name: str) -> bool:
        return name.lower() in self._values

    def text(self, name: str, default: str | None = None) -> str | None:
        return self._values.get(name.lower(), default)

    def flag(self, name: str, default: bool) -> bool:
        text = (self.text(name) or str(default)).lower()
        if text not in ("true", "false"):
            raise ConfigError(f"option {name} {text!r} must be true or false", option=name)
        return text == "true"

    def whole(self, name: str, default: int | None, low: int = 1) -> int | None:
        text = self.text(name)
        if text is None:
            return default
        if not text.isdecimal() or int(text) < low:
            raise ConfigError(f"option {name} {text!r} must be a whole number of at least {low}", option=name)
        return int(text)

    def seconds(self, name: str, default: float) -> float:
        text = self.text(name)
        try:
            return default if text is None else parse_duration_s(text, f"option {name}")
        except InvalidRequest as error:
            raise ConfigError(error.message, option=name) from error

    def time_us(self, name: str) -> int | None:
        text = self.text(name)
        try:
            return None if text is None else parse_timestamp_us(text, f"option {name}")
        except InvalidRequest as error:
            raise ConfigError(error.message, option=name) from error


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
    client_options: ClientOptions = field(repr=False)

    @classmethod
    def parse(cls, options: Mapping[str, str], *, streaming: bool | None = None) -> SourceOptions:
        """Checked options.

        Args:
            streaming: whether for a stream; None where Spark only wants the schema and does not say.

        Raises:
            ConfigError: unknown (the nearest known one is named), missing, wrong or clashing.
        """
        given = _Given(options, _SOURCE)
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
            _as_config("subjectFilter", lambda: check_subject(subject_filter, wildcards=True))
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
            client_options=_client_options(given),
        )

    def selected_columns(self) -> tuple[str, ...]:
        """Columns of the source where Spark was given no schema."""
        return self.columns or (ALL_COLUMNS if self.include_headers else SOURCE_COLUMNS)

    def client(self) -> NatslogClient:
        return NatslogClient(self.servers, self.client_options)


def _streams(given: _Given) -> tuple[str, ...]:
    text, path = given.text("stream"), given.text("path")
    if text is not None and path is not None and text != path:
        raise ConfigError(
            f"option stream {text!r} and load({path!r}) name different streams: give one", option="stream"
        )
    names = tuple(name.strip() for name in (text or path or "").split(",") if name.strip())
    if not names:
        raise ConfigError('option stream is missing: .option("stream", "orders")', option="stream")
    for name in names:
        _as_config("stream", lambda name=name: check_name(name))
    if len(set(names)) != len(names):
        raise ConfigError(f"option stream names {', '.join(names)}: each once, please", option="stream")
    return names


def _columns(given: _Given) -> tuple[str, ...] | None:
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


def _bound(given: _Given, which: str, streams: tuple[str, ...], default: Position) -> Bound:
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


def _client_options(given: _Given) -> ClientOptions:
    timeout_s = given.seconds("fetchTimeout", 30.0)
    return ClientOptions(
        timeout_s=timeout_s,
        retries=given.whole("fetchRetries", 5, low=0) or 0,
        retry_interval_s=given.seconds("retryInterval", 0.2),
        patience_s=timeout_s,
        token=given.text("token"),
        token_file=given.text("tokenFile"),
        tls_ca_file=given.text("tlsCaFile"),
        tls_cert_file=given.text("tlsCertFile"),
        tls_key_file=given.text("tlsKeyFile"),
    )


def _as_config(option: str, check: Any) -> None:
    try:
        check()
    except InvalidRequest as error:
        raise ConfigError(f"option {option}: {error.message}", option=option) from error


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """What the sink was told; files are read where they are used."""

    nats_url: str | None
    subject: str | None
    ack: Ack
    message_id_column: str | None
    max_in_flight: int
    ack_timeout_s: float
    creds_file: str | None
    user: str | None
    password_file: str | None

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> SinkOptions:
        """Checked options.

        Raises:
            ConfigError: unknown (the nearest known one is named) or wrong.
        """
        given = _Given(options, _SINK)
        subject, ack = given.text("subject"), (given.text("ack") or "flush").lower()
        if subject is not None:
            _as_config("subject", lambda: check_subject(subject, wildcards=False))
        if ack not in ("none", "flush", "stored"):
            raise ConfigError(f"option ack {ack!r} must be none, flush or stored", option="ack")
        return cls(
            nats_url=given.text("natsServers"),
            subject=subject,
            ack=cast(Ack, ack),
            message_id_column=given.text("msgIdColumn"),
            max_in_flight=given.whole("maxInFlight", MAX_IN_FLIGHT) or MAX_IN_FLIGHT,
            ack_timeout_s=given.seconds("ackTimeout", 30.0),
            creds_file=given.text("natsCredsFile"),
            user=given.text("natsUser"),
            password_file=given.text("natsPasswordFile"),
        )
