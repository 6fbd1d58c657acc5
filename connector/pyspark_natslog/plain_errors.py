"""Errors in operation as one line: Spark shows what a Python worker raises with all frames that led there."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar

from natslog.errors import NatslogError

_HIDES_TRACEBACK = "SPARK_HIDE_TRACEBACK"
_WORKER = "PYTHON_WORKER_FACTORY_"  # begins variables that only workers have

Class = TypeVar("Class", bound=type)
Result = TypeVar("Result")


def plain_errors(*methods: str) -> Callable[[Class], Class]:
    """A class whose methods of these names make Spark omit the frames where they raise `NatslogError`. The variable of
    Spark that does it is set in the worker only, and that ends with the error.
    """

    def decorated(one: Class) -> Class:
        for name in methods:
            setattr(one, name, _plain(getattr(one, name)))
        return one

    return decorated


def _plain(method: Callable[..., Result]) -> Callable[..., Result]:
    @functools.wraps(method)
    def called(*given: Any, **named: Any) -> Result:
        try:
            return method(*given, **named)
        except NatslogError:
            if any(name.startswith(_WORKER) for name in os.environ):
                os.environ[_HIDES_TRACEBACK] = "1"
            raise

    return called
