"""Parameters and bodies that fit their types, and what is answered where they do not."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
import pytest
from aiohttp.test_utils import make_mocked_request
from msgspec import Meta

from natslog.errors import InvalidRequest
from natslog.http.decoding import Body, Parameters
from natslog.http.endpoint import endpoint_of
from natslog.http.table import ENDPOINTS


class Asked(msgspec.Struct, frozen=True):
    number: Annotated[int, Meta(ge=1, le=9)]
    start: Annotated[int, Meta(ge=0, le=99)] | Literal["earliest", "latest"] | None = None
    exact: bool = False
    columns: tuple[str, ...] | None = None
    text: Annotated[str, Meta(max_length=3)] | None = None

    def __post_init__(self) -> None:
        if self.text == "no":
            raise InvalidRequest("text must not be no", parameter="text")


class Given(msgspec.Struct, forbid_unknown_fields=True):
    number: Annotated[int, Meta(ge=1)]
    is_on: bool = False
    id: Annotated[str | None, Meta(description="the id of a stream")] = None
    inner: list[Asked] = []
    name: Annotated[str, Meta(pattern="^[a-z]+$", max_length=9)] = "x"


class Explained(msgspec.Struct):
    EXPECTED: ClassVar = 'give a number: {"number": 3}'

    number: int


def asked(query: str, number: str = "3", *, ignores_unknown: bool = False) -> Any:
    request = make_mocked_request("GET", f"/v1/x/{number}?{query}", match_info={"number": number})
    return Parameters(Asked, "/v1/x/{number}", ignores_unknown=ignores_unknown).of(request)


def test_parameters_become_values_of_their_types() -> None:
    assert asked("") == Asked(3)
    assert asked("start=%2042%20&exact=true&columns=a,b&text=abc") == Asked(3, 42, True, ("a", "b"), "abc")
    assert asked("start=latest&columns=") == Asked(3, "latest", columns=())
    assert asked("other=1", ignores_unknown=True) == Asked(3)


@pytest.mark.parametrize(
    ("query", "number", "parameter", "message"),
    [
        ("strat=1", "3", "strat", "unknown parameter 'strat'; did you mean 'start'?"),
        ("number=3", "3", "number", "unknown parameter 'number'"),
        ("start=1&start=2", "3", "start", "parameter 'start' is given twice"),
        ("start=100", "3", "start", "start '100' must be a whole number from 0 to 99 or earliest, latest"),
        ("start=first", "3", "start", "start 'first' must be a whole number"),
        ("start=1e1", "3", "start", "start '1e1' must be a whole number"),
        ("start=null", "3", "start", "start 'null' must be a whole number"),
        ("exact=1", "3", "exact", "exact '1' must be true or false"),
        ("exact=True", "3", "exact", "exact 'True' must be true or false"),
        ("text=abcd", "3", "text", "text 'abcd' must be a string of 0 to 3 characters"),
        ("text=no", "3", "text", "text must not be no"),
        ("", "0", "number", "number '0' must be a whole number from 1 to 9"),
        ("", "9" * 5000, "number", "number '9999"),
        ("", "\u0663", "number", "must be a whole number"),
    ],
)
def test_parameter_that_does_not_fit_is_named(query: str, number: str, parameter: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        asked(query, number)
    assert message in refused.value.message
    assert len(refused.value.message) < 200
    assert refused.value.facts == {"parameter": parameter}


def test_missing_parameter_is_named() -> None:
    request = make_mocked_request("GET", "/v1/x", match_info={})
    with pytest.raises(InvalidRequest, match="the parameter number is missing") as refused:
        Parameters(Asked, "/v1/x", ignores_unknown=False).of(request)
    assert refused.value.facts == {"parameter": "number"}


def test_call_without_parameters_refuses_all() -> None:
    with pytest.raises(InvalidRequest, match="unknown parameter 'x'"):
        Parameters(None, "/v1/x", ignores_unknown=False).of(make_mocked_request("GET", "/v1/x?x=1"))


@pytest.mark.parametrize(
    ("body", "field", "message"),
    [
        (b'{"number": 1, "is_one": true}', "is_one", "unknown field 'is_one'; did you mean 'is_on'?"),
        (b"{}", "number", "the field number is missing"),
        (b'{"number": 1, "inner": [{}]}', "inner", "missing required field `number`"),
        (b'{"number": -1}', "number", "number -1 must be a whole number of at least 1"),
        (b'{"number": true}', "number", "number True must be a whole number"),
        (b'{"number": 1, "is_on": null}', "is_on", "is_on None must be true or false"),
        (b'{"number": 1, "name": "A b"}', "name", "name 'A b' must be a string that matches ^[a-z]+$"),
        (b'{"number": 1, "id": 7}', "id", "id 7 must be the id of a stream"),
        (b'{"number": ' + b"9" * 5000 + b"}", "number", "number must be a whole number"),
        (b'{"number": 1, "inner": [{"number": 0}]}', "inner", "at `$.inner[0].number`"),
        (b"[]", None, "the body must be a JSON object"),
        (b"{", None, "the body is not JSON"),
        (b'{"number": 1, "id": "\\ud800"}', None, "the body is not JSON"),
        (b"\xff", None, "the body is not JSON"),
    ],
)
def test_body_that_does_not_fit_is_explained(body: bytes, field: str | None, message: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        Body(Given).of(body)
    assert message in refused.value.message
    assert refused.value.facts == ({} if field is None else {"field": field})


def test_body_that_nests_too_deeply_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="not JSON"):
        Body(dict[str, Any]).of(b'{"a":' * 5000)


def test_struct_states_what_is_expected() -> None:
    for body in (b"{}", b'{"number": "x"}', b"nothing"):
        with pytest.raises(InvalidRequest, match=r'^give a number: \{"number": 3\}: '):
            Body(Explained).of(body)


def test_every_route_finds_its_row() -> None:
    for endpoint in ENDPOINTS:
        request = make_mocked_request(endpoint.method, "/x")
        request._match_info = type("Found", (), {"handler": endpoint.route.handler})()  # type: ignore[assignment]
        assert endpoint_of(request) is endpoint


def test_errors_have_no_values_of_bodies_that_may_be_secret() -> None:
    with pytest.raises(InvalidRequest) as refused:
        Body(Given, shows_values=False).of(b'{"number": 1, "name": "S E C"}')
    assert refused.value.message == "name must be a string that matches ^[a-z]+$"
    silent = {one.named for one in ENDPOINTS if one._body is not None and not one._body._shows_values}
    assert {"POST /v1/session", "POST /v1/streams/{name}/publish", "POST /v1/streams/{name}/erase"} <= silent
