"""The API described for programs: `/openapi.json`, from the table of calls and the types that they take and answer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeAlias

import msgspec

from natslog import request_ids
from natslog.errors import natslog_version
from natslog.http.decoding import names_in
from natslog.http.endpoint import JSON, Endpoint
from natslog.http.shapes.common import Error, NameText, Problem
from natslog.http.table import ENDPOINTS

Json: TypeAlias = dict[str, Any]

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

_REQUEST_ID = {
    request_ids.HEADER: {
        "description": "a repeated request with the same id makes the change once",
        "schema": {"type": "string", "pattern": f"^{request_ids.PATTERN}$"},
    }
}
_REDIRECTED = {"Natslog-Redirected": {"description": "true: answer 421 instead of 307", "schema": {"type": "string"}}}
_LISTED = {"style": "form", "explode": False}


@cache
def document() -> Json:
    """OpenAPI 3.1."""
    public = [endpoint for endpoint in ENDPOINTS if endpoint.is_public]
    every: list[Any] = [Error, Problem]
    every += [kind for one in public for kind in (one.answer, one.body_shown_as)]
    every = [one for one in every if one is not None and not isinstance(one, str)]
    schemas, components = msgspec.json.schema_components(every, ref_template=_REF)
    types = {repr(one): schema for one, schema in zip(every, schemas, strict=True)}
    paths: Json = {}
    for endpoint in public:
        path = re.sub(r":[^}]*", "", endpoint.path)
        paths.setdefault(path, {})[endpoint.method.lower()] = _described(endpoint, types)
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
    return {name: one | {"description": _line(one["description"])} for name, one in components.items()}


def _line(text: str) -> str:
    return " ".join(text.split())


def _error_responses() -> Json:
    content = {JSON: {"schema": {"$ref": _REF.format(name="Error")}}}
    errors = {str(status): {"description": text, "content": content} for status, text in _STATUSES.items()}
    return errors | {"307": _REDIRECT}


def _described(endpoint: Endpoint, types: Mapping[str, Json]) -> Json:
    summary = _line((endpoint.handler.__doc__ or "").split("\n\n")[0])
    described: Json = {"summary": summary, "parameters": _parameters(endpoint)}
    body = endpoint.body_shown_as
    if body is not None:
        kind, schema = (body, {}) if isinstance(body, str) else (JSON, types[repr(body)])
        described["requestBody"] = {"required": endpoint.body_is_required, "content": {kind: {"schema": schema}}}
    statuses = {*_ALWAYS, *endpoint.errors}
    statuses |= {*(_WITH_BODY if body is not None else ()), *([404] if names_in(endpoint.path) else ())}
    responses = {str(status): {"$ref": f"#/components/responses/{status}"} for status in sorted(statuses)}
    for status in (endpoint.status, *endpoint.also):
        responses[str(status)] = _success(endpoint, summary, types)
    return described | {"responses": dict(sorted(responses.items()))}


def _parameters(endpoint: Endpoint) -> list[Json]:
    in_path = names_in(endpoint.path)
    fields: dict[str, Json] = {name: {"schema": _schema(NameText if name == "name" else str)} for name in in_path}
    if endpoint.parameters is not None:
        for field in msgspec.structs.fields(endpoint.parameters):
            schema = _schema(field.type)
            text = {"description": schema.pop("description")} if "description" in schema else {}
            fields[field.encode_name] = text | {"schema": schema, "required": field.required}
    found: list[Json] = [{"name": name, "in": "path"} | fields.pop(name) | {"required": True} for name in in_path]
    for name, described in fields.items():
        listed = _LISTED if described["schema"].get("type") == "array" else {}
        found.append({"name": name, "in": "query"} | described | listed)
    headers = {**endpoint.accepts, **(_REQUEST_ID if endpoint.takes_id else {})}
    headers |= _REDIRECTED if 307 in endpoint.errors else {}
    return found + [{"name": name, "in": "header"} | header for name, header in headers.items()]


def _schema(kind: Any) -> Json:
    """Of a parameter, which is never null: it is absent."""
    schema = msgspec.json.schema(kind)
    if "anyOf" in schema:
        kinds = [one for one in schema.pop("anyOf") if one != {"type": "null"}]
        schema |= kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
    return schema


def _success(endpoint: Endpoint, summary: str, types: Mapping[str, Json]) -> Json:
    response: Json = {"description": summary}
    if endpoint.headers:
        response["headers"] = dict(endpoint.headers)
    if endpoint.answer is not None:
        response["content"] = {JSON: {"schema": types[repr(endpoint.answer)]}}
    elif endpoint.status != 204:
        response["content"] = {kind: {} for kind in endpoint.kinds}
    return response


@cache
def encoded() -> bytes:
    """The document as it is sent."""
    return msgspec.json.encode(document())
