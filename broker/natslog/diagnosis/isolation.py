"""A function in a process of its own, with a time limit, for work that may hang.

Theory of operation. The process is forked, and writes its result into a pipe. When the time is up it is killed, and not
waited for: a process in a system call that does not return (a disk that hangs) ends only with the call. It could hold a
thread of this process, and so the end of this process, but not this one. The memory of the child is limited, because
what it reads from others may have any size.

The caller has no other threads that hold locks at that moment: it is a command.
"""

from __future__ import annotations

import logging
import os
import resource
import select
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from natslog.errors import NatslogError

Result = TypeVar("Result")

_MORE_MEMORY_BYTES = 2 * 1024**3
_MOST_RESULT_BYTES = 64 * 1024 * 1024
_PART_BYTES = 1024 * 1024
_END_WITHIN_S = 1.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Unfinished(Exception):
    """The function has no result; the text is why. `is_hung`: its time was up."""

    def __init__(self, why: str, *, is_hung: bool = False) -> None:
        super().__init__(why)
        self.is_hung = is_hung


class _Answer(msgspec.Struct):
    result: Any = None
    error: str | None = None


def isolated(work: Callable[[], Result], kind: type[Result], within_s: float) -> Result:
    """What `work` returns in another process.

    Args:
        kind: of the result, which msgspec can encode.

    Raises:
        Unfinished: it raised an error, ended, or did not end in time.
    """
    reading, writing = os.pipe()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Python loses a ^C that comes while it forks
    child = os.fork()
    if child == 0:  # ^C stays blocked: this process is ended by its parent
        _run(work, writing)
    try:
        os.close(writing)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        data = _read(reading, time.monotonic() + within_s)
    finally:
        os.close(reading)
        _reap(child)
    if data is None:
        raise Unfinished(f"it did not end within {within_s:g} s", is_hung=True)
    try:
        answer = msgspec.msgpack.decode(data, type=_Answer)
    except msgspec.DecodeError as error:
        raise Unfinished("its process ended without a result") from error
    if answer.error is not None:
        raise Unfinished(answer.error)
    try:
        return msgspec.convert(answer.result, kind)
    except msgspec.ValidationError as error:  # of another's answer, passed on
        raise Unfinished(f"its result is not valid: {error}") from error


def _run(work: Callable[[], Any], writing: int) -> None:
    """In the child; does not return."""
    try:
        logging.disable(logging.CRITICAL)  # what a library logs is in the result, or of no interest
        _limit_memory()
        try:
            answer = _Answer(result=work())
        except NatslogError as error:
            answer = _Answer(error=error.message)
        except Exception as error:
            answer = _Answer(error=f"{type(error).__name__}: {error}")
        view = memoryview(msgspec.msgpack.encode(answer))
        while view:
            view = view[os.write(writing, view[:_PART_BYTES]) :]
    finally:
        os._exit(0)


def _limit_memory() -> None:
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * _PAGE_BYTES
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = used_bytes + _MORE_MEMORY_BYTES
    if hard == resource.RLIM_INFINITY or wanted < hard:
        resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))


def _read(reading: int, deadline_s: float) -> bytes | None:
    """Everything until the child has ended; None when the time is up, or it is too much."""
    parts, size_bytes = list[bytes](), 0
    while (left_s := deadline_s - time.monotonic()) > 0 and size_bytes < _MOST_RESULT_BYTES:
        if not select.select([reading], [], [], left_s)[0]:
            break
        part = os.read(reading, _PART_BYTES)
        if not part:
            return b"".join(parts)
        parts.append(part)
        size_bytes += len(part)
    return None


def _reap(child: int) -> None:
    """Ends it, if it has not ended."""
    with suppress(ProcessLookupError):
        deadline_s = time.monotonic() + _END_WITHIN_S
        os.kill(child, signal.SIGKILL)
        while os.waitpid(child, os.WNOHANG)[0] == 0 and time.monotonic() < deadline_s:
            time.sleep(0.005)
