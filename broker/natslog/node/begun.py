"""Work that seldom has to wait: it is begun where it is called, and a task continues it only if it waits. A task from
the beginning would cost another turn of the event loop, of which an ack from three replicas has many.

The first part runs in the task of the caller: it uses nothing that belongs to a task, as `asyncio.timeout` does.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")


class Begun(Generic[Result]):
    """A coroutine that was begun, and waits. Awaited, it continues, and returns what the coroutine returns.

    Args:
        awaited: what the coroutine yielded.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Result], awaited: Any) -> None:
        self._coroutine, self._awaited = coroutine, awaited

    def __await__(self) -> Generator[Any, Any, Result]:
        awaited = self._awaited
        while True:
            try:
                yield awaited
            except GeneratorExit:  # it is not awaited any more
                self._coroutine.close()
                raise
            except BaseException as error:
                go_on: Callable[[], Any] = partial(self._coroutine.throw, error)
            else:
                go_on = partial(self._coroutine.send, None)
            try:
                awaited = go_on()
            except StopIteration as end:
                result: Result = end.value
                return result


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
        spawn(_continued(Begun(coroutine, awaited)), name)


async def _continued(begun: Begun[None]) -> None:
    await begun


async def _failed(error: Exception) -> None:
    raise error
