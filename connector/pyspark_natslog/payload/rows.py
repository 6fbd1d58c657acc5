"""The output of a decoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from natslog.arrow.payloads import Payloads


@dataclass(frozen=True, slots=True)
class Decoded:
    """Typed columns of some payloads.

    Attributes:
        arrays: by name; one entry per row.
        malformed: a bool per payload (numpy). `reason`: why a payload is malformed; a clause that follows a colon.
        blank: a bool per payload (numpy): it holds nothing. None: those that have no bytes.
        parents: the payload of each row, where that is not simply its own number: one may hold many rows, or none.
    """

    arrays: dict[str, Any]
    malformed: Any
    reason: Callable[[int], str]
    parents: Any | None = None
    blank: Any | None = None


class Decoder(Protocol):
    """One format."""

    def decode(self, payloads: Payloads) -> Decoded: ...
