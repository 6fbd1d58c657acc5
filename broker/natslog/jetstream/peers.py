"""Brokers as the API shows them: they have no names but their numbers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from natslog.model import BrokerId, StreamRecord


def broker_name(broker: BrokerId) -> str:
    return f"natslog-{broker}"


def peers(record: StreamRecord, brokers: Iterable[BrokerId]) -> list[dict[str, Any]]:
    """These brokers as replicas of a stream."""
    return [{"name": broker_name(one), "current": one in record.isr, "active": 0, "peer": str(one)} for one in brokers]
