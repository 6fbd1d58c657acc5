"""Feature levels: which formats, records and messages the brokers of a cluster may write.

Every broker reads all levels up to `LATEST_LEVEL` of its own version. The additions of a level are written only after
the metadata is at that level: a new cluster starts at the latest one; an upgraded cluster stays at its level until
every broker supports a later one and an operator runs `natslog cluster finalize-upgrade`. Until then a broker can be
downgraded. A level never goes back.

    level 1   natslog 0.1.0
    level 2   incarnations with a nonce, replicas known to hold a stream, eligibility kept by brokers that leave,
              the write-ahead log of the Raft store, outcomes of requests kept by age, where a stream's acks go,
              streams that are purged, sealed, or given another number of replicas, folders named after their streams,
              digests of the rows of direct appends, batches of format 2, envelopes, tokens and access rules,
              streams with several subjects, limits per subject, compaction, companion logs, erasure,
              streams that are imported, and their lineage, internal streams, cursors in a stream, limits of the size
              of a message, protection against removal, versions of settings, streams of the JetStream API
    level 3   brokers that announce their stop

Level 2 is that of natslog 0.2.0, and is final. What is added since is of level 3, which is final with natslog 0.3.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from natslog.errors import UpgradeRequired
from natslog.model import BrokerId

FIRST_LEVEL = 1
LATEST_LEVEL = 3
WAL_LEVEL = 2
ACKS_LEVEL = 2
STREAM_CHANGES_LEVEL = 2
"""From this level on, streams are purged and sealed, and their `replicas` and `min_isr` edited."""
FOLDER_NAMES_LEVEL = 2
RUN_DIGESTS_LEVEL = 2
FORMER_SUBJECTS_LEVEL = 2
"""From this level on, a stream keeps the subjects that it recorded before an edit."""
SUBJECTS_LEVEL = 2
"""From this level on, a stream may record more than one subject."""
LINEAGE_LEVEL = 2
"""From this level on, streams are imported, and keep the streams that they were exported from."""
PROTECTION_LEVEL = 2
"""From this level on, streams may have `max_message_bytes`, `deny_delete`, `deny_purge`, `prevent_delete` and
`managed_by`, and a deletion may name the id and the version of the settings."""
SETTINGS_VERSION_LEVEL = 2
"""From this level on, records have a version of their settings, and edits may name it, and the id of the stream."""
SECURITY_LEVEL = 2
"""From this level on, tokens, access rules and quotas are stored."""
ENVELOPES_LEVEL = 2
"""From this level on, messages that carry many rows are stored as these rows."""
BATCH_FORMAT_LEVEL = 2
"""From this level on, batches are written in format 2."""
SCRUB_LEVEL = 2
"""From this level on, the progress of scrubbing is stored beside each log."""
JETSTREAM_LEVEL = 2
"""From this level on, the JetStream API creates streams, and a stream may begin at any offset."""
REMOVAL_LEVEL = 2
"""From this level on, single messages are removed: on request, by a limit per subject, by compaction, by roll-ups; and
streams may refuse new messages at their limits."""
ERASURE_LEVEL = 2
"""From this level on, messages are erased by subject or key, and the companion log has records of it."""
COMPANION_LEVEL = 2
"""From this level on, streams may have a companion log."""
ACTIVITY_LEVEL = 2
"""From this level on, events are recorded in the stream `__activity`."""
CURSORS_LEVEL = 2
"""From this level on, cursors are in the stream `__cursors`."""
MERGING_LEVEL = 3
"""From this level on, small sealed segments become one; after a crash, 0.2.0 may find their offsets twice."""
STOP_LEVEL = 3
"""From this level on, a broker that stops gracefully announces it, and becomes the leader of no stream."""
FIRST_VERSION = {1: "0.1.0", 2: "0.2.0", 3: "0.3.0"}
"""By level, the first version of natslog that supports it."""
OUTCOMES_BY_AGE = 2
"""From this level on, outcomes of requests expire by age; before, the last 1,000 were kept."""

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
