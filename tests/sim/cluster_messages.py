"""What replicas of the simulation send each other."""

from __future__ import annotations

from dataclasses import dataclass

from natslog.cluster.roles import FetchPosition, Verdict
from natslog.model import BrokerId, Epoch, StreamId
from tests.sim.cluster_process import Entry

LONG_AGO_MS = -1e9


@dataclass(slots=True)
class Fetch:
    stream_id: StreamId
    sender: BrokerId
    incarnation: str
    position: FetchPosition
    number: int


@dataclass(slots=True)
class Answer:
    stream_id: StreamId
    epoch: Epoch
    verdict: Verdict
    records: list[Entry]
    offset: int
    high_watermark: int
    number: int
    gaps: frozenset[int] = frozenset()
    kept_ids: frozenset[int] = frozenset()
    ids_serial: int = 0
