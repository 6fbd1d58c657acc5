"""Options of the source: which streams, which range, how much per trigger and task, and which columns."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, cast

from pyspark.sql.types import DataType, StructType

from natslog.client import ClientOptions, NatslogClient, parse_servers
from natslog.errors import ConfigError, InvalidRequest, did_you_mean
from natslog.subjects import check_name, check_subject
from natslog.times import parse_timestamp_us
from pyspark_natslog.options import CONNECTION, Given, client_options, naming
from pyspark_natslog.payload import PAYLOAD_OPTIONS, PayloadOptions
from pyspark_natslog.source.buckets import BUCKET_COLUMNS, BUCKET_METADATA, BUCKET_TYPES, Bucket
from pyspark_natslog.source.losses import Losses
from pyspark_natslog.source.schema import HEADERS_AS_MAP, METADATA_COLUMNS, spark_schema
from pyspark_natslog.source.selection import Selection

Position: TypeAlias = int | str
"""An offset, `earliest`, `latest`, or (where a read starts) `cursor:NAME`."""

ReadFrom: TypeAlias = Literal["nearest", "leader", "any"]

SOURCE_COLUMNS = ("stream", "offset", "timestamp", "subject", "key", "value")
ALL_COLUMNS = (*SOURCE_COLUMNS, "headers")

_BATCH_ONLY = ("endingOffsets", "endingTimestamp", "view")
_STREAM_ONLY = (
    "maxOffsetsPerTrigger",
    "maxBytesPerTrigger",
    "minOffsetsPerTrigger",
    "maxTriggerDelay",
    "lag",
    "cursor",
    "realTimeReaders",
    "realTimeReadersBy",
)
SOURCE_OPTIONS = (
    "servers", "stream", "streamPattern", "group", "bucket", "path", "startingOffsets", "startingTimestamp",
    "failOnDataLoss", "minPartitions", "maxRecordsPerPartition", "maxBytesPerPartition", "readFrom", "rack",
    "includeHeaders", "columns", "subjectFilter", "headersAs", "tombstones", "filterPushdown",
    *PAYLOAD_OPTIONS, *_BATCH_ONLY,
    *_STREAM_ONLY, *CONNECTION,
)  # fmt: skip
SELECTORS = ("stream", "streamPattern", "group", "bucket")
CURSOR = "cursor:"
_OF_JETSTREAM = "jetstream:"
FIRST_ANSWER_WITHIN_S = 10.0
"""What plans a read fails where no broker has answered by then: the URL is probably wrong."""
_TASK_BYTES = 64 * 1024 * 1024
_MOST_TASK_BYTES = 512 * 1024 * 1024
_TRIGGER_DELAY_S = 15 * 60.0


@dataclass(frozen=True, slots=True)
class Bound:
    """Where to start or end: a time if one is given, else a position per stream, else the default."""

    timestamp_us: int | None
    timestamps_us: Mapping[str, int]
    positions: Mapping[str, Position]
    default: Position

    def time_us_of(self, stream: str) -> int | None:
        return self.timestamps_us.get(stream, self.timestamp_us)

    def of(self, stream: str) -> Position:
        return self.positions.get(stream, self.default)


@dataclass(frozen=True, slots=True)
class Admission:
    """How much one trigger takes. A batch waits for `min_rows`, but not longer than `max_delay_s`."""

    max_rows: int | None
    max_bytes: int | None
    min_rows: int | None
    max_delay_s: float


@dataclass(frozen=True, slots=True)
class Cutting:
    """How a range becomes tasks. `min_tasks` None: as many as run at once, if the range is large enough. `usual_bytes`:
    of a task; up to `max_bytes` if there is more to read than two such tasks for each core.
    """

    min_tasks: int | None
    max_rows: int | None
    usual_bytes: int
    max_bytes: int
    read_from: ReadFrom
    rack: str | None


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """The checked options. Picklable; contains no secret except a `token` that was given as text.

    `bucket`: of which the stream is the history, if its rows are read as those of a table.
    """

    servers: tuple[str, ...] = field(repr=False)
    selection: Selection
    bucket: Bucket | None
    start: Bound
    end: Bound
    fail_on_data_loss: bool
    admission: Admission
    cutting: Cutting
    include_headers: bool
    headers_as_map: bool
    columns: tuple[str, ...] | None
    subject_filter: str | None
    is_latest_view: bool
    payload: PayloadOptions
    reports_lag: bool
    cursor: str | None
    client_options: ClientOptions = field(repr=False)
    losses: Losses = field(default_factory=Losses, repr=False, compare=False)

    @classmethod
    def parse(cls, options: Mapping[str, str], *, streaming: bool | None = None) -> SourceOptions:
        """Checked options.

        Args:
            streaming: whether for a stream; None if Spark only requests the schema.

        Raises:
            ConfigError: unknown (the nearest known one is named), missing, wrong or clashing.
        """
        given = Given(options, SOURCE_OPTIONS)
        _check_kind(given, streaming)
        selection, bucket = _selection(given), _bucket(given)
        payload = PayloadOptions.parse(given, METADATA_COLUMNS if bucket is None else BUCKET_METADATA)
        subject_filter = given.text("subjectFilter")
        if subject_filter is not None:
            with naming("subjectFilter"):
                check_subject(subject_filter, wildcards=True)
        if bucket is not None:
            subject_filter = subject_filter or bucket.subjects
            bucket.check_filter(subject_filter)
        given.flag("filterPushdown", False)  # checked only: see `data_source`
        return cls(
            servers=parse_servers(given.text("servers")),
            selection=selection,
            bucket=bucket,
            start=_bound(given, "starting", selection, "earliest", refused="latest" if streaming is False else None),
            end=_bound(given, "ending", selection, "latest", refused="earliest"),
            fail_on_data_loss=given.flag("failOnDataLoss", True),
            admission=_admission(given),
            cutting=_cutting(given),
            include_headers=_includes_headers(given),
            headers_as_map=given.one_of("headersAs", "array", ("array", "map")) == "map",
            columns=_columns(given, payload, bucket),
            subject_filter=subject_filter,
            is_latest_view=_is_latest_view(given),
            payload=payload,
            reports_lag=given.flag("lag", True),
            cursor=_cursor(given),
            client_options=client_options(given),
        )

    def selected_columns(self) -> tuple[str, ...]:
        """Columns of the source where Spark was given no schema; a payload's stand where `value` stands."""
        usual = SOURCE_COLUMNS if self.bucket is None else BUCKET_COLUMNS
        return self.columns or self.payload.replace_value((*usual, "headers") if self.include_headers else usual)

    @property
    def types(self) -> dict[str, DataType]:
        """Of the columns that are not those of every stream."""
        headers = {"headers": HEADERS_AS_MAP} if self.headers_as_map else {}
        return {**headers, **self.payload.types, **({} if self.bucket is None else BUCKET_TYPES)}

    def check_schema(self, schema: StructType) -> None:
        """Raises ConfigError: the schema that Spark was given has other columns than the option names."""
        if self.columns is not None and [*schema.names] != spark_schema(self.columns, self.types).names:
            raise ConfigError(
                f"option columns and .schema(…) clash: {', '.join(self.columns)} and {', '.join(schema.names)}; give "
                "one of them",
                option="columns",
            )

    def client(self, first_answer_within_s: float | None = None) -> NatslogClient:
        """`first_answer_within_s`: see `ClientOptions`."""
        options = replace(self.client_options, first_answer_within_s=first_answer_within_s)
        return NatslogClient(self.servers, options)


def _is_latest_view(given: Given) -> bool:
    view = given.text("view")
    if view not in (None, "latest"):
        raise ConfigError(f"option view {view!r} must be latest", option="view")
    clashing = next((name for name in ("endingOffsets", "endingTimestamp") if given.has(name)), None)
    if view is not None and clashing is not None:
        raise ConfigError(
            f"options view and {clashing} clash: the latest view is of what is committed now; give one of them",
            option=clashing,
        )
    return view is not None


def _check_kind(given: Given, streaming: bool | None) -> None:
    for name in _BATCH_ONLY if streaming else ():
        if given.has(name):
            why = "; a streaming query has no end" if name.startswith("ending") else ""
            why = "; a streaming query reads all changes" if name == "view" else why
            raise ConfigError(f"option {name} is for batch reads (spark.read){why}", option=name)
    for name in _STREAM_ONLY if streaming is False else ():
        if given.has(name):
            raise ConfigError(f"option {name} is for streaming reads (spark.readStream)", option=name)


def _selection(given: Given) -> Selection:
    text, path = given.text("stream"), given.text("path")
    if text is not None and path is not None and text != path:
        raise ConfigError(
            f"option stream {text!r} and load({path!r}) name different streams: give one", option="stream"
        )
    named = [name for name in SELECTORS if given.has(name)] + (["stream"] if path and text is None else [])
    if len(named) > 1:
        raise ConfigError(f"options {' and '.join(named)} clash: give one of them", option=named[1])
    pattern, group, bucket = given.text("streamPattern"), given.text("group"), given.text("bucket")
    if bucket is not None:
        return Selection(names=(f"KV_{bucket}",))
    if pattern is not None:
        if not pattern:
            raise ConfigError(
                'option streamPattern is empty: give a glob, for example "orders-*"', option="streamPattern"
            )
        return Selection(pattern=pattern)
    if group is not None:
        with naming("group"):
            return Selection(group=check_name(group, "group"))
    return Selection(names=_stream_names(text or path or ""))


def _stream_names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise ConfigError(
            'option stream is missing: set .option("stream", "orders"), or streamPattern, or group', option="stream"
        )
    for name in names:
        with naming("stream"):
            check_name(name)
    if len(set(names)) != len(names):
        raise ConfigError(f"option stream {', '.join(names)!r} names a stream twice: name each once", option="stream")
    return names


def _bucket(given: Given) -> Bucket | None:
    name, is_view = given.text("bucket"), given.has("view")
    if given.has("tombstones") and (name is None or not is_view):
        raise ConfigError(
            "option tombstones requires bucket and view=latest: the history of a bucket always has its deletions",
            option="tombstones",
        )
    return None if name is None else Bucket(name, given.flag("tombstones", not is_view))


def _cursor(given: Given) -> str | None:
    text = given.text("cursor")
    if text is not None:
        with naming("cursor"):
            check_name(text, "consumer name")
    return text


def _columns(given: Given, payload: PayloadOptions, bucket: Bucket | None) -> tuple[str, ...] | None:
    text = given.text("columns")
    if text is None:
        return None
    known = payload.replace_value(ALL_COLUMNS if bucket is None else (*BUCKET_COLUMNS, "headers"))
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in known:
            is_field = payload.column is not None and name in payload.fields.names
            hint = f"; it is a field of {payload.column}: name that" if is_field else did_you_mean(name, known)
            raise ConfigError(f"option columns: unknown column {name!r}{hint}", option="columns")
    if not names or len(set(names)) != len(names):
        raise ConfigError("option columns must name at least one column, each once", option="columns")
    if _includes_headers(given) and "headers" not in names:
        option = "headersAs" if given.has("headersAs") else "includeHeaders"
        raise ConfigError(f"options {option} and columns clash: name headers in columns", option="columns")
    return names


def _includes_headers(given: Given) -> bool:
    includes = given.flag("includeHeaders", given.has("headersAs"))
    if given.has("headersAs") and not includes:
        raise ConfigError("options includeHeaders and headersAs clash: remove one of them", option="headersAs")
    return includes


def _admission(given: Given) -> Admission:
    admission = Admission(
        max_rows=given.whole("maxOffsetsPerTrigger", None),
        max_bytes=given.size_bytes("maxBytesPerTrigger", None),
        min_rows=given.whole("minOffsetsPerTrigger", None),
        max_delay_s=given.seconds("maxTriggerDelay", _TRIGGER_DELAY_S),
    )
    if admission.min_rows is None and given.has("maxTriggerDelay"):
        raise ConfigError(
            "option maxTriggerDelay limits the wait for minOffsetsPerTrigger: set that too, or remove maxTriggerDelay",
            option="maxTriggerDelay",
        )
    if admission.min_rows is not None and admission.max_rows is not None and admission.min_rows > admission.max_rows:
        raise ConfigError(
            f"options minOffsetsPerTrigger {admission.min_rows} and maxOffsetsPerTrigger {admission.max_rows} clash: "
            "the minimum must not be above the maximum",
            option="minOffsetsPerTrigger",
        )
    return admission


def _cutting(given: Given) -> Cutting:
    max_bytes = given.size_bytes("maxBytesPerPartition", None)
    return Cutting(
        min_tasks=given.whole("minPartitions", None),
        max_rows=given.whole("maxRecordsPerPartition", None),
        usual_bytes=max_bytes or _TASK_BYTES,
        max_bytes=max_bytes or _MOST_TASK_BYTES,
        read_from=cast(ReadFrom, given.one_of("readFrom", "nearest", ("nearest", "leader", "any"))),
        rack=given.text("rack"),
    )


def _bound(given: Given, which: str, selection: Selection, default: Position, *, refused: str | None) -> Bound:
    """`refused`: a position that would make the range empty."""
    moment, moments = _times(given, f"{which}Timestamp", selection)
    name = f"{which}Offsets"
    text = given.text(name)
    words = ("earliest", "latest", "cursor:NAME") if which == "starting" else ("latest",)
    expected = f'{", ".join(words)} or JSON like {{"orders": 42, "returns": "latest"}}'
    if text is None or not text.startswith("{"):
        position = default if text is None else _position(name, text, refused, expected)
        return Bound(moment, moments, {}, position)
    positions = _by_stream(name, text, selection, expected)
    expected = f"an offset, {' or '.join(words)}"
    return Bound(
        moment, moments, {stream: _position(name, at, refused, expected) for stream, at in positions.items()}, default
    )


def _position(name: str, given: Any, refused: str | None, expected: str) -> Position:
    """One position, as text or in JSON. Raises ConfigError."""
    if refused is not None and given == refused:
        raise ConfigError(
            f"option {name}: a batch read with {given} would be empty: give another position", option=name
        )
    if given in ("earliest", "latest"):
        return cast(Position, given)
    if isinstance(given, str) and given.startswith(CURSOR) and name == "startingOffsets":
        with naming(name):
            check_name(given.removeprefix(CURSOR).removeprefix(_OF_JETSTREAM), "consumer name")
        return given
    if isinstance(given, int) and not isinstance(given, bool) and given >= 0:
        return given
    raise ConfigError(f"option {name}: {str(given)[:200]!r} must be {expected}", option=name)


def _times(given: Given, name: str, selection: Selection) -> tuple[int | None, dict[str, int]]:
    """A time for all streams, or one for each of some."""
    text = given.text(name)
    if text is None or not text.startswith("{"):
        return given.time_us(name), {}
    moments = _by_stream(name, text, selection, 'a time or JSON like {"orders": "2026-11-20T10:30:00Z"}')
    try:
        return None, {stream: parse_timestamp_us(at, f"option {name}") for stream, at in moments.items()}
    except InvalidRequest as error:
        raise ConfigError(error.message, option=name) from error


def _by_stream(name: str, text: str, selection: Selection, expected: str) -> dict[str, Any]:
    try:
        by_stream = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"option {name} {text[:200]!r} must be {expected}", option=name) from error
    if not isinstance(by_stream, dict):
        raise ConfigError(f"option {name} {text!r} must be a JSON object of stream to position", option=name)
    for stream in by_stream:
        if not selection.could_hold(stream):
            hint = did_you_mean(stream, selection.names)
            raise ConfigError(f"option {name} names {stream!r}, which is not read{hint}", option=name)
    return by_stream
