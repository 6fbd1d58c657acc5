"""`/openapi.json` against the routes of the server, the settings of streams and the errors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web

from natslog.errors import KINDS
from natslog.http.app import ROUTES
from natslog.http.openapi import document
from natslog.http.shapes.common import shape_response
from natslog.http.shapes.reading import Position
from natslog.http.shapes.streams import Rolled
from natslog.node.peers.handshake import LINK_PATH
from natslog.stream_settings import SETTING_NAMES

CALLS = [(path, method) for path, calls in document()["paths"].items() for method in calls]


def every_value(value: Any, key: str) -> Iterator[Any]:
    """Of each field with this name, at any depth."""
    if isinstance(value, dict):
        yield from (value[key],) if key in value else ()
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from every_value(one, key)


def resolved(reference: str) -> Any:
    found = document()
    for name in reference.removeprefix("#/").split("/"):
        found = found[name]
    return found


def test_every_route_is_described_and_nothing_else() -> None:
    defined = [route for route in ROUTES if isinstance(route, web.RouteDef)]
    routes = {(re.sub(r":[^}]*", "", route.path), route.method.lower()) for route in defined}
    assert {one for one in routes if one[0] != LINK_PATH} == set(CALLS)


def test_every_reference_has_its_object() -> None:
    references = set(every_value(document(), "$ref"))
    assert "#/components/schemas/Problem" in references
    for reference in references:
        assert resolved(reference)
    names = {f"#/components/schemas/{name}" for name in document()["components"]["schemas"]}
    assert names <= references | {"#/components/schemas/Error"}, "no schema is unused"


@pytest.mark.parametrize(("path", "method"), CALLS)
def test_every_call_states_what_it_takes_and_answers(path: str, method: str) -> None:
    call = document()["paths"][path][method]
    responses = call["responses"]
    assert {"400", "401", "403", "429", "503"} <= set(responses)
    assert any(status < "300" for status in responses)
    assert "default" not in responses, "each status is named"
    in_path = {one["name"] for one in call["parameters"] if one["in"] == "path"}
    assert in_path == set(re.findall(r"\{(\w+)\}", path))
    assert ("404" in responses) >= bool(in_path)
    assert {"408", "413"} <= set(responses) if "requestBody" in call else True
    for one in call["parameters"]:
        assert one["schema"], one["name"]
    assert json.loads(json.dumps(call)) == call


def test_errors_name_all_codes() -> None:
    problem = resolved("#/components/schemas/Problem")
    assert problem["properties"]["code"]["enum"] == sorted(KINDS)
    assert set(problem["required"]) == {"code", "message", "retriable"}
    assert problem.get("additionalProperties", True), "facts"
    for status, kind in ((kind.status, kind) for kind in KINDS.values()):
        assert str(status) in document()["components"]["responses"], kind
    assert resolved("#/components/schemas/Error")["properties"]["error"] == {"$ref": "#/components/schemas/Problem"}


def test_settings_of_streams_are_those_of_the_model() -> None:
    changed, new, shown = (
        set(resolved(f"#/components/schemas/{name}")["properties"]) for name in ("ChangedStream", "NewStream", "Stream")
    )
    assert changed == {*SETTING_NAMES, "paused", "if_version", "id"}
    assert new == {*SETTING_NAMES, "name"}
    assert shown > set(SETTING_NAMES)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("Stream", ("bytes", "segments")),
        ("Position", ("bytes", "segments")),
        ("Split", ("rows", "bytes")),
        ("Extent", ("bytes",)),
        ("Lag", ("rows", "bytes", "seconds")),
    ],
)
def test_counts_may_be_unknown_to_a_reader(name: str, fields: tuple[str, ...]) -> None:
    properties = resolved(f"#/components/schemas/{name}")["properties"]
    for field in fields:
        assert {"type": "null"} in properties[field]["anyOf"], field


def test_fields_that_are_not_set_are_left_out() -> None:
    shown = Position(name="orders", id="id", leader_epoch=3)
    assert json.loads(shape_response(shown).body or b"") == {"name": "orders", "id": "id", "leader_epoch": 3}
    shown.problem = {"code": "no_leader", "isr": [1]}
    assert json.loads(shape_response(shown).body or b"")["problem"] == {"code": "no_leader", "isr": [1]}


def test_paths_that_are_not_unicode_are_shown_escaped() -> None:
    body = shape_response(Rolled("orders", 1, "/data/\udcff")).body
    assert json.loads(body or b"")["folder"] == "/data/\udcff"
