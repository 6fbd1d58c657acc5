"""Failures of tracing itself. They stop nothing, and are one line of the log in a minute."""

from __future__ import annotations

import logging
import time

from natslog.log_events import event

logger = logging.getLogger("natslog.tracing")

_LOG_EVERY_S = 60.0
_logged_s: float | None = None


def note_failure(error: Exception) -> None:
    """Logs it, unless one was logged within the last minute. Samplers, exporters and providers are code of others."""
    global _logged_s
    now_s = time.monotonic()
    if _logged_s is None or now_s - _logged_s >= _LOG_EVERY_S:
        _logged_s = now_s
        logger.error(
            f"a span is missing or incomplete: {type(error).__name__}: {error}",
            exc_info=error,
            extra=event("tracing.failed"),
        )
