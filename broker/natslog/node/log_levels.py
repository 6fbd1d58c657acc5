"""The levels of the log, of all brokers: shown, and changed until a broker is started again.

A broker that is asked applies a change itself, and sends it to the others as the request `log_level`. A change of all
loggers leaves those with a level of their own as they are. The audit log keeps the level of the start.
"""

from __future__ import annotations

import logging
from typing import Any, TypeAlias

from natslog.errors import InvalidRequest, did_you_mean
from natslog.log_events import AUDIT_LOGGER, LEVELS, event
from natslog.model import BrokerId
from natslog.node.cluster_node import ClusterNode
from natslog.node.operations import Operations

logger = logging.getLogger("natslog")

_ASK_WITHIN_S = 5.0
AS_STARTED = "default"
"""Of all loggers: the level that the settings of the broker state, and none of their own. Of one: that of all."""

Levels: TypeAlias = dict[str, Any]
"""Of one broker: `broker`, and `level` with `loggers` (those with a level of their own) or `problem`."""


class LogLevels:
    """Of one broker. Args: `level`: that of its settings."""

    def __init__(self, level: str, cluster: ClusterNode, operations: Operations) -> None:
        self._level, self._cluster, self._operations = level, cluster, operations

    async def everywhere(self, broker: BrokerId | None = None, **change: str | None) -> list[Levels]:
        """Of one broker or of all, after the change; a `problem` where a broker did not make it.

        Args:
            change: `level` and `logger`, as of `on_this_broker`.

        Raises:
            InvalidRequest: there is no such broker, level or logger. Nothing was changed.
        """
        brokers = self._operations.brokers
        if broker is not None and broker not in brokers:
            raise InvalidRequest(f"there is no broker {broker}; there are {brokers}", broker=broker)
        _require_valid(**change)
        asked = brokers if broker is None else [broker]
        return await self._cluster.requests.ask_each(asked, "log_level", _ASK_WITHIN_S, **change)

    async def on_this_broker(self, level: str | None = None, logger: str | None = None) -> Levels:
        """Of this broker, after the change. Raises InvalidRequest.

        Args:
            level: to set: one of `LEVELS` or `AS_STARTED`; None: nothing is changed.
            logger: the one whose level is set, with those below it; None: all.
        """
        _require_valid(level, logger)
        if level is not None:
            self._set(level, logger)
        return {
            "broker": self._cluster.me,
            "level": _name_of(logging.getLogger()),
            "loggers": {name: _name_of(found) for name, found in _own_loggers().items() if found.level},
        }

    def _set(self, level: str, name: str | None) -> None:
        if name is not None:
            logging.getLogger(name).setLevel(logging.NOTSET if level == AS_STARTED else level.upper())
        elif level == AS_STARTED:
            logging.getLogger().setLevel(self._level.upper())
            for found in _own_loggers().values():
                found.setLevel(logging.NOTSET)
        else:
            logging.getLogger().setLevel(level.upper())
        logger.warning(
            "the log level of %s was set to %s, until this broker is started again",
            name or "all loggers",
            level,
            extra=event("log.level_changed", log_level=level, log_logger=name),
        )


def _own_loggers() -> dict[str, logging.Logger]:
    """Those of natslog whose level can be set, in order."""
    known = logging.getLogger().manager.loggerDict
    names = sorted(name for name in known if name.split(".")[0] == "natslog" and name != AUDIT_LOGGER)
    return {name: logging.getLogger(name) for name in names}


def _name_of(found: logging.Logger) -> str:
    return logging.getLevelName(found.level).lower()


def _require_valid(level: str | None = None, logger: str | None = None) -> None:
    """Raises InvalidRequest."""
    levels = (*LEVELS, AS_STARTED)
    if level is not None and level not in levels:
        raise InvalidRequest(f"level {level!r} must be {', '.join(levels)}", parameter="level")
    if logger == AUDIT_LOGGER:
        raise InvalidRequest(
            f"the level of {AUDIT_LOGGER} cannot be changed while the broker runs: it is that of the setting log_level",
            parameter="logger",
        )
    if logger is not None and logger not in (known := _own_loggers()):
        raise InvalidRequest(
            f"there is no logger {logger!r}{did_you_mean(logger, list(known))}. The loggers are {', '.join(known)}",
            parameter="logger",
        )
