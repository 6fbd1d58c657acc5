"""Whether time alone can change anything for the idle replicas of a broker: if not, their ticks are left out.

A quiet replica (`Replica.is_quiet`) acts for one of three reasons: an input of its own, a change of what all replicas
of the broker share, or a follower of its own that is not in contact any more. The last two are found here once for all
replicas, so that a tick of thousands of idle streams costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from natslog.cluster.replica_steps import Surroundings
from natslog.cluster.tracks import Timeouts
from natslog.model import BrokerId


class Calm:
    """Of one broker. Ask it once for each tick.

    Args:
        timeouts: of the replicas: a follower counts as in contact for half the time after which it would lag.

    Attributes:
        away: brokers that were followers and are not in contact: replicas that they follow are to be ticked.
    """

    def __init__(self, timeouts: Timeouts = Timeouts()) -> None:
        self._contact_within_ms = timeouts.lag_ms / 2
        self._seen: tuple[Any, ...] = ()
        self.away: frozenset[BrokerId] = frozenset()

    def goes_on(self, around: Surroundings, now_ms: float, contact_ms: Mapping[BrokerId, float]) -> bool:
        """Whether nothing has changed since the last tick; brings `away` up to date.

        Args:
            contact_ms: when each follower last asked this broker for anything.
        """
        before = self._seen
        self._seen = (
            around.incarnation,
            around.is_registered,
            around.has_session,
            around.has_room,
            around.has_time,
            frozenset(contact_ms),
        )
        self.away = frozenset(
            broker for broker, at_ms in contact_ms.items() if now_ms - at_ms >= self._contact_within_ms
        )
        return self._seen == before
