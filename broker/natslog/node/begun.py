"""Work that seldom has to wait: it is begun where it is called, and a task continues it only if it waits. A task from
the beginning would cost another turn of the event loop, of which an ack from three replicas has many.

The first part runs in the task of the caller: it uses nothing that belongs to a task, as `asyncio.timeout` does.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from types import TracebackType
from typing import Any


class _Begun(Coroutine[Any, Any, None]):
    """A coroutine that was begun, and waits, for a task to continue it. If the task is cancelled before its first step,
    so is the coroutine.

    Args:
        awaited: what the coroutine yielded.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, None], awaited: Any) -> None:
        self._coroutine = coroutine
        self._yielded = [awaited]

    def send(self, value: Any) -> Any:
        return self._yielded.pop() if self._yielded else self._coroutine.send(value)

    def throw(self, kind: Any, value: BaseException | object = None, traceback: TracebackType | None = None, /) -> Any:
        self._yielded.clear()
        return self._coroutine.throw(kind if value is None else value)  # type: ignore[arg-type]

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, None]:
        raise AssertionError("a task continues it")


def begin(
    coroutine: Coroutine[Any, Any, None], name: str, spawn: Callable[[Coroutine[Any, Any, None], str], object]
) -> None:
    """Begins it now. If it waits, or fails, `spawn` gets the rest: what its error means is decided in one place."""
    try:
        awaited = coroutine.send(None)
    except StopIteration:
        return
    except Exception as error:
        spawn(_failed(error), name)
    else:
        spawn(_Begun(coroutine, awaited), name)


async def _failed(error: Exception) -> None:
    raise error
