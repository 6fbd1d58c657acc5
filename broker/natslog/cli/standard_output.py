"""Standard output that reports its own failures: a closed pipe ends the command quietly, a full disk is one sentence.

Typer ends a command with code 1 at any broken pipe, and a failure of the last flush is a traceback at exit. So the
error is raised where it happens, as one that is known to be of standard output and not of a connection.
"""

from __future__ import annotations

import errno
import io
import sys
from typing import Any, ClassVar

from natslog.errors import NatslogError

CLOSED_PIPE_EXIT_CODE = 141
"""What a shell shows for a program that SIGPIPE ended."""


class OutputFailed(NatslogError):
    """Standard output failed; what was written before may have arrived."""

    code: ClassVar[str] = "output_failed"

    def __init__(self, message: str, *, is_closed_pipe: bool) -> None:
        super().__init__(message)
        self.is_closed_pipe = is_closed_pipe


class _Output(io.FileIO):
    """After a failure all further output is dropped, so that the interpreter's flush at exit does not fail again."""

    _has_failed = False

    def write(self, data: Any, /) -> int:
        if self._has_failed:
            return memoryview(data).nbytes
        try:
            return super().write(data)
        except OSError as error:
            self._has_failed = True
            message = f"cannot write to standard output: {error.strerror}"
            raise OutputFailed(message, is_closed_pipe=error.errno == errno.EPIPE) from error


def report_failures() -> None:
    """From now on writing to `sys.stdout` raises OutputFailed. Does nothing if `sys.stdout` was replaced."""
    usual = sys.__stdout__
    if usual is None or sys.stdout is not usual:
        return
    usual.flush()
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(_Output(usual.fileno(), "wb", closefd=False)),
        encoding=usual.encoding,
        errors=usual.errors,
        line_buffering=usual.line_buffering,
    )


def flush() -> None:
    """Raises OutputFailed."""
    if sys.stdout is not None:
        sys.stdout.flush()
