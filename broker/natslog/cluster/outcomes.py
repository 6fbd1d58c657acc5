"""Outcomes of requests, kept by age, so that a repeated request is applied once.

Theory of operation. An outcome is removed when it is older than the retry window, and for no other reason: no client
can displace another's. Age is counted in the log's own time. Each proposal carries the milliseconds that passed on the
metadata leader's monotonic clock since that leader's last one (0 for its first), and the log's time is their sum. All
brokers therefore compute the same time, a wall clock that jumps has no effect, and the log's time is never ahead of
real time: it does not advance while leaders change, and outcomes are then kept longer.

If there is no space for another outcome, the request is refused (`Overloaded`, retriable) and changes nothing.

Positions of cursors have a shorter window, for the time in which a broker repeats a proposal by itself. Only natslog
0.2.0 proposes them; now they are rows of `__cursors` (ADR 55).
"""

from __future__ import annotations

import msgspec

from natslog.cluster.commands import Outcome, Proposal, SetCursor
from natslog.errors import Overloaded

RETRY_WINDOW_MS = 15 * 60_000
"""Longer than a client or broker repeats a request."""
CURSOR_RETRY_WINDOW_MS = 60_000
MAX_OUTCOMES = 20_000
"""Of each kind (cursors, all others). An outcome takes about 300 bytes of every broker's memory."""
MAX_OF_ONE_CLIENT = 5_000
RESERVED_OUTCOMES = 5_000
"""For tokens, rules, roles and quotas, so that an administrator can revoke a token of whoever fills the rest."""


class KeptOutcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """`at_ms`: of the log's time. `client`: the client of the request."""

    at_ms: int
    client: str = ""
    outcome: Outcome


class Window(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Attributes: `kept`: by proposal id, oldest first. `of_client`: how many of them each client has."""

    kept: dict[str, KeptOutcome] = {}
    of_client: dict[str, int] = {}

    def remove_older(self, than_ms: int) -> None:
        while self.kept:
            oldest = next(iter(self.kept))
            if self.kept[oldest].at_ms >= than_ms:
                return
            client = self.kept.pop(oldest).client
            self.of_client[client] -= 1
            if not self.of_client[client]:
                del self.of_client[client]

    def add(self, proposal_id: str, kept: KeptOutcome) -> None:
        self.kept[proposal_id] = kept
        self.of_client[kept.client] = self.of_client.get(kept.client, 0) + 1

    def require_room(self, client: str, *, is_reserved: bool = False) -> None:
        """Args: `is_reserved`: for a change of security, which must be possible however many others there are.

        Raises:
            Overloaded.
        """
        most = MAX_OUTCOMES + RESERVED_OUTCOMES if is_reserved else MAX_OUTCOMES
        if len(self.kept) >= most or self.of_client.get(client, 0) >= MAX_OF_ONE_CLIENT:
            raise Overloaded(
                f"{client or 'this client'} has changed the metadata {self.of_client.get(client, 0)} times, and all "
                f"clients together {len(self.kept)} times, in the last minutes: repeat the request later, and send "
                "requests less often"
            )


class RecentOutcomes(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Attributes: `now_ms`: the log's time."""

    now_ms: int = 0
    requests: Window = msgspec.field(default_factory=Window)
    cursors: Window = msgspec.field(default_factory=Window)

    def find(self, proposal_id: str) -> Outcome | None:
        kept = self.requests.kept.get(proposal_id) or self.cursors.kept.get(proposal_id)
        return None if kept is None else kept.outcome

    def advance(self, elapsed_ms: int) -> None:
        """The log's time advances; outcomes older than their window are removed."""
        self.now_ms += max(0, elapsed_ms)
        self.requests.remove_older(self.now_ms - RETRY_WINDOW_MS)
        self.cursors.remove_older(self.now_ms - CURSOR_RETRY_WINDOW_MS)

    def window_of(self, proposal: Proposal) -> Window:
        return self.cursors if isinstance(proposal.command, SetCursor) else self.requests

    def keep(self, proposal: Proposal, outcome: Outcome) -> None:
        kept = KeptOutcome(at_ms=self.now_ms, client=proposal.client, outcome=outcome)
        self.window_of(proposal).add(proposal.id, kept)
