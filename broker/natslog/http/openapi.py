"""The API described for programs: `/openapi.json`."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from natslog.errors import natslog_version
from natslog.http.access import access
from natslog.model import SETTING_NAMES

routes = web.RouteTableDef()


def _parameter(name: str, text: str, kind: str = "string") -> dict[str, Any]:
    return {"name": name, "in": "query", "description": text, "schema": {"type": kind}}


_NAME, *_CURSOR = (
    {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
    for name in ("name", "consumer", "stream")
)
_ERROR = {
    "description": (
        "The error and its remedy. 503 with `retriable`: this broker cannot state positions now (for example, it is "
        "partitioned from the others): send the request to another broker, or repeat it in a moment"
    ),
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
}


def _call(
    summary: str,
    good: str,
    *parameters: dict[str, Any],
    body: str | None = None,
    rows: bool = False,
    kind: str = "application/json",
) -> Any:
    call: dict[str, Any] = {
        "summary": summary,
        "parameters": list(parameters),
        "responses": {good: {"description": summary, "content": {kind: {}}}, "default": _ERROR},
    }
    if body is not None:
        schema = {"$ref": f"#/components/schemas/{body}"}
        call["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if rows:
        call["requestBody"] = {"required": True, "content": {"application/vnd.apache.arrow.stream": {}}}
    return call


_BROKER = {"name": "id", "in": "path", "required": True, "schema": {"type": "integer"}}
_PRODUCER = {"name": "producer", "in": "path", "required": True, "schema": {"type": "string"}}
_BATCH = {"name": "batch", "in": "path", "required": True, "schema": {"type": "integer"}}
_RANGE = (_parameter("start", "first offset, or earliest, latest"), _parameter("end", "exclusive; or latest"))
_PATHS = {
    "/v1/cluster": {"get": _call("The cluster and its brokers", "200")},
    "/v1/cluster/brokers": {"post": _call("Add the broker at a URL", "201", body="Newcomer")},
    "/v1/cluster/brokers/{id}": {
        "patch": _call("Drain a broker, or stop draining it", "200", _BROKER, body="Draining"),
        "delete": _call(
            "Remove a broker from the cluster",
            "204",
            _BROKER,
            _parameter("force", "true: the broker is permanently lost"),
        ),
    },
    "/v1/cluster/finalize-upgrade": {
        "post": _call(
            "Raise the feature level to the latest one, which every broker must support. This cannot be undone", "200"
        )
    },
    "/v1/cluster/transfer": {"post": _call("Transfer the metadata leadership", "202", body="Transfer")},
    "/v1/streams/{name}/leader": {
        "post": _call(
            "Transfer the leadership of a stream to an in-sync replica, which becomes its preferred leader",
            "200",
            _NAME,
            body="Transfer",
        )
    },
    "/v1/streams/{name}/replicas": {"put": _call("Move a stream's replicas", "202", _NAME, body="Replicas")},
    "/v1/streams": {
        "get": _call(
            "All streams; header Natslog-Current: false where the list may be outdated. A stream whose leader does "
            "not answer has a problem and no positions",
            "200",
            _parameter("pattern", "names that match this glob"),
            _parameter("subject", "streams that record this plain subject"),
            _parameter("group", "of this group"),
        ),
        "post": _call("Create a stream (200: it exists with the same settings)", "201", body="StreamSettings"),
    },
    "/v1/streams/{name}": {
        "get": _call("One stream. Without an available leader it has a problem and no positions", "200", _NAME),
        "patch": _call("Change settings, pause or resume", "200", _NAME, body="StreamSettings"),
        "delete": _call("Delete a stream", "204", _NAME),
    },
    "/v1/streams/{name}/roll": {
        "post": _call("Close the active segment. All messages below `sealed_end` are in Arrow files", "200", _NAME)
    },
    "/v1/streams/{name}/purge": {
        "post": _call("Remove the messages below an offset, or all that are committed now", "200", _NAME, body="Purge")
    },
    "/v1/streams/{name}/seal": {"post": _call("Make the stream permanently read-only", "200", _NAME)},
    "/v1/streams/{name}/offsets": {
        "get": _call(
            "The first offset at or after a time", "200", _NAME, _parameter("timestamp", "ISO-8601 or epoch ms")
        )
    },
    "/v1/streams/{name}/lag": {
        "get": _call(
            "Rows, bytes and seconds between a position and the high watermark",
            "200",
            _NAME,
            _parameter("offset", "the next offset of the reader; or earliest, latest"),
            _parameter("cursor", "instead of offset: the position of this consumer's cursor"),
        )
    },
    "/v1/positions": {
        "post": _call(
            "Positions of several streams (all without `streams`, `pattern` and `group`). With `seen` (id and high "
            "watermark of each) and `wait_ms`: waits until one of them differs. Header Natslog-Current as for the list "
            "of streams",
            "200",
            body="AskedPositions",
        )
    },
    "/v1/splits": {
        "post": _call(
            "Committed ranges of several streams divided into splits: `splits` by stream; `elsewhere`: streams "
            "without a replica here, by the URL of their leader",
            "200",
            body="AskedSplits",
        )
    },
    "/v1/lags": {"post": _call("The lag of an offset in each of several streams", "200", body="Positions")},
    "/v1/cursors": {
        "get": _call(
            "All cursors, with their lag",
            "200",
            _parameter("consumer", "only of this consumer"),
            _parameter("stream", "only on this stream"),
        )
    },
    "/v1/cursors/{consumer}/{stream}": {
        "get": _call("The cursor of a consumer, and its lag", "200", *_CURSOR),
        "put": _call("Set the cursor of a consumer", "200", *_CURSOR, body="Cursor"),
        "delete": _call("Delete the cursor of a consumer", "204", *_CURSOR),
    },
    "/v1/streams/{name}/splits": {
        "get": _call(
            "A range divided into splits for parallel readers",
            "200",
            _NAME,
            *_RANGE,
            _parameter("max_bytes", "per split", "integer"),
            _parameter("max_rows", "per split", "integer"),
            _parameter("min_splits", "minimum number of splits", "integer"),
            _parameter("read_from", "nearest, leader or any: the order of each split's urls"),
            _parameter("rack", "rack of the client"),
        )
    },
    "/v1/streams/{name}/extent": {
        "get": _call(
            "The approximate stored size of a range, or the end of the range that has a given size",
            "200",
            _NAME,
            *_RANGE,
            _parameter("max_bytes", "limit on the size", "integer"),
        )
    },
    "/v1/streams/{name}/messages": {
        "get": _call(
            "Messages as an Arrow IPC stream, or as one line of JSON per message with Accept: application/x-ndjson. "
            "Any in-sync replica serves a range with a numeric, committed end; the leader answers all other "
            "requests. Without max_bytes the response has all messages up to end, or up to the high watermark at the "
            "time of the request; a response without its terminating chunk is incomplete",
            "200",
            _NAME,
            *_RANGE,
            _parameter(
                "max_bytes",
                "limit on the size of the batches, both stored and uncompressed; at least one batch is returned",
                "integer",
            ),
            _parameter(
                "exact",
                "false: stored batches are returned whole and may begin before start and end after end",
                "boolean",
            ),
            _parameter("wait_ms", "wait for new messages", "integer"),
            _parameter("subject", "NATS wildcard"),
            _parameter("columns", "comma-separated names; the other columns are not sent"),
            kind="application/vnd.apache.arrow.stream",
        )
    },
    "/v1/streams/{name}/appends/{producer}": {
        "get": _call("The last batch that this producer committed", "200", _NAME, _PRODUCER)
    },
    "/v1/streams/{name}/appends/{producer}/{batch}": {
        "post": _call("Commit staged parts as one run, exactly once", "200", _NAME, _PRODUCER, _BATCH, body="Commit"),
        "delete": _call("Delete the staged parts", "204", _NAME, _PRODUCER, _BATCH),
    },
    "/v1/streams/{name}/appends/{producer}/{batch}/parts/{part}": {
        "put": _call(
            "Stage rows: an Arrow IPC stream with value and, if wanted, subject, key, headers",
            "200",
            _NAME,
            _PRODUCER,
            _BATCH,
            {"name": "part", "in": "path", "required": True, "schema": {"type": "string"}},
            _parameter("attempt", "attempts do not replace each other", "integer"),
            _parameter("subject", "subject of the rows if they have no column subject"),
            rows=True,
        )
    },
    "/healthz": {"get": _call("Alive", "200")},
    "/readyz": {"get": _call("Readiness", "200")},
    "/metrics": {"get": _call("Prometheus metrics", "200", kind="text/plain")},
}


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(properties), "properties": properties}


_ERROR_FIELDS = {"code": {"type": "string"}, "message": {"type": "string"}, "retriable": {"type": "boolean"}}
_SCHEMAS = {
    "Error": {"type": "object", "properties": {"error": {"type": "object", "properties": _ERROR_FIELDS}}},
    "Positions": {"type": "object", "additionalProperties": {"type": "integer", "minimum": 0}},
    "AskedPositions": {
        "type": "object",
        "properties": {
            "streams": {"type": "array", "items": {"type": "string"}},
            "pattern": {"type": "string"},
            "group": {"type": "string"},
            "seen": {
                "type": "object",
                "additionalProperties": {"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}]},
            },
            "wait_ms": {"type": "integer", "minimum": 0, "maximum": 60000},
        },
    },
    "AskedSplits": {
        "type": "object",
        "required": ["ranges"],
        "properties": {
            "ranges": {
                "type": "array",
                "items": {
                    "type": "object",
                    "required": ["stream", "id", "start", "end"],
                    "properties": {
                        "stream": {"type": "string"},
                        "id": {"type": "string"},
                        "start": {"type": "integer"},
                        "end": {"type": "integer"},
                        "min_splits": {"type": "integer", "minimum": 1},
                    },
                },
            },
            "max_bytes": {"type": "integer", "minimum": 1},
            "max_rows": {"type": "integer", "minimum": 1},
            "read_from": {"type": "string", "enum": ["nearest", "leader", "any"]},
            "rack": {"type": "string"},
        },
    },
    "Cursor": {
        "type": "object",
        "required": ["offset"],
        "properties": {
            "offset": {"type": "integer", "minimum": 0},
            "timestamp": {
                "type": "string",
                "description": "time of this position; the current time if it is not given",
            },
            "id": {"type": "string", "description": "of the stream"},
        },
    },
    "Newcomer": _object(url={"type": "string"}),
    "Draining": _object(draining={"type": "boolean"}),
    "Transfer": _object(to={"type": "integer"}),
    "Replicas": _object(brokers={"type": "array", "items": {"type": "integer"}}),
    "Purge": _object(below={"type": "integer", "minimum": 0}),
    "Commit": {"type": "object", "properties": {"parts": {"type": "array", "items": {"type": "object"}}}},
    "StreamSettings": {"type": "object", "properties": {name: {} for name in ("name", *SETTING_NAMES, "paused")}},
}


@routes.get("/openapi.json")
@access("open")
async def openapi(request: web.Request) -> web.Response:
    info = {"title": "natslog", "version": natslog_version()}
    return web.json_response({"openapi": "3.1.0", "info": info, "paths": _PATHS, "components": {"schemas": _SCHEMAS}})
