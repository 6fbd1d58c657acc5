"""The id of the HTTP request that a broker is handling, for every line of its log and for every broker that takes part.

Theory of operation. A context variable holds a mutable object with the id: tasks that are created while the request is
handled inherit it, and `carried` binds it to work in another thread. When the request is over, the object is emptied.
So work that continues afterwards in a copy of the context logs no id of a request that is over. Tasks that a request
begins and that work for others, too, are created in an empty context.

An id that comes from outside is used only if it is well-formed: at most 64 letters, digits and dashes.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from contextvars import ContextVar, Token, copy_context
from functools import partial
from typing import TypeVar

HEADER = "Natslog-Request-Id"
PATTERN = "[A-Za-z0-9-]{8,64}"
_WELL_FORMED = re.compile(PATTERN)

Result = TypeVar("Result")


class handling:  # noqa: N801 (used as a function)
    """A context manager: what runs inside handles this request. "" or an id that is not well-formed: no request."""

    __slots__ = ("_token", "id")

    def __init__(self, request_id: str) -> None:
        self.id = request_id if is_well_formed(request_id) else ""

    def __enter__(self) -> None:
        self._token: Token[handling | None] = _CURRENT.set(self)

    def __exit__(self, *_: object) -> None:
        self.id = ""
        _CURRENT.reset(self._token)


_CURRENT: ContextVar[handling | None] = ContextVar("natslog_request", default=None)


def is_well_formed(request_id: str) -> bool:
    """Whether it may be used as the id of a request."""
    return _WELL_FORMED.fullmatch(request_id) is not None


def new_request_id() -> str:
    """32 hexadecimal digits."""
    return secrets.token_hex(16)


def current_request_id() -> str:
    """Of the request that is being handled here; "" if there is none, or if it is over."""
    found = _CURRENT.get()
    return "" if found is None else found.id


def carried(work: Callable[..., Result]) -> Callable[..., Result]:
    """The same work, which another thread then does for the request that is being handled here."""
    return partial(copy_context().run, work) if current_request_id() else work
