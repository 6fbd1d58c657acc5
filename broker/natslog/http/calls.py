"""The calls of the HTTP API: one table with the types of their bodies, their parameters and the statuses they answer.

`/openapi.json` is made from it. A test compares the table with the routes of the server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from natslog import request_ids
from natslog.arrow.schema import COLUMNS
from natslog.arrow.searching import MOST_CHARS, SEARCHED
from natslog.consensus import MAX_BROKER_ID
from natslog.http import shapes
from natslog.http.answer_parts import ARROW_STREAM, NDJSON
from natslog.model import Appended
from natslog.planning import AskedPlan, ReadPlan
from natslog.security.records import ACTIONS
from natslog.subjects import MAX_NAME_CHARS, MAX_SUBJECT_BYTES, NAME_PATTERN

Json: TypeAlias = dict[str, Any]

JSON = "application/json"
ANY_KIND = "*/*"

# ---- statuses of errors, besides those of every call ----

_CHANGE = (409, 421)  # of the metadata, which the metadata leader makes
_LEADER = (307, 404, 421)  # answered by the leader of the stream only
_METADATA_LEADER = (307, 421)

# ---- parameters and headers ----

_OFFSET = {"type": "integer", "minimum": 0, "maximum": shapes.MAX_OFFSET}
_POSITION = {"anyOf": [_OFFSET, {"enum": ["earliest", "latest"]}]}
_TEXT = {"type": "string"}
_SUBJECT = {"type": "string", "minLength": 1, "maxLength": MAX_SUBJECT_BYTES}
_YES_OR_NO = {"type": "boolean"}
_ERASURE = {"type": "string", "pattern": "^[0-9a-z-]{1,32}$"}
_CURSOR = {"type": "string", "pattern": f"^{shapes.CURSOR_PATTERN}$", "maxLength": shapes.MAX_CURSOR_CHARS}
_NAMED = {"type": "string", "pattern": f"^{NAME_PATTERN}$", "maxLength": MAX_NAME_CHARS}


def _whole(low: int, high: int = 2**62) -> Json:
    return {"type": "integer", "minimum": low, "maximum": high}


def _in_query(name: str, text: str, schema: Json = _TEXT, *, required: bool = False, **more: Any) -> Json:
    return {"name": name, "in": "query", "description": text, "schema": schema, "required": required} | more


def _in_header(name: str, text: str, schema: Json) -> Json:
    return {"name": name, "in": "header", "description": text, "schema": schema}


OF_PATH = {
    "name": _NAMED,
    "path": _TEXT,
    "consumer": _CURSOR,
    "stream": _NAMED,
    "producer": _NAMED,
    "part": _NAMED,
    "batch": _whole(0),
    "offset": _whole(0),
    "id": _whole(1, MAX_BROKER_ID),
    "role": _NAMED,
    "token": _TEXT,
    "rule": _TEXT | {"pattern": "^r[0-9]+$"},
}
_RANGE = (
    _in_query("start", "first offset, or earliest, latest", _POSITION),
    _in_query("end", "exclusive; or earliest, latest", _POSITION),
)
_REQUEST_ID = _in_header(
    request_ids.HEADER,
    "a repeated request with the same id makes the change once",
    {"type": "string", "pattern": f"^{request_ids.PATTERN}$"},
)
_OF_IDENTITY = _in_query("identity", "name of the identity", required=True)
_REDIRECTED = _in_header("Natslog-Redirected", "true: answer 421 instead of 307", _TEXT)
_MESSAGES = (
    *_RANGE,
    _in_query(
        "max_bytes",
        "limit on the size of the batches, both stored and uncompressed; at least one batch is returned",
        _whole(1, 2**30),
    ),
    _in_query(
        "exact", "false: stored batches are returned whole and may begin before start and end after end", _YES_OR_NO
    ),
    _in_query("wait_ms", "wait for new messages", _whole(0, shapes.MAX_WAIT_MS)),
    _in_query("subject", "NATS wildcard", _SUBJECT),
    _in_query(
        "columns",
        "comma-separated names; the other columns are not sent",
        {"type": "array", "items": {"enum": list(COLUMNS)}, "uniqueItems": True},
        style="form",
        explode=False,
    ),
    _in_query("view", "latest: only the newest message of each key or subject", {"enum": ["latest"]}),
    _in_query("as_of", "of a view: the Natslog-As-Of of its first response", _OFFSET),
    _in_header("Natslog-Batches", "as exact=false", {"enum": ["whole"]}),
    _in_header("Natslog-Columns", "stored columns may be returned whole, too", {"enum": ["whole"]}),
)


def _header(text: str, schema: Json, *, required: bool = True) -> Json:
    return {"required": required, "description": text, "schema": schema}


_STATED = {  # a client recognises by these a response that is older than that of a newer leader
    "Natslog-Leader-Epoch": _header("of the leader that states this", _whole(0)),
    "Natslog-Stream-Id": _header("of the stream", _TEXT),
}
_MAYBE_STATED = {name: header | {"required": False} for name, header in _STATED.items()}
_CURRENT = {
    "Natslog-Current": _header(
        "false: no majority confirmed that this broker has all changes; the answer may be outdated", _YES_OR_NO
    )
}
_OF_MESSAGES = _STATED | {
    "Natslog-Next-Offset": _header("start of the next request", _OFFSET),
    "Natslog-High-Watermark": _header("offset after the last committed message", _OFFSET),
    "Natslog-Log-Start-Offset": _header("first offset of the log", _OFFSET),
    "Natslog-Limited": _header(
        "true: rows are left out on whose subjects the identity may not read", {"enum": ["true"]}, required=False
    ),
    "Natslog-Removed": _header("offsets of the range whose messages were removed; absent: 0", _OFFSET, required=False),
    "Natslog-As-Of": _header("of a view: the high watermark that it is of", _OFFSET, required=False),
    "Natslog-Batches": _header("whole: stored batches, not cut", {"enum": ["whole", "columns", "exact"]}),
}

# ---- the calls ----


@dataclass(frozen=True, slots=True)
class Call:
    """One method of a path.

    Attributes:
        answer: type of the JSON body; None: no body. `status`: of success. `also`: further statuses, with the types of
            their bodies.
        body: type of the request body, or its media type. `statuses`: of errors, besides those of every call.
        parameters: besides those of the path. `headers`: of a success. `kinds`: media types of a body that is no JSON.
    """

    summary: str
    answer: Any = None
    status: int = 200
    also: Mapping[int, Any] | None = None
    body: Any = None
    body_is_required: bool = True
    statuses: Sequence[int] = ()
    parameters: Sequence[Json] = ()
    headers: Mapping[str, Json] | None = None
    kinds: Sequence[str] = (JSON,)


CALLS: dict[str, dict[str, Call]] = {
    "/v1/cluster": {"get": Call("The cluster and its brokers", shapes.Cluster)},
    "/v1/overview": {
        "get": Call("What is wrong in the cluster, each broker now, and all streams as a table", shapes.Overview)
    },
    "/v1/live": {
        "get": Call(
            "The overview as server-sent events of the kind `overview`, every two seconds: the first one whole, the "
            "others with the streams that have changed",
            kinds=("text/event-stream",),
            statuses=(503,),
            parameters=(_in_query("events", "end after so many", _whole(1)),),
        )
    },
    "/v1/history": {
        "get": Call(
            "The last hour of each broker, or of a stream at its leader",
            shapes.History,
            statuses=(404,),
            parameters=(_in_query("stream", "name of a stream; without it, of the brokers", _NAMED),),
        )
    },
    "/v1/cluster/plan": {
        "get": Call(
            "The fewest moves that even out replicas, leaders and bytes of the brokers; or the moves that draining a "
            "broker would cause. Nothing is changed",
            shapes.Plan,
            statuses=(503,),
            parameters=(_in_query("drain", "number of the broker", _whole(1, MAX_BROKER_ID)),),
        )
    },
    "/v1/cluster/brokers": {
        "post": Call(
            "Add the broker at a URL", shapes.Broker, 201, body=shapes.Newcomer, statuses=(*_METADATA_LEADER, 409)
        )
    },
    "/v1/cluster/brokers/{id}": {
        "patch": Call(
            "Drain a broker, or stop draining it",
            shapes.Broker,
            body=shapes.Draining,
            statuses=(*_METADATA_LEADER, 409),
            parameters=(_REQUEST_ID, _REDIRECTED),
        ),
        "delete": Call(
            "Remove a broker from the cluster",
            status=204,
            statuses=(*_METADATA_LEADER, 409),
            parameters=(
                _in_query("force", "true: the broker is permanently lost", _YES_OR_NO),
                _REQUEST_ID,
                _REDIRECTED,
            ),
        ),
    },
    "/v1/cluster/log-level": {
        "get": Call("The levels of the logs of all brokers", shapes.LogLevels),
        "put": Call(
            "Set the level of the log of a broker or of all, until it is started again",
            shapes.LogLevels,
            body=shapes.NewLogLevel,
        ),
    },
    "/v1/cluster/finalize-upgrade": {
        "post": Call(
            "Raise the feature level to the latest one, which every broker must support. This cannot be undone",
            shapes.Upgraded,
            statuses=(*_METADATA_LEADER, 409),
            parameters=(_REDIRECTED,),
        )
    },
    "/v1/cluster/transfer": {
        "post": Call(
            "Transfer the metadata leadership",
            shapes.Transfer,
            202,
            body=shapes.Transfer,
            statuses=_METADATA_LEADER,
            parameters=(_REDIRECTED,),
        )
    },
    "/v1/streams/{name}/leader": {
        "post": Call(
            "Transfer the leadership of a stream to an in-sync replica, which becomes its preferred leader",
            shapes.Led,
            body=shapes.Transfer,
            statuses=(*_LEADER, *_CHANGE),
            parameters=(_REQUEST_ID, _REDIRECTED),
        )
    },
    "/v1/streams/{name}/replicas": {
        "get": Call(
            "How far each replica has copied the log",
            shapes.Progress,
            headers=_STATED,
            statuses=_LEADER,
            parameters=(_REDIRECTED,),
        ),
        "put": Call(
            "Move a stream's replicas",
            shapes.Moving,
            202,
            body=shapes.Replicas,
            statuses=_CHANGE,
            parameters=(_REQUEST_ID,),
        ),
    },
    "/v1/streams": {
        "get": Call(
            "All streams. A stream whose leader does not answer has a problem and no positions",
            list[shapes.Stream],
            headers=_CURRENT,
            parameters=(
                _in_query("pattern", "names that match this glob", _TEXT | {"maxLength": MAX_NAME_CHARS}),
                _in_query("subject", "streams that record this plain subject", _SUBJECT),
                _in_query("group", "of this group"),
                _in_query("internal", "true: also streams that natslog itself writes", _YES_OR_NO),
            ),
        ),
        "post": Call(
            "Create a stream (200: it exists with the same settings)",
            shapes.Stream,
            201,
            also={200: shapes.Stream},
            body=shapes.NewStream,
            statuses=(*_CHANGE, 404),
            parameters=(_REQUEST_ID,),
        ),
    },
    "/v1/streams/{name}": {
        "get": Call(
            "One stream. Without an available leader it has a problem and no positions",
            shapes.Stream,
            headers=_MAYBE_STATED,
            statuses=_LEADER,
            parameters=(_REDIRECTED,),
        ),
        "patch": Call(
            "Change settings, pause or resume",
            shapes.Stream,
            body=shapes.ChangedStream,
            statuses=_CHANGE,
            parameters=(_REQUEST_ID,),
        ),
        "delete": Call(
            "Delete a stream. If id or if_version is another one by then, nothing is deleted",
            status=204,
            statuses=_CHANGE,
            parameters=(
                _REQUEST_ID,
                _in_query("id", "of the stream"),
                _in_query("if_version", "the settings_version that the stream had when it was read", _whole(0)),
            ),
        ),
    },
    "/v1/streams/{name}/roll": {
        "post": Call(
            "Close the active segment. All messages below `sealed_end` are in Arrow files",
            shapes.Rolled,
            headers=_STATED,
            statuses=(*_LEADER, 409),
            parameters=(_REDIRECTED,),
        )
    },
    "/v1/streams/{name}/scrub": {
        "get": Call("The state of the scrubbing of each replica", shapes.Scrub),
        "post": Call(
            "Read all sealed segments of each replica back from its disk, and compare them with their CRCs",
            shapes.Scrub,
            status=202,
        ),
    },
    "/v1/streams/{name}/repair": {
        "post": Call(
            "Repair all replicas; offsets that are damaged on every replica become removed ones",
            shapes.Repaired,
            body=shapes.Repair,
        )
    },
    "/v1/streams/{name}/purge": {
        "post": Call(
            "Remove messages: all that are committed now, or those below an offset or on some subjects, but for the "
            "newest so many",
            shapes.Purged,
            body=shapes.Purge,
            body_is_required=False,
            headers=_STATED,
            statuses=(*_LEADER, *_CHANGE, 416),
            parameters=(_REQUEST_ID, _REDIRECTED),
        )
    },
    "/v1/streams/{name}/erase": {
        "get": Call(
            "The receipt of an erasure: which files each replica has written again, and whether it has finished",
            shapes.Erasure,
            parameters=(_in_query("id", "of the erasure", _ERASURE, required=True),),
        ),
        "post": Call(
            "Erase the messages on a subject, or with a key, that are committed now. They are hidden when this is "
            "answered; each replica then writes the files that have them again",
            shapes.Erasure,
            body=shapes.Erase,
            status=202,
            headers=_STATED,
            statuses=(*_LEADER, *_CHANGE),
            parameters=(_REDIRECTED,),
        ),
    },
    "/v1/streams/{name}/seal": {
        "post": Call(
            "Make the stream permanently read-only",
            shapes.Stream,
            headers=_STATED,
            statuses=(*_LEADER, *_CHANGE),
            parameters=(_REQUEST_ID, _REDIRECTED),
        )
    },
    "/v1/streams/{name}/subjects": {
        "get": Call(
            "The distinct subjects of the visible messages, in ascending order, with counts and offsets, in pages. The "
            "first request for a stream reads all of its subjects, to make an index",
            shapes.SubjectPage,
            headers=_STATED,
            statuses=(*_LEADER, 409),
            parameters=(
                _in_query("pattern", "NATS wildcard", _SUBJECT),
                _in_query("after", "the last subject of the page before"),
                _in_query("limit", "of subjects in a page; default 1,000", _whole(1, shapes.MAX_SUBJECTS_OF_A_PAGE)),
                _in_query("as_of", "that of the page before: the next page of the same result", _OFFSET),
                _REDIRECTED,
            ),
        )
    },
    "/v1/streams/{name}/search": {
        "get": Call(
            "Messages with a text in them, or all messages of a range, a page at a time, with the first bytes of their "
            "values. The page ends when it is full, or the budget of bytes or time is used",
            shapes.Found,
            headers=_STATED,
            statuses=(*_LEADER, 416),
            parameters=(
                *_RANGE,
                _in_query("newest", "instead of start: begin at the newest so many messages", _whole(1)),
                _in_query("subject", "NATS wildcard", _SUBJECT),
                _in_query(
                    "grep", "text that a message must contain", _TEXT | {"minLength": 1, "maxLength": MOST_CHARS}
                ),
                _in_query("regex", "true: grep is a regular expression of RE2", _YES_OR_NO),
                _in_query("ignore_case", "true: capital and small letters are the same", _YES_OR_NO),
                _in_query(
                    "in",
                    "comma-separated columns to search; default value,key,headers",
                    {"type": "array", "items": {"enum": list(SEARCHED)}, "uniqueItems": True},
                    style="form",
                    explode=False,
                ),
                _in_query("limit", "of messages in a page; default 100", _whole(1, shapes.MAX_FOUND_OF_A_PAGE)),
                _in_query("value_bytes", "of each value; default 4,096", _whole(0, shapes.MAX_PREVIEW_BYTES)),
                _in_query("max_bytes", "stored bytes to search; default 256 MiB", _whole(1, shapes.MAX_SEARCHED_BYTES)),
                _in_query("max_ms", "time to search; default 2,000", _whole(1, shapes.MAX_SEARCHED_MS)),
                _REDIRECTED,
            ),
        )
    },
    "/v1/streams/{name}/publish": {
        "post": Call(
            "Publish a message to NATS, on a subject that the stream records. Answered when the stream has stored it",
            shapes.Published,
            201,
            body=shapes.NewMessage,
            statuses=(404, 502, 503),
        )
    },
    "/v1/streams/{name}/redrive": {
        "post": Call(
            "Publish dead letters of the stream to the subjects that they were meant for (the header Natslog-Subject). "
            "A letter that is sent again has the same message id",
            shapes.Redriven,
            body=shapes.Redrive,
            headers=_STATED,
            statuses=(*_LEADER, 416, 502, 503),
            parameters=(_REDIRECTED,),
        )
    },
    "/v1/streams/{name}/segments": {
        "get": Call(
            "The files of the log at the leader, the newest 1,000. It needs the right to read all subjects",
            shapes.Segments,
            headers=_STATED,
            statuses=_LEADER,
            parameters=(_REDIRECTED,),
        )
    },
    "/v1/streams/{name}/offsets": {
        "get": Call(
            "The first message at or after a time, or on a subject and at or after an offset",
            shapes.OffsetAt,
            headers=_STATED,
            statuses=_LEADER,
            parameters=(
                _in_query("timestamp", "ISO-8601 or epoch ms; this or subject"),
                _in_query("subject", "without wildcards", _SUBJECT),
                _in_query("start", "with subject: the first offset that counts; default 0", _OFFSET),
                _REDIRECTED,
            ),
        )
    },
    "/v1/streams/{name}/lag": {
        "get": Call(
            "Rows, bytes and seconds between a position and the high watermark",
            shapes.Lag,
            headers=_STATED,
            statuses=_LEADER,
            parameters=(
                _in_query("offset", "the next offset of the reader; or earliest, latest", _POSITION),
                _in_query("cursor", "instead of offset: the position of this consumer's cursor", _CURSOR),
                _REDIRECTED,
            ),
        )
    },
    "/v1/positions": {
        "post": Call(
            "Positions of several streams (all without `streams`, `pattern` and `group`). With `seen` (id and high "
            "watermark of each) and `wait_ms`: waits until one of them differs",
            list[shapes.Position],
            headers=_CURRENT,
            body=shapes.AskedPositions,
        )
    },
    "/v1/splits": {
        "post": Call(
            "Committed ranges of several streams divided into splits: `splits` by stream; `elsewhere`: streams "
            "without a replica here, by the URL of their leader",
            shapes.SplitsOfSeveral,
            body=shapes.AskedSplits,
        )
    },
    "/v1/plans": {
        "post": Call(
            "What a reader at some positions reads next, within its limits: the end of each stream, what is lost, and "
            "the ranges of each task",
            ReadPlan,
            headers=_CURRENT,
            statuses=(404,),
            body=AskedPlan,
        )
    },
    "/v1/lags": {
        "post": Call(
            "The lag of an offset in each of several streams; null if the leader of a stream does not answer",
            dict[str, shapes.Lag | None],
            body=dict[shapes.Name, shapes.Offset],
        )
    },
    "/v1/cursors": {
        "get": Call(
            "All cursors, with their lag; then JetStream consumers, as cursors named `jetstream:NAME` (at most 10,000 "
            "of each stream)",
            list[shapes.Cursor],
            parameters=(
                _in_query("consumer", "only of this consumer"),
                _in_query("stream", "only on this stream"),
            ),
        ),
        "post": Call(
            "Set many cursors: all, or none where one is refused (feature level 2)",
            shapes.CursorsSet,
            body=shapes.NewCursors,
            statuses=(404, *_CHANGE),
            parameters=(_REQUEST_ID,),
        ),
    },
    "/v1/cursors/{consumer}/{stream}": {
        "get": Call("The cursor of a consumer (`jetstream:NAME`: a JetStream consumer), and its lag", shapes.Cursor),
        "put": Call(
            "Set the cursor of a consumer",
            shapes.Cursor,
            body=shapes.NewCursor,
            statuses=_CHANGE,
            parameters=(_REQUEST_ID,),
        ),
        "delete": Call("Delete the cursor of a consumer", status=204, statuses=_CHANGE, parameters=(_REQUEST_ID,)),
    },
    "/v1/streams/{name}/splits": {
        "get": Call(
            "A range divided into splits for parallel readers",
            list[shapes.Split],
            headers=_STATED,
            statuses=(*_LEADER, 416),
            parameters=(
                *_RANGE,
                _in_query("max_bytes", "per split", _whole(1)),
                _in_query("max_rows", "per split", _whole(1)),
                _in_query("min_splits", "minimum number of splits", _whole(1, shapes.MAX_SPLITS)),
                _in_query("read_from", "the order of each split's urls", {"enum": ["nearest", "leader", "any"]}),
                _in_query("rack", "rack of the client"),
                _REDIRECTED,
            ),
        )
    },
    "/v1/streams/{name}/extent": {
        "get": Call(
            "The approximate stored size of a range, or the end of the range that has a given size",
            shapes.Extent,
            headers=_STATED,
            statuses=(*_LEADER, 416),
            parameters=(*_RANGE, _in_query("max_bytes", "limit on the size", _whole(1)), _REDIRECTED),
        )
    },
    "/v1/streams/{name}/messages": {
        "get": Call(
            "Messages as an Arrow IPC stream, or as one line of JSON per message with Accept: application/x-ndjson. "
            "Any in-sync replica serves a range with a numeric, committed end; the leader answers all other "
            "requests. Without max_bytes the response has all messages up to end, or up to the high watermark at the "
            "time of the request; a response without its terminating chunk is incomplete",
            kinds=(ARROW_STREAM, NDJSON),
            headers=_OF_MESSAGES,
            statuses=(*_LEADER, 409, 416),
            parameters=(*_MESSAGES, _REDIRECTED),
        )
    },
    "/v1/streams/{name}/messages/{offset}": {
        "delete": Call(
            "Remove one message",
            shapes.MessageDeleted,
            headers=_STATED,
            statuses=(*_LEADER, *_CHANGE),
            parameters=(_REDIRECTED,),
        )
    },
    "/v1/streams/{name}/appends/{producer}": {
        "get": Call(
            "The last batch that this producer committed",
            shapes.LastBatch,
            statuses=_LEADER,
            parameters=(_REDIRECTED,),
        )
    },
    "/v1/streams/{name}/appends/{producer}/{batch}": {
        "post": Call(
            "Commit staged parts as one run, exactly once",
            Appended,
            body=shapes.Commit,
            statuses=(*_LEADER, 409),
            parameters=(_REDIRECTED,),
        ),
        "delete": Call("Delete the staged parts", status=204, statuses=_LEADER, parameters=(_REDIRECTED,)),
    },
    "/v1/streams/{name}/appends/{producer}/{batch}/parts/{part}": {
        "put": Call(
            "Stage rows: an Arrow IPC stream with value and, if wanted, subject, key, headers",
            shapes.StagedPart,
            body=ARROW_STREAM,
            statuses=_LEADER,
            parameters=(
                _in_query("attempt", "attempts do not replace each other", _whole(0)),
                _in_query("subject", "subject of the rows if they have no column subject", _SUBJECT),
                _REDIRECTED,
            ),
        )
    },
    "/v1/streams/{name}/import": {
        "get": Call("How far the import into a stream is", shapes.Import, statuses=_LEADER, parameters=(_REDIRECTED,)),
        "post": Call(
            "Create a stream to import an export into, or continue the import (200)",
            shapes.Import,
            201,
            also={200: shapes.Import},
            body=shapes.NewImport,
            statuses=(*_CHANGE, 404),
            parameters=(_REQUEST_ID,),
        ),
        "put": Call(
            "Append the next stored batches of an export, at the offsets that they have. Those that are there already "
            "are passed over",
            shapes.Import,
            body=ARROW_STREAM,
            statuses=(*_LEADER, 409, 416),
            parameters=(_in_query("id", "id of the stream that is imported into", required=True), _REDIRECTED),
        ),
    },
    "/v1/streams/{name}/import/removed": {
        "post": Call(
            "Remove messages that are imported already, and that the original does not have any more",
            shapes.Import,
            body=shapes.RemovedImports,
            statuses=(*_LEADER, 409),
            parameters=(_REDIRECTED,),
        )
    },
    "/v1/streams/{name}/removed": {
        "get": Call(
            "Which offsets of a range the stream does not have any more, because they were deleted, purged, erased, or "
            "hidden by newer messages; not those that retention has removed",
            shapes.Removals,
            headers=_STATED,
            statuses=(*_LEADER, 416),
            parameters=(*_RANGE, _REDIRECTED),
        )
    },
    "/v1/streams/{name}/import/consumers": {
        "post": Call(
            "Consumers of a JetStream stream that is imported: they go on where they were, when the stream is resumed",
            shapes.ConsumersOfImport,
            body=shapes.ImportedConsumers,
            statuses=(*_LEADER, 409),
            parameters=(_REDIRECTED,),
        )
    },
    "/v1/streams/{name}/import/finish": {
        "post": Call(
            "Complete an import: the stream can be read from now on, and resumed",
            shapes.Import,
            body=shapes.FinishedImport,
            statuses=(*_LEADER, *_CHANGE),
            parameters=(_REQUEST_ID, _REDIRECTED),
        )
    },
    "/v1/security": {
        "get": Call("All tokens (digests of their secrets), roles, rules and quotas", shapes.StoredSecurity),
        "post": Call(
            "Add those of a backup that do not exist",
            shapes.RestoredSecurity,
            body=shapes.StoredSecurity,
            statuses=(404, *_CHANGE),
        ),
    },
    "/v1/whoami": {"get": Call("The identity of this request, and what it may do", shapes.Whoami)},
    "/v1/session": {
        "get": Call("Whether credentials are needed, and who is signed in with a cookie", shapes.SessionState),
        "post": Call(
            "Sign in: the response sets a cookie, which stands for the token at this broker",
            shapes.SignedIn,
            201,
            body=shapes.NewSession,
        ),
        "delete": Call("Sign out", status=204),
    },
    "/v1/tokens": {
        "get": Call("All tokens, without their secrets", list[shapes.Token]),
        "post": Call(
            "Create a token. The response has its secret, which cannot be shown again",
            shapes.Token,
            201,
            body=shapes.NewToken,
            statuses=_CHANGE,
            parameters=(_REQUEST_ID,),
        ),
    },
    "/v1/tokens/{token}": {
        "delete": Call(
            "Revoke a token. Requests in progress with it end within 5 s",
            status=204,
            statuses=_CHANGE,
            parameters=(_REQUEST_ID,),
        )
    },
    "/v1/acl": {
        "get": Call("All access rules, oldest first", list[shapes.AccessRule]),
        "post": Call(
            "Permit an action (200: the rule exists)",
            shapes.AccessRule,
            201,
            also={200: shapes.AccessRule},
            body=shapes.NewRule,
            statuses=(404, *_CHANGE),
            parameters=(_REQUEST_ID,),
        ),
    },
    "/v1/acl/{rule}": {
        "delete": Call("Remove an access rule", status=204, statuses=_CHANGE, parameters=(_REQUEST_ID,))
    },
    "/v1/acl/check": {
        "get": Call(
            "Whether an identity may do something, and the rule that decides. For other identities it needs admin",
            shapes.Verdict,
            parameters=(
                _in_query("identity", "by default the identity of this request"),
                _in_query("action", "see AccessRule", {"enum": list(ACTIONS)}, required=True),
                _in_query("stream", "name of a stream, which need not exist; by default * (the whole cluster)"),
                _in_query("subject", "by default all subjects that the stream has recorded"),
            ),
        )
    },
    "/v1/roles": {"get": Call("The roles of each identity that has any", dict[str, tuple[str, ...]])},
    "/v1/roles/{role}": {
        "put": Call(
            "Give a role to an identity", shapes.Roles, statuses=_CHANGE, parameters=(_OF_IDENTITY, _REQUEST_ID)
        ),
        "delete": Call(
            "Take a role from an identity", shapes.Roles, statuses=_CHANGE, parameters=(_OF_IDENTITY, _REQUEST_ID)
        ),
    },
    "/v1/quotas": {
        "get": Call("All quotas, and the defaults", shapes.AllQuotas),
        "put": Call(
            "Set the quota of an identity, or of * (identities without one of their own)",
            shapes.NewQuotas,
            body=shapes.NewQuotas,
            statuses=_CHANGE,
            parameters=(_OF_IDENTITY, _REQUEST_ID),
        ),
        "delete": Call(
            "Remove the quota of an identity",
            status=204,
            statuses=(404, *_CHANGE),
            parameters=(_OF_IDENTITY, _REQUEST_ID),
        ),
    },
    "/healthz": {"get": Call("The process is running", shapes.Health)},
    "/readyz": {
        "get": Call("Whether messages are accepted and served", shapes.Readiness, also={503: shapes.Readiness})
    },
    "/metrics": {"get": Call("Prometheus metrics", kinds=("text/plain",))},
    "/": {"get": Call("The console, for a browser", kinds=("text/html",))},
    "/console/{path}": {"get": Call("A file of the console", kinds=(ANY_KIND,), statuses=(404,))},
    "/openapi.json": {"get": Call("This document", Json)},
}
