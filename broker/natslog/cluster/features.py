"""Feature levels: which formats, records and messages the brokers of a cluster may write.

Every broker supports the levels from `FIRST_LEVEL` to `LATEST_LEVEL` of its own version. The additions of a level are
written only after the metadata is at that level: a new cluster starts at the latest one; an upgraded cluster stays at
its level until every broker supports a later one and an operator runs `natslog cluster finalize-upgrade`. Until then a
broker can be downgraded. A level never goes back.

    level 1   natslog 0.1.0: 0.2.0 raises it, this version refuses it (ADR 52)
    level 2   natslog 0.2.0
    level 3   brokers that announce their stop, sealed segments that are merged, streams with `standby`

Levels 1 and 2 are final. Level 3 is final with natslog 0.3.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from natslog.errors import UpgradeRequired
from natslog.model import BrokerId

FIRST_LEVEL, LATEST_LEVEL = 2, 3
MERGING_LEVEL = 3
"""From this level on, small sealed segments become one; after a crash, 0.2.0 may find their offsets twice."""
STOP_LEVEL = 3
"""From this level on, a broker that stops gracefully announces it, and becomes the leader of no stream."""
STANDBY_LEVEL = 3
"""From this level on, streams may have the setting `standby`; 0.2.0 cannot read a record with it."""
FIRST_VERSION = {1: "0.1.0", 2: "0.2.0", 3: "0.3.0"}
"""By level, the first version of natslog that supports it."""

Levels: TypeAlias = tuple[int, int]
"""The first and the last level that a broker supports."""
OWN_LEVELS: Levels = (FIRST_LEVEL, LATEST_LEVEL)


def require_supported(level: int, where: object) -> None:
    """Raises UpgradeRequired: `where` is at a level that this natslog does not support."""
    if level > LATEST_LEVEL:
        raise UpgradeRequired(
            f"{where} is at feature level {level}, but this version of natslog supports levels up to {LATEST_LEVEL}: "
            "upgrade this broker. The broker does not start; nothing was changed",
            level=level,
        )
    if level < FIRST_LEVEL:
        raise UpgradeRequired(
            f"{where} is at feature level {level}, but this version of natslog supports levels from {FIRST_LEVEL} on. "
            "Run natslog 0.2.0 on all brokers of the cluster, then natslog cluster finalize-upgrade, then this version "
            "(docs/OPERATIONS.md, Upgrade from 0.1.0). If this broker was never added to a cluster, give it an empty "
            "data folder instead. The broker does not start; nothing was changed",
            level=level,
        )


def supported_by_all(levels: Mapping[BrokerId, Levels | None], level: int) -> int:
    """The latest level that every broker supports; a broker that is not connected counts as a broker of the current
    level.

    Args:
        level: the present one.
    """
    return max(level, min((level if one is None else one[1] for one in levels.values()), default=level))


def blocking(levels: Mapping[BrokerId, Levels | None], target: int) -> list[BrokerId]:
    """The brokers that are not connected, or do not support the level."""
    return sorted(broker for broker, one in levels.items() if one is None or not one[0] <= target <= one[1])
