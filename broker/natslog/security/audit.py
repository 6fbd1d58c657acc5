"""The audit log: one line of JSON for each change, and for each access that was refused.

A line names who (identity, id of the token), from where, what (method, path, and the route of the API), with which
outcome (HTTP status and error code), when, at which broker, and the id of the request. A change also has its parameters
and the beginning of its JSON body, which hold no credentials; of a token that was sent where it does not belong, and of
one that is not valid, the line has the id. JSON escapes all control characters, so no line can imitate another one, or
send commands to a terminal.

Refusals are logged at a bounded rate; the next line states how many were left out. Changes are always logged. What a
client does that has not proved who it is cannot push other lines out: of each address the first event in a minute is a
line, and the others are counted in one line at the end of the minute (`unauthenticated`). A file
that cannot be written (a full disk, a folder that is missing) ends no request: the lines are lost, which the log of the
broker states once a minute, and writing is tried again with the next line.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import Any

from natslog.errors import ConfigError
from natslog.log_events import AUDIT_LOGGER, event
from natslog.security.tokens import without_secrets
from natslog.times import format_timestamp_us

logger = logging.getLogger("natslog.security")

_REFUSALS_PER_S = 20.0
_BURST = 100.0
_MOST_CHARS = 512
_WARN_EVERY_S = 60.0
_SUMMED_FOR_S = 60.0
_MOST_ADDRESSES = 1_000
_OTHER_ADDRESSES = "other addresses"


@dataclass(slots=True)
class _Summed:
    """Events of one address after its first one in this minute. `last`: the facts of the last one."""

    until_s: float
    count: int = 0
    last: dict[str, Any] = field(default_factory=dict)


class _AuditFile(WatchedFileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """Raises what has happened, instead of printing it."""
        raise


class AuditLog:
    """Of one broker.

    Args:
        file: lines are appended to it (it may be moved away, as logrotate does); None: they go to the broker's log, as
            messages of `natslog.audit`.

    Raises:
        ConfigError: the file cannot be opened.
    """

    def __init__(self, broker: int, file: str | None) -> None:
        self._broker = broker
        self._logger = logging.Logger(AUDIT_LOGGER, logging.INFO) if file else logging.getLogger(AUDIT_LOGGER)
        self._handler: WatchedFileHandler | None = None
        self._room, self._at_s, self._left_out = _BURST, time.monotonic(), 0
        self._lost, self._warned_s = 0, -_WARN_EVERY_S
        self._unauthenticated: dict[str, _Summed] = {}  # by address; the one whose minute ends first is the first
        if file:
            try:
                self._handler = _AuditFile(Path(file), encoding="utf-8")
            except OSError as error:
                raise ConfigError(f"cannot open the audit_file {file}: {error.strerror}") from error
            self._handler.setFormatter(logging.Formatter("%(message)s"))
            self._logger.addHandler(self._handler)

    def changed(self, **facts: Any) -> None:
        """A change, whatever its outcome."""
        line = self._line("change", facts)
        with self._noting_losses():
            self._logger.info("%s", json.dumps(line), extra=event("audit.change", audit=line))

    def refused(self, **facts: Any) -> None:
        """An access that was refused."""
        now_s = time.monotonic()
        self._room = min(_BURST, self._room + (now_s - self._at_s) * _REFUSALS_PER_S)
        self._at_s = now_s
        if self._room < 1:
            self._left_out += 1
            return
        self._room -= 1
        if self._left_out:
            facts["refusals_left_out"] = self._left_out
            self._left_out = 0
        self._write("refused", facts)

    def unauthenticated(self, address: str, **facts: Any) -> None:
        """A refusal, or an attempt, of a client without an identity."""
        self.flush()
        if address not in self._unauthenticated and len(self._unauthenticated) >= _MOST_ADDRESSES:
            address = _OTHER_ADDRESSES
        known = self._unauthenticated.get(address)
        if known is None:
            self._unauthenticated[address] = _Summed(time.monotonic() + _SUMMED_FOR_S)
            self._write("refused", facts | {"from": address})
        else:
            known.count += 1
            known.last = facts

    def flush(self) -> None:
        """Writes the sums of minutes that have ended. To be called about once a second."""
        now_s = time.monotonic()
        while self._unauthenticated:
            address, summed = next(iter(self._unauthenticated.items()))
            if summed.until_s > now_s:
                return
            del self._unauthenticated[address]
            self._write_sum(address, summed)

    def _write_sum(self, address: str, summed: _Summed) -> None:
        if summed.count:
            self._write("unauthenticated", summed.last | {"from": address, "count": summed.count})

    def _write(self, what: str, facts: dict[str, Any]) -> None:
        line = self._line(what, facts)
        with self._noting_losses():
            self._logger.info("%s", json.dumps(line), extra=event("audit.refused", audit=line))

    def _line(self, what: str, facts: dict[str, Any]) -> dict[str, Any]:
        line = {"time": format_timestamp_us(time.time_ns() // 1000), "event": what, "broker": self._broker}
        return line | {
            name: without_secrets(fact)[:_MOST_CHARS] if isinstance(fact, str) else fact for name, fact in facts.items()
        }

    @contextmanager
    def _noting_losses(self) -> Iterator[None]:
        """While a line is written."""
        try:
            yield
        except OSError as error:
            self._note_lost(error)

    def _note_lost(self, error: OSError) -> None:
        self._lost += 1
        now_s = time.monotonic()
        if now_s - self._warned_s >= _WARN_EVERY_S:
            self._warned_s = now_s
            logger.error(
                f"lines of the audit log cannot be written ({error}): {self._lost} were lost so far",
                extra=event("audit.not_written", count=self._lost),
            )

    def close(self) -> None:
        for address, summed in self._unauthenticated.items():
            self._write_sum(address, summed)
        self._unauthenticated.clear()
        if self._handler is not None:
            self._handler.close()
