"""Settings of a broker for all its logs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from natslog.log.recent_commits import RecentRoom
from natslog.log.room import StoreLimit
from natslog.log.subject_counts import KeptCounts


@dataclass(frozen=True, slots=True)
class LogOptions:
    """Sizes in bytes, ages in seconds.

    Attributes:
        ended_in_order: the broker's last life ended gracefully, so that nothing can be torn.
        store: what all logs of the broker may take together. kept_counts: what was counted last, of all of them.
        recent_room: what their last commits may take in memory.
        appends_copies: several batches may have been written at once, also without other replicas: by an import.
        stores_scrub: whether the progress of scrubbing and the sizes of compressed segments are stored.
        merges_segments: whether small sealed segments become one.
        closed_early: called where a segment is closed because it has many small batches; from any thread.
    """

    segment_bytes: int = 128 * 1024 * 1024
    segment_age_s: float = 3600.0
    min_free_bytes: int = 64 * 1024 * 1024
    ended_in_order: bool = False
    store: StoreLimit = field(default_factory=lambda: StoreLimit(None))
    kept_counts: KeptCounts = field(default_factory=KeptCounts)
    recent_room: RecentRoom = field(default_factory=RecentRoom)
    stores_scrub: bool = True
    merges_segments: bool = True
    closed_early: Callable[[], None] = lambda: None
    appends_copies: bool = False
