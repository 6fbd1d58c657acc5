"""How the record of a stream changes: its settings, its in-sync replicas (ISR), where its replicas are.

Pure functions from a record to the next one; `metadata` decides which of them a command stands for. Every change of
leader, replicas or ISR gives the record another version, so that a decision made for the one before is void.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import msgspec

from natslog.cluster.features import STREAM_CHANGES_LEVEL
from natslog.errors import InvalidRequest, OffsetOutOfRange, StreamRecreated, StreamSealed
from natslog.model import MAX_REPLICAS, BrokerId, Epoch, Offset, StreamId, StreamRecord, StreamSettings
from natslog.security.records import ALL_SUBJECTS

_MOST_FORMER_SUBJECTS = 16


def next_version(record: StreamRecord, **changes: Any) -> StreamRecord:
    return msgspec.structs.replace(record, version=record.version + 1, **changes)


def with_isr(record: StreamRecord, isr: Iterable[BrokerId], *, unproven: Iterable[BrokerId]) -> StreamRecord:
    """With another ISR. Below `min_isr` nothing more is committed, so those who leave still hold all that is."""
    members = tuple(broker for broker in record.replicas if broker in set(isr))
    eligible: tuple[BrokerId, ...] = ()
    if len(members) < record.settings.min_isr:
        eligible = tuple(broker for broker in record.replicas if broker in record.candidates and broker not in members)
    holding = {*members, *eligible}
    return next_version(record, isr=members, eligible=eligible, unproven=tuple(sorted(set(unproven) & holding)))


def without(record: StreamRecord, broker: BrokerId) -> StreamRecord:
    """This one does not hold everything any more, and is not eligible either."""
    left = with_isr(record, [member for member in record.isr if member != broker], unproven=record.unproven)
    return msgspec.structs.replace(
        left,
        leader=None if record.leader == broker else record.leader,
        eligible=tuple(member for member in left.eligible if member != broker),
        unproven=tuple(member for member in left.unproven if member != broker),
    )


def no_longer_held(record: StreamRecord, brokers: Iterable[BrokerId]) -> StreamRecord:
    """The files of these replicas are gone, or will be."""
    holders = tuple(broker for broker in record.holders if broker not in set(brokers))
    return record if holders == record.holders else next_version(record, holders=holders)


# ---- settings ----


def fixed_settings(level: int) -> tuple[str, ...]:
    """Settings that an edit cannot change: a group decided who got which message; the number of replicas changes with
    their places (`resized`). At level 1 `min_isr` is fixed, too.
    """
    return ("group", "replicas") if level >= STREAM_CHANGES_LEVEL else ("group", "replicas", "min_isr")


def cannot_be_edited(setting: str) -> InvalidRequest:
    return InvalidRequest(f"the {setting} of a stream cannot be edited: create another stream", setting=setting)


def edited(
    record: StreamRecord, settings: StreamSettings, changed: tuple[str, ...] | None, *, level: int
) -> StreamRecord:
    """Raises InvalidRequest, StreamSealed."""
    if changed is not None:
        fields = (*changed, "more_subjects") if "subject" in changed else changed
        settings = msgspec.structs.replace(record.settings, **{name: getattr(settings, name) for name in fields})
    for name in fixed_settings(level):
        if getattr(settings, name) != getattr(record.settings, name):
            raise cannot_be_edited(name)
    if settings == record.settings:
        return record
    removed = [subject for subject in record.settings.subjects if subject not in settings.subjects]
    if level >= STREAM_CHANGES_LEVEL and removed:
        former = dict.fromkeys((*record.former_subjects, *removed))
        record = msgspec.structs.replace(record, former_subjects=_bounded(tuple(former)))
    was, min_isr = record.settings.min_isr, settings.min_isr
    if record.sealed and msgspec.structs.replace(settings, min_isr=was) != record.settings:
        raise sealed_already(record)
    if min_isr == was:
        return msgspec.structs.replace(record, settings=settings)
    if record.target_min_isr:
        raise InvalidRequest(
            f"the replicas of stream {record.name!r} are being changed, and its min_isr with them: wait until that is "
            "done (natslog stream info shows it), or change both in one edit",
            stream=record.name,
        )
    if min_isr > settings.replicas:
        raise InvalidRequest(
            f"min_isr {min_isr} is more than the {settings.replicas} replicas of stream {record.name!r}"
        )
    # whoever is eligible is so because of the former min_isr: from now on a smaller ISR may commit without it
    return with_isr(msgspec.structs.replace(record, settings=settings), record.isr, unproven=record.unproven)


def _bounded(subjects: tuple[str, ...]) -> tuple[str, ...]:
    """At most so many; `>` covers them all."""
    return subjects if len(subjects) <= _MOST_FORMER_SUBJECTS else (ALL_SUBJECTS,)


def differences(existing: StreamSettings, asked: StreamSettings) -> dict[str, tuple[Any, Any]]:
    """Setting → (as it is, as asked), of those that differ. The order of the subjects does not count."""
    was, wanted = existing.to_json(), asked.to_json()
    del was["subject" if existing.more_subjects or asked.more_subjects else "subjects"]  # the other one names them
    if set(existing.subjects) == set(asked.subjects):
        was.pop("subjects", None)
    return {name: (was[name], wanted[name]) for name in was if was[name] != wanted[name]}


# ---- what it holds ----


def sealed_already(record: StreamRecord) -> StreamSealed:
    return StreamSealed(
        f"stream {record.name!r} is sealed: no message can be added to it or removed from it. Only its replicas and "
        "min_isr can be edited; the whole stream can be deleted (natslog stream rm)",
        stream=record.name,
    )


def purged(record: StreamRecord, stream_id: StreamId, below: Offset) -> StreamRecord:
    """Raises StreamRecreated, StreamSealed, OffsetOutOfRange."""
    if record.id != stream_id:
        raise StreamRecreated(
            f"stream {record.name!r} was deleted and created again meanwhile: nothing was purged. Its id is "
            f"{record.id}, not {stream_id}",
            stream=record.name,
            id=record.id,
        )
    if record.sealed:
        raise sealed_already(record)
    if below < 0:
        raise OffsetOutOfRange(f"offset {below} is negative", offset=below)
    return msgspec.structs.replace(record, purged_below=max(below, record.purged_below))


# ---- where its replicas are ----


def check_target(record: StreamRecord, target: tuple[BrokerId, ...], count: int, brokers: Collection[BrokerId]) -> None:
    """Raises InvalidRequest: these are not `count` different brokers of the cluster."""
    if not set(target) <= set(brokers) or len(target) != count or len(set(target)) != count:
        raise InvalidRequest(
            f"stream {record.name!r} has {count} replicas: name as many different brokers of {sorted(brokers)}",
            stream=record.name,
        )


def wanted_replicas(record: StreamRecord) -> int:
    """How many replicas the stream is to have: where that is being changed, the new number."""
    return len(record.target) or record.settings.replicas


def moving(record: StreamRecord, target: tuple[BrokerId, ...]) -> StreamRecord:
    """Its replicas are to be on these brokers; those that leave stay until the others are in sync."""
    staying = [broker for broker in record.replicas if broker not in target]
    if set(target) == set(record.replicas) and not record.target_min_isr:  # another preferred leader
        return next_version(record, replicas=target, target=())
    return next_version(record, replicas=(*target, *staying), target=target)


def resizing(record: StreamRecord, target: tuple[BrokerId, ...], min_isr: int) -> StreamRecord:
    """As many replicas as `target` names are wanted; the settings say so when these are in sync (`finished`).

    Raises:
        InvalidRequest: that many replicas, or such a `min_isr`, cannot be.
    """
    if not 1 <= min_isr <= len(target) <= MAX_REPLICAS:
        raise InvalidRequest(
            f"{len(target)} replicas with min_isr {min_isr}: there are 1 to {MAX_REPLICAS} replicas, and at most as "
            "many are needed in sync",
            stream=record.name,
        )
    if len(target) == record.settings.replicas and set(target) == set(record.replicas):  # as it was: nothing to copy
        settings = msgspec.structs.replace(record.settings, min_isr=min_isr)
        kept = msgspec.structs.replace(record, settings=settings, replicas=target, target=(), target_min_isr=0)
        return with_isr(kept, record.isr, unproven=record.unproven)
    return moving(msgspec.structs.replace(record, target_min_isr=min_isr), target)


def finished(record: StreamRecord) -> StreamRecord:
    """The target is in sync: the other replicas go, and the settings say how many there are."""
    target = record.target
    left = [broker for broker in record.replicas if broker not in target]
    settings = record.settings
    if record.target_min_isr:
        settings = msgspec.structs.replace(settings, replicas=len(target), min_isr=record.target_min_isr)
    # another epoch, so that one who is moved back is never counted by what it asked before its files went
    epoch = Epoch(record.leader_epoch + bool(left))
    kept = msgspec.structs.replace(
        no_longer_held(record, left),
        settings=settings,
        replicas=target,
        target=(),
        target_min_isr=0,
        leader_epoch=epoch,
    )
    isr = [broker for broker in record.isr if broker in target]
    return with_isr(kept, isr, unproven=set(record.unproven) & set(target))
