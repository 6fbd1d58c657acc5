"""The API described for programs: `/openapi.json`, from the table of calls and the types of their bodies."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec
from aiohttp import web

from natslog.errors import natslog_version
from natslog.http import shapes
from natslog.http.access import access
from natslog.http.calls import CALLS, JSON, OF_PATH, Call, Json

routes = web.RouteTableDef()

_REF = "#/components/schemas/{name}"
_STATUSES = {
    400: "The request cannot succeed as it stands: correct it",
    401: "The request has no valid credentials",
    403: "The credentials do not permit this, or a broker does not belong to the cluster",
    404: "There is no such stream, cursor or path",
    408: "The body was not received completely in time",
    409: "This conflicts with what is there, or with another change in progress",
    413: "The body exceeds a limit: send less at once",
    415: "The body is compressed, which is not supported",
    416: "The offsets are not in the log; the facts are its bounds",
    421: "Another broker has to answer; the facts name it",
    429: "A limit of the broker is reached: repeat the request later",
    500: "A bug; the traceback is in the log of the broker",
    502: "No stream acked the message: it was refused, or may be stored all the same",
    503: "This broker cannot answer now. If `retriable`, send the request to another broker, or repeat it in a moment",
}
_ALWAYS = (400, 401, 403, 415, 429, 500, 503)
_WITH_BODY = (408, 413)
_REDIRECT = {
    "description": "Another broker answers this request",
    "headers": {"Location": {"required": True, "description": "its URL", "schema": {"type": "string"}}},
    "content": {"text/plain": {"schema": {"type": "string"}}},
}


@cache
def document() -> Json:
    """OpenAPI 3.1."""
    every = [shapes.Error, shapes.Problem]
    every += [one for call in _all_calls() for one in (call.answer, call.body, *(call.also or {}).values())]
    every = [one for one in every if one is not None and not isinstance(one, str)]
    schemas, components = msgspec.json.schema_components(every, ref_template=_REF)
    types = {repr(one): schema for one, schema in zip(every, schemas, strict=True)}
    paths = {
        path: {method: _described(path, call, types) for method, call in calls.items()} for path, calls in CALLS.items()
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "natslog", "version": natslog_version()},
        "paths": paths,
        "components": {
            "schemas": _unwrapped(components),
            "responses": _error_responses(),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}, "certificate": {"type": "mutualTLS"}},
        },
        "security": [{"token": []}, {"certificate": []}, {}],
    }


def _unwrapped(components: Json) -> Json:
    """Descriptions, which are docstrings, as one line each."""
    return {name: one | {"description": " ".join(one["description"].split())} for name, one in components.items()}


def _all_calls() -> list[Call]:
    return [call for calls in CALLS.values() for call in calls.values()]


def _error_responses() -> Json:
    content = {JSON: {"schema": {"$ref": _REF.format(name="Error")}}}
    errors = {str(status): {"description": text, "content": content} for status, text in _STATUSES.items()}
    return errors | {"307": _REDIRECT}


def _described(path: str, call: Call, types: Mapping[str, Json]) -> Json:
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    in_path = [{"name": name, "in": "path", "required": True, "schema": OF_PATH[name]} for name in names]
    described: Json = {"summary": call.summary, "parameters": [*in_path, *call.parameters]}
    if call.body is not None:
        kind, schema = (call.body, {}) if isinstance(call.body, str) else (JSON, types[repr(call.body)])
        described["requestBody"] = {"required": call.body_is_required, "content": {kind: {"schema": schema}}}
    statuses = {*_ALWAYS, *call.statuses, *(_WITH_BODY if call.body is not None else ()), *([404] if names else ())}
    responses = {str(status): {"$ref": f"#/components/responses/{status}"} for status in sorted(statuses)}
    for status, answer in {call.status: call.answer, **(call.also or {})}.items():
        responses[str(status)] = _success(call, answer, types)
    return described | {"responses": dict(sorted(responses.items()))}


def _success(call: Call, answer: Any, types: Mapping[str, Json]) -> Json:
    response: Json = {"description": call.summary}
    if call.headers:
        response["headers"] = dict(call.headers)
    if answer is not None:
        response["content"] = {JSON: {"schema": types[repr(answer)]}}
    elif call.status != 204:
        response["content"] = {kind: {} for kind in call.kinds}
    return response


@cache
def _encoded() -> bytes:
    return msgspec.json.encode(document())


@routes.get("/openapi.json")
@access("open")
async def openapi(request: web.Request) -> web.Response:
    return web.Response(body=_encoded(), content_type=JSON, charset="utf-8")
