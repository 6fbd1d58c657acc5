"""Feature levels: which formats, records and messages the brokers of a cluster may write.

Every broker reads all levels up to `LATEST_LEVEL` of its own version. What a level adds is written only after the
metadata is at that level: a new cluster starts at the latest one; an upgraded cluster stays at its level until every
broker supports a later one and an operator runs `natslog cluster finalize-upgrade`. Until then a broker can be
downgraded. A level never goes back.

    level 1   natslog 0.1.0
    level 2   incarnations with a nonce, replicas known to hold a stream, eligibility kept by brokers that leave,
              the write-ahead log of the Raft store
"""

from __future__ import annotations

FIRST_LEVEL = 1
LATEST_LEVEL = 2
WAL_LEVEL = 2
FIRST_VERSION = {1: "0.1.0", 2: "0.2.0"}
"""By level, the first version of natslog that supports it."""
