"""The API against its own description: requests made from `/openapi.json`, valid ones and others, to a real broker.

Every response must have a status, media type, headers and a body that are described. A status of 500 is a bug; the only
503 of a healthy broker are those in `EXPECTED_503`. A response that takes longer than `WITHIN_S` counts as a hang.

Two kinds of requests: the boundary cases of each schema (`schemathesis run --phases coverage`), and generated ones, of
which many name streams that exist, with offsets in them. No call is left out; the bounds are these: `wait_ms` is at
most `WAIT_MS`, and brokers are added at an address where nothing listens (`URL`).
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.checks import CheckContext
from schemathesis.core.transport import Response
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from natslog.client import NatslogClient
from natslog.http.answer_parts import ARROW_STREAM, NDJSON
from natslog.http.openapi import document
from tests.harness import BrokerProcess, publish_acked

WITHIN_S = 30.0
WAIT_MS = 50
URL = "http://127.0.0.1:9"
ROWS = 20
EXPECTED_503 = {"not_enough_brokers", "broker_unavailable"}
"""A stream with two replicas, and a new broker that does not respond."""

CALLS = [(path, method) for path, calls in document()["paths"].items() for method in calls]
DESTRUCTIVE = (("DELETE", "/v1/streams/{name}"), ("POST", "/v1/streams/{name}/seal"))
"""These make the streams useless for other calls, so they come last where calls share streams."""


def known(name: str, stream_id: str) -> dict[str, tuple[Any, ...]]:
    """Values that mean something to the broker of this test, by the names of parameters and fields."""
    offsets = tuple(range(ROWS + 1))
    return {
        "name": (name,),
        "stream": (name,),
        "streams": ([name],),
        "subject": (f"{name}.x", f"{name}.>", "*.x", "generated.>"),
        "pattern": (f"{name}*", "*"),
        "consumer": ("job",),
        "cursor": ("job",),
        "producer": ("job",),
        "part": ("0", "1"),
        "batch": (0, 1, 2),
        "id": (1, stream_id),
        "to": (1,),
        "brokers": ([1],),
        "start": offsets,
        "end": offsets,
        "offset": offsets,
        "below": offsets,
        "timestamp": ("0", "2026-11-20T10:30:00Z"),
        "max_age": ("7d", 3600),
        "max_bytes": (1, 1000, "10GiB"),
        "columns": (["value"], ["offset", "value"]),
    }


def bounded(names: tuple[str, ...] = ()) -> dict[str, Any]:
    """The document within the bounds of this test; with `names`, these are the only streams in paths."""
    found = copy.deepcopy(document())
    for calls in found["paths"].values():
        for one in (parameter for call in calls.values() for parameter in call["parameters"]):
            if one["name"] == "wait_ms":
                one["schema"]["maximum"] = WAIT_MS
            if one["name"] == "events":  # it would not end
                one["required"], one["schema"] = True, {"type": "integer", "minimum": 1, "maximum": 1}
            if names and one["in"] == "path" and one["name"] in ("name", "stream"):
                one["schema"] = {"enum": list(names)}
    schemas = found["components"]["schemas"]
    schemas["AskedPositions"]["properties"]["wait_ms"]["maximum"] = WAIT_MS
    schemas["Newcomer"]["properties"]["url"] = {"enum": [URL, "", "http://", "no URL", "http://:9", "ftp://host:9"]}
    return found


@cache
def operation(path: str, method: str) -> Any:
    return schemathesis.openapi.from_dict(bounded())[path][method]


# ---- what is sent ----


def arrow_streams() -> st.SearchStrategy[bytes]:
    """Rows to append: whole ones, some that end early, and bytes that are none."""
    subjects = st.sampled_from(["test.x", "elsewhere", "test.*", "\0"])
    row = st.fixed_dictionaries({"value": st.binary(max_size=20)}, optional={"subject": subjects, "key": st.binary()})
    whole = st.lists(row, max_size=5).map(encoded)
    return whole | st.builds(lambda data, cut: data[:-cut], whole, st.integers(1, 100)) | st.binary(max_size=100)


def encoded(rows: list[dict[str, Any]]) -> bytes:
    kinds = {"value": pa.binary(), "subject": pa.string(), "key": pa.binary()}
    table = pa.Table.from_pylist(rows, pa.schema([(name, kinds[name]) for name in kinds]))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


schemathesis.openapi.media_type(ARROW_STREAM, arrow_streams())


def with_known(value: Any, chosen: dict[str, Any]) -> Any:
    """The same with the chosen values of parameters and fields that are there, if they are of the same type."""
    if isinstance(value, list):
        return [with_known(one, chosen) for one in value]
    if not isinstance(value, dict):
        return value
    return {
        name: chosen[name] if name in chosen and type(one) is type(chosen[name]) else with_known(one, chosen)
        for name, one in value.items()
    }


def aimed(case: Case, chosen: dict[str, Any]) -> Case:
    """The same request with the chosen values."""
    path = {name: value for name, value in chosen.items() if name in case.path_parameters}
    case.path_parameters.update(path)
    case.query.update({name: value for name, value in chosen.items() if name in case.query})
    case.body = with_known(case.body, chosen)
    return case


# ---- what is answered ----


def answered_without_bug(ctx: CheckContext, response: Response, case: Case) -> None:
    if response.status_code == 503 and case.operation.path != "/readyz":
        assert response.json()["error"]["code"] in EXPECTED_503, response.text
    else:
        assert response.status_code < 500, response.text


CHECKS = [
    answered_without_bug,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as one:
        yield one


def check_call(path: str, method: str, broker: BrokerProcess, session: requests.Session, name: str, asked: Any) -> None:
    """With a stream of its own."""
    call, client = operation(path, method), broker.client()
    created = client.create_stream(name, f"{name}.>")
    publish_acked(broker.nats_url, f"{name}.x", [b"%d" % at for at in range(ROWS)])
    choices = {one: st.sampled_from(values) for one, values in known(name, created["id"]).items()}

    @settings(
        asked,
        deadline=None,
        database=None,
        phases=[Phase.generate],  # a request that fails need not be the shortest one
        suppress_health_check=list(HealthCheck),
    )
    @given(
        st.one_of(call.as_strategy(generation_mode=mode) for mode in GenerationMode),
        st.fixed_dictionaries({}, optional=choices),
        st.sampled_from(["*/*", ARROW_STREAM, NDJSON, "application/json"]),
    )
    def check(case: Case, chosen: dict[str, Any], accept: str) -> None:
        aimed(case, chosen).call_and_validate(
            base_url=broker.url,
            session=session,
            headers={"Accept": accept},
            checks=CHECKS,
            timeout=WITHIN_S,
            allow_redirects=False,
        )

    check()
    client.close()


@pytest.mark.long
@pytest.mark.parametrize(("path", "method"), CALLS)
def test_answers_are_as_described(
    path: str, method: str, broker: BrokerProcess, session: requests.Session, name: str
) -> None:
    check_call(path, method, broker, session, name, settings(max_examples=15, derandomize=True))


@pytest.mark.long
@pytest.mark.parametrize(("path", "method"), CALLS)
def test_many_answers_are_as_described(
    path: str, method: str, broker: BrokerProcess, session: requests.Session, name: str
) -> None:
    check_call(path, method, broker, session, name, settings(max_examples=40))


@pytest.mark.long
def test_boundary_cases_are_answered_as_described(
    broker: BrokerProcess, client: NatslogClient, name: str, tmp_path: Path
) -> None:
    """Methods that are not described are refused, too."""
    client.create_stream(name, f"{name}.>")
    described = tmp_path / "openapi.json"
    described.write_text(json.dumps(bounded((name,))))
    (tmp_path / "schemathesis.toml").write_text(
        '[checks.not_a_server_error]\nexpected-statuses = ["2xx", "4xx", 503]\n'
    )
    last = [f"{method} {path}" for method, path in DESTRUCTIVE]
    for which in ("exclude", "include"):
        chosen = [argument for one in last for argument in (f"--{which}-name", one)]
        run_schemathesis(described, broker, *chosen)


def run_schemathesis(described: Path, broker: BrokerProcess, *arguments: str) -> None:
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,"
    checks += "response_schema_conformance,unsupported_method,allow_header_conformance"
    options = ["--phases", "coverage", "--checks", checks, "--request-timeout", str(WITHIN_S), "--max-redirects", "0"]
    options += ["--generation-database", "none", "--continue-on-failure", "--no-color", "--url", broker.url]
    command = [sys.executable, "-m", "schemathesis.cli", "run", str(described), *options, *arguments]
    done = subprocess.run(command, cwd=described.parent, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
