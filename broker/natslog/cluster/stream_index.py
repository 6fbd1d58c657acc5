"""What is looked up among all streams of the metadata: kept with each change, so that it does not cost more with more
streams. Derived from the records, and not stored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from natslog.model import BrokerId, StreamId, StreamRecord
from natslog.subjects import SubjectTree, is_internal


class StreamIndex:
    """Attributes:
    by_id: the streams that exist.
    replicas: how many each broker has of them; `leaders`: of how many it is the preferred leader. Without internal
        streams, which have little load.
    subjects: those that streams record, with the names of the streams.
    """

    def __init__(self, records: Iterable[StreamRecord]) -> None:
        self.by_id: dict[StreamId, StreamRecord] = {}
        self.replicas: Counter[BrokerId] = Counter()
        self.leaders: Counter[BrokerId] = Counter()
        self.subjects = SubjectTree()
        self._changed: set[str] = set()
        for record in records:
            self.add(record)

    def add(self, record: StreamRecord) -> None:
        self.by_id[record.id] = record
        self._changed.add(record.name)
        self._count(record, 1)
        for subject in record.settings.subjects:
            self.subjects.add(subject, record.name)

    def remove(self, record: StreamRecord) -> None:
        del self.by_id[record.id]
        self._changed.add(record.name)
        self._count(record, -1)
        for subject in record.settings.subjects:
            self.subjects.remove(subject, record.name)

    def replace(self, before: StreamRecord, after: StreamRecord) -> None:
        self.remove(before)
        self.add(after)

    def recording(self, subjects: Iterable[str]) -> set[str]:
        """The names of the streams whose subjects overlap these wildcards or plain subjects."""
        return set[str]().union(*map(self.subjects.overlapping, subjects))

    def take_changed(self) -> set[str]:
        """The names of streams that were created, changed or deleted since the last call; at first, all of them."""
        changed, self._changed = self._changed, set()
        return changed

    def _count(self, record: StreamRecord, change: int) -> None:
        if not is_internal(record.name):
            self.replicas.update(dict.fromkeys(record.replicas, change))
            self.leaders[record.replicas[0]] += change
