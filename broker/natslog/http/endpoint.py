"""One call of the HTTP API: a row of the table, and what happens to a request before and after its handler.

Theory of operation. `table` has a row for each call: path, handler, and the types of what it takes and answers. The
server's routes, access checks (`gate`), `/openapi.json` and the reading of parameters and bodies follow from the rows.
A handler is a function of one `Call`, whose parameters and body are decoded and within their limits.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from types import NoneType
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin, get_type_hints

from aiohttp import web

from natslog.http.access import Access
from natslog.http.bodies import MAX_BODY_BYTES, read_body
from natslog.http.context import BODY
from natslog.http.decoding import Body, Parameters
from natslog.http.shapes.common import MAX_OFFSET, Answer

GivenParameters = TypeVar("GivenParameters")
GivenBody = TypeVar("GivenBody")
JSON = "application/json"

CHANGE = (409, 421)
"""Statuses of errors where the metadata leader makes a change."""
BY_LEADER = (307, 404, 421)
"""Statuses of errors where the leader of a stream answers."""
OFFSET = {"type": "integer", "minimum": 0, "maximum": MAX_OFFSET}


def header(text: str, schema: dict[str, Any], *, required: bool = True) -> dict[str, Any]:
    """Of a response, as `/openapi.json` describes it."""
    return {"required": required, "description": text, "schema": schema}


STATED = {
    "Natslog-Leader-Epoch": header("of the leader that states this", OFFSET),
    "Natslog-Stream-Id": header("of the stream", {"type": "string"}),
}
"""Headers by which a client recognises a response that is older than that of a newer leader."""


@dataclass(frozen=True, slots=True)
class Call(Generic[GivenParameters, GivenBody]):
    """A request as its handler receives it. `parameters`: of path and query; `body`; None where a call takes none."""

    request: web.Request
    parameters: GivenParameters
    body: GivenBody


PlainCall = Call[None, None]


@dataclass(eq=False)
class Endpoint:
    """One method of a path.

    Attributes:
        named: method and path. `handler`: its annotations are the types of what it takes and answers; its docstring, up
            to the first empty line, is the summary in `/openapi.json`. `access`: what the call needs.
        status: of success. `also`: further statuses with the same type of body. `headers`: of a success, with their
            schemas. `kinds`: media types of an answer that is no JSON.
        accepts: names of request headers that matter, with their schemas.
        body_shown_as: the type of the body in `/openapi.json`, where that is another one, or a media type.
            `body_is_required`: without a body, its type has the defaults.
        most_bytes: of the body. `body_kept`: for the time of the request, so that it can be sent on to another broker
            and belongs to what a request id names; if `logged`, the audit log has it, too.
        errors: statuses of errors, besides those of every call. `takes_id`: it changes the metadata, and a repeated
            request with the same request id makes the change once. `is_stated`: the leader of the stream answers, and
            states its epoch.
        is_public: it is in `/openapi.json`. `ignores_unknown`: unknown parameters in the query are no error.
            `answers_head`: it answers HEAD, too.
        parameters, body: types of what the handler takes; None: nothing. `answer`: type of the JSON that it answers;
            None: no JSON.
    """

    named: str
    handler: Callable[[Call[Any, Any]], Awaitable[web.StreamResponse]]
    access: Access
    _: KW_ONLY
    status: int = 200
    also: Sequence[int] = ()
    headers: Mapping[str, Any] = field(default_factory=dict)
    kinds: Sequence[str] = (JSON,)
    accepts: Mapping[str, Any] = field(default_factory=dict)
    body_shown_as: Any = None
    body_is_required: bool = True
    most_bytes: int = MAX_BODY_BYTES
    body_kept: Literal["logged", "unlogged", "no"] = "logged"
    errors: Sequence[int] = ()
    takes_id: bool = False
    is_stated: bool = False
    is_public: bool = True
    ignores_unknown: bool = False
    answers_head: bool = True

    def __post_init__(self) -> None:
        self.method, self.path = self.named.split(" ")
        types = get_type_hints(self.handler)
        self.parameters, self.body = (None if one is NoneType else one for one in get_args(types["call"]))
        self.answer = get_args(types["return"])[0] if get_origin(types["return"]) is Answer else None
        self.body_shown_as = self.body_shown_as or self.body
        if self.is_stated:
            self.headers, self.errors = {**STATED, **self.headers}, (*BY_LEADER, *self.errors)
        if self.takes_id:
            self.errors = (*CHANGE, *self.errors)
        self._parameters = Parameters(self.parameters, self.path, ignores_unknown=self.ignores_unknown)
        is_open = self.body_kept == "logged"
        self._body = None if self.body is None else Body(self.body, shows_values=is_open)
        more = {"allow_head": self.answers_head} if self.method == "GET" else {}
        self.route = web.RouteDef(self.method, self.path, self.serve, more)

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Raises InvalidRequest: the request does not fit the types. As `read_body`, and the handler."""
        return await self.handler(await self.call(request))

    async def call(self, request: web.Request) -> Call[Any, Any]:
        """What the handler receives. Raises InvalidRequest; as `read_body`."""
        parameters, body = self._parameters.of(request), None
        if self.body is not None and self._body is not None:
            if not self.body_is_required and not request.can_read_body:
                return Call(request, parameters, self.body())
            data = await read_body(request, self.most_bytes)
            if self.body_kept != "no":
                request[BODY] = data
            body = self._body.of(data)
        return Call(request, parameters, body)


def endpoint_of(request: web.Request) -> Endpoint | None:
    """None: there is no such call."""
    owner = getattr(request.match_info.handler, "__self__", None)
    return owner if isinstance(owner, Endpoint) else None
