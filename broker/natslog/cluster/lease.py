"""How long the metadata of a broker counts as recent: measured from its *request* for a confirmation.

The time does not start at the response, because it may have waited in a socket while this process was stopped.
"""

from __future__ import annotations

from dataclasses import dataclass

SESSION_S = 2.5


@dataclass(slots=True)
class Lease:
    """Seconds of one clock that never jumps and that goes on while the process is stopped."""

    asked_s: float | None = None

    def confirmed(self, asked_s: float) -> None:
        """A request that was sent then was answered, in any order with others: everything committed by then is applied
        here.
        """
        if self.asked_s is None or asked_s > self.asked_s:
            self.asked_s = asked_s

    def is_valid(self, now_s: float) -> bool:
        return self.asked_s is not None and now_s - self.asked_s < SESSION_S
