"""Followers that stand by: they subscribe to the subjects of a stream with the setting `standby`, too.

Only in-sync replicas do, since no other one becomes the leader. What a publisher sends without waiting for an ack is
kept until the log shows that it is stored, and stored by the next leader where it is not. A leader that takes no
messages for a moment (it has no session, or hands its leadership over) stands by for itself.

A request is never kept for that: its publisher repeats it, provided that it learns that there is no leader. The NATS
server says so where there is no subscriber; where followers do, one of them says it instead.
"""

from __future__ import annotations

from collections.abc import Collection

from natslog.model import BrokerId, StreamRecord
from natslog.subjects import is_internal


def standby_subjects(record: StreamRecord, me: BrokerId) -> tuple[str, ...]:
    """What this replica subscribes to while it does not lead."""
    settings = record.settings
    is_closed = record.sealed or record.import_state != "" or is_internal(record.name)
    if not settings.standby or settings.group is not None or is_closed or me not in record.isr:
        return ()
    return settings.subjects


def answers_requests(record: StreamRecord, me: BrokerId, ended: Collection[BrokerId]) -> BrokerId | None:
    """Which replica answers that there is no leader, as this one sees it while it stands by; None: there is a leader,
    or no replica that could.

    Args:
        ended: brokers whose processes have ended. One that only does not respond may still answer requests.
    """
    if record.leader == me:
        return me
    if record.leader is not None and record.leader not in ended:
        return None
    return next((broker for broker in record.isr if broker != record.leader and broker not in ended), None)
