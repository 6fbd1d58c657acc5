"""When a proposal is repeated: it may have been lost or refused, and the only result that returns is the record.

Invariant. A proposal that changes nothing is repeated with increasing intervals, so that it never displaces others.
"""

from __future__ import annotations

from dataclasses import dataclass

_AGAIN_MS = 2000.0
_AGAIN_AT_MOST_MS = 10_000.0


@dataclass(slots=True)
class _Attempt:
    version: int
    next_ms: float
    pause_ms: float = _AGAIN_MS


class Attempts:
    """Of one replica, by the kind of proposal."""

    def __init__(self) -> None:
        self._by_kind: dict[str, _Attempt] = {}

    def may(self, kind: str, version: int, now_ms: float) -> bool:
        """Whether it is time to propose this for that version of the record: at once, after 2 s, 4 s, 8 s, then every
        10 s.
        """
        known = self._by_kind.get(kind)
        if known is None or known.version != version:
            self._by_kind[kind] = _Attempt(version, now_ms + _AGAIN_MS)
            return True
        if now_ms < known.next_ms:
            return False
        known.pause_ms = min(2 * known.pause_ms, _AGAIN_AT_MOST_MS)
        known.next_ms = now_ms + known.pause_ms
        return True
