"""How the record of a stream changes: its settings, its in-sync replicas (ISR), where its replicas are.

Pure functions from a record to the next one; `metadata` decides which of them a command stands for. Every change of
leader, replicas or ISR gives the record another version, so that a decision made for the one before is void.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import product
from typing import Any

import msgspec

from natslog.cluster.commands import BeginImport, CreateStream, FinishImport
from natslog.errors import (
    InvalidRequest,
    OffsetOutOfRange,
    RemovalDenied,
    SettingsConflict,
    StreamConflict,
    StreamImporting,
    StreamRecreated,
    StreamSealed,
)
from natslog.model import MAX_REPLICAS, BrokerId, Epoch, FormerRule, Offset, StreamId, StreamRecord, StreamSettings
from natslog.security.records import ALL_SUBJECTS
from natslog.subjects import overlap

_MOST_FORMER_SUBJECTS = 16
_MOST_FORMER_RULES = 64
PROTECTIONS = ("deny_delete", "deny_purge")
"""Settings that cannot be turned off."""
EDITABLE_IF_SEALED = ("min_isr", "prevent_delete", "managed_by")
"""Beside the number of replicas."""


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
    gone = set(brokers)
    holders = tuple(broker for broker in record.holders if broker not in gone)
    companion_holders = tuple(broker for broker in record.companion_holders if broker not in gone)
    if (holders, companion_holders) == (record.holders, record.companion_holders):
        return record
    return next_version(record, holders=holders, companion_holders=companion_holders)


# ---- settings ----


def with_settings_version(before: StreamRecord, after: StreamRecord) -> StreamRecord:
    """A new version where an operator may notice that something was edited."""
    if _editable(before) == _editable(after):
        return after
    return msgspec.structs.replace(after, settings_version=before.settings_version + 1)


def _editable(record: StreamRecord) -> tuple[object, ...]:
    return record.settings, record.paused, record.target_min_isr, wanted_replicas(record)


def require_version(record: StreamRecord, stream_id: StreamId | None, if_version: int | None) -> None:
    """Raises StreamRecreated, SettingsConflict: an edit was made for another stream, or for other settings."""
    if stream_id is not None and record.id != stream_id:
        raise recreated(record, stream_id, "nothing was changed")
    if if_version is not None and record.settings_version != if_version:
        raise SettingsConflict(
            f"the settings of stream {record.name!r} are of version {record.settings_version}, not {if_version}: they "
            "were edited meanwhile, and nothing was changed. Read them, then repeat the edit with their version",
            stream=record.name,
            settings_version=record.settings_version,
            settings=record.settings.to_json() | {"paused": record.paused},
        )


def recreated(record: StreamRecord, stream_id: StreamId, outcome: str) -> StreamRecreated:
    return StreamRecreated(
        f"stream {record.name!r} was deleted and created again meanwhile: {outcome}. Its id is {record.id}, not "
        f"{stream_id}",
        stream=record.name,
        id=record.id,
    )


def require_purgeable(record: StreamRecord) -> None:
    """Raises RemovalDenied, StreamSealed."""
    _require_removable(record, "deny_purge", "purged")


def require_deletable(record: StreamRecord) -> None:
    """Whether single messages may be deleted. Raises RemovalDenied, StreamSealed."""
    _require_removable(record, "deny_delete", "deleted")


def require_removable(record: StreamRecord) -> None:
    """Whether the whole stream can be deleted. Raises RemovalDenied."""
    if record.settings.prevent_delete:
        raise RemovalDenied(
            f"stream {record.name!r} has prevent_delete, and was not deleted. To delete it, turn that off first: "
            f"natslog stream edit {record.name} --no-prevent-delete",
            stream=record.name,
            setting="prevent_delete",
        )


def _require_removable(record: StreamRecord, setting: str, done: str) -> None:
    if record.sealed:
        raise sealed_already(record)
    if getattr(record.settings, setting):
        raise RemovalDenied(
            f"stream {record.name!r} has {setting}, which cannot be turned off: no message was {done}. Its limits "
            "(max_age, max_bytes, max_messages) still remove messages; the whole stream can be deleted",
            stream=record.name,
            setting=setting,
        )


def edited(record: StreamRecord, settings: StreamSettings, changed: tuple[str, ...] | None) -> StreamRecord:
    """Raises InvalidRequest, StreamSealed."""
    if changed is not None:
        fields = (*changed, "more_subjects") if "subject" in changed else changed
        settings = msgspec.structs.replace(record.settings, **{name: getattr(settings, name) for name in fields})
    if settings.replicas != record.settings.replicas:
        raise InvalidRequest("the number of replicas changes with their places, not with other settings")
    for name in PROTECTIONS:
        if getattr(record.settings, name) and not getattr(settings, name):
            raise InvalidRequest(
                f"{name} of stream {record.name!r} cannot be turned off: copy the messages to another stream",
                setting=name,
            )
    if settings.deny_purge and settings.allow_rollup:  # of two edits at once
        raise InvalidRequest(
            f"stream {record.name!r} has either deny_purge or allow_rollup: its settings were edited meanwhile",
            setting="allow_rollup",
        )
    if settings == record.settings:
        return record
    removed = [subject for subject in record.settings.subjects if subject not in settings.subjects]
    if removed:
        former = dict.fromkeys((*record.former_subjects, *removed))
        record = msgspec.structs.replace(record, former_subjects=_bounded(tuple(former)))
    was, min_isr = record.settings.min_isr, settings.min_isr
    record = _with_former_rules(_with_rules_version(record, settings), settings)
    if record.sealed and msgspec.structs.replace(settings, **_of_sealed(record.settings)) != record.settings:
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


def _with_rules_version(record: StreamRecord, settings: StreamSettings) -> StreamRecord:
    """If a rule is added that hides messages: replicas may have rewritten files without removed messages or not, so
    those that were removed before do not count for it.
    """
    was = record.settings
    is_limited_now = was.max_messages_per_subject is None and settings.max_messages_per_subject is not None
    if not record.has_companion or not (is_limited_now or settings.compact > was.compact):
        return record
    return msgspec.structs.replace(record, rules_version=record.settings_version + 1)


def _with_former_rules(record: StreamRecord, settings: StreamSettings) -> StreamRecord:
    """What hides more messages is in force for all messages, so it is added to the former rules. What hides fewer is in
    force from another leader epoch on: every replica then applies the same rule to each message, whenever it receives
    the edit. So is `allow_rollup`, because a `Nats-Rollup` of earlier messages had no effect. The leader stays. Raises
    InvalidRequest.
    """
    was, limit = record.settings, settings.max_messages_per_subject
    former = record.former_rules
    if record.import_state:  # roll-ups of imported messages have no effect
        was, settings = (msgspec.structs.replace(one, allow_rollup=False) for one in (was, settings))
    shows_more = was.max_messages_per_subject is not None and (limit is None or limit > was.max_messages_per_subject)
    if shows_more or settings.compact < was.compact or settings.allow_rollup != was.allow_rollup:
        epoch = Epoch(record.leader_epoch + 1)
        former = (*former, FormerRule(epoch, was.max_messages_per_subject, was.compact, was.allow_rollup))
        record = record if record.leader is None else next_version(record, leader_epoch=epoch)
    former = _tightened(former, settings)
    if len(former) > _MOST_FORMER_RULES:
        raise InvalidRequest(
            f"max_messages_per_subject, compact and allow_rollup of stream {record.name!r} were changed "
            f"{_MOST_FORMER_RULES} times so that more messages are kept: create another stream",
            stream=record.name,
        )
    return msgspec.structs.replace(record, former_rules=former)


def _tightened(former: Iterable[FormerRule], settings: StreamSettings) -> tuple[FormerRule, ...]:
    """The former rules, none of which shows messages that the settings hide; without those that are as the next one.

    Otherwise messages without a limit would precede messages with one, and it would depend on removed messages, which
    replicas drop at different times, which of them count.
    """
    limit, found = settings.max_messages_per_subject, list[FormerRule]()
    following = (limit, settings.compact, settings.allow_rollup)
    for one in reversed(tuple(former)):
        limits = [each for each in (one.max_messages_per_subject, limit) if each is not None]
        rule = (min(limits, default=None), one.compact or settings.compact, one.allow_rollup)
        if rule != following:
            found.append(FormerRule(one.until_epoch, *rule))
        following = rule
    return tuple(reversed(found))


def _bounded(subjects: tuple[str, ...]) -> tuple[str, ...]:
    """At most so many; `>` covers them all."""
    return subjects if len(subjects) <= _MOST_FORMER_SUBJECTS else (ALL_SUBJECTS,)


def _of_sealed(settings: StreamSettings) -> dict[str, Any]:
    """The settings that can be edited although the stream is sealed."""
    return {name: getattr(settings, name) for name in EDITABLE_IF_SEALED}


def with_operators_settings(asked: StreamSettings, existing: StreamSettings) -> StreamSettings:
    """What a program asks for that creates its stream at every start: with the settings of operators that exist, where
    it names none.
    """
    prevents, managed_by = asked.prevent_delete or existing.prevent_delete, asked.managed_by or existing.managed_by
    return msgspec.structs.replace(asked, prevent_delete=prevents, managed_by=managed_by)


def differences(existing: StreamSettings, asked: StreamSettings) -> dict[str, tuple[Any, Any]]:
    """Setting → (as it is, as asked), of those that differ. The order of the subjects does not count."""
    was, wanted = existing.to_json(), asked.to_json()
    del was["subject" if existing.more_subjects or asked.more_subjects else "subjects"]  # the other one names them
    if set(existing.subjects) == set(asked.subjects):
        was.pop("subjects", None)
    return {name: (was[name], wanted[name]) for name in was if was[name] != wanted[name]}


def require_own_subjects(name: str, settings: StreamSettings, others: Iterable[StreamRecord]) -> None:
    """For a stream that acks to any reply subject: a message that two such streams record would get two acks. Raises
    StreamConflict.
    """
    if settings.acks != "any":
        return
    for other in others:
        if other.name != name and other.settings.acks == "any":
            for ours, theirs in product(settings.subjects, other.settings.subjects):
                if overlap(ours, theirs):
                    raise StreamConflict(
                        f"stream {name!r} cannot record {ours!r}: stream {other.name!r} records {theirs!r}, and both "
                        "ack to any reply subject (acks any). Choose another subject",
                        stream=name,
                        overlaps=other.name,
                    )


# ---- what it holds ----


def sealed_already(record: StreamRecord) -> StreamSealed:
    return StreamSealed(
        f"stream {record.name!r} is sealed: no message can be added to it or removed from it. Only its replicas, "
        "min_isr, prevent_delete and managed_by can be edited; the whole stream can be deleted (natslog stream rm)",
        stream=record.name,
    )


def purged(record: StreamRecord, stream_id: StreamId, below: Offset) -> StreamRecord:
    """Raises StreamRecreated, StreamSealed, RemovalDenied, OffsetOutOfRange."""
    if record.id != stream_id:
        raise recreated(record, stream_id, "nothing was purged")
    require_purgeable(record)
    if below < 0:
        raise OffsetOutOfRange(f"offset {below} is negative", offset=below)
    return msgspec.structs.replace(record, purged_below=max(below, record.purged_below))


# ---- imports ----


def created_by_import(record: StreamRecord, command: CreateStream) -> StreamRecord:
    return msgspec.structs.replace(
        record,
        paused=True,
        import_state="importing",
        first_offset=command.first_offset,
        lineage=command.lineage,
        former_subjects=_bounded(command.former_subjects),
    )


def paused(record: StreamRecord, is_paused: bool) -> StreamRecord:
    """Raises StreamImporting: it is resumed when the import is complete."""
    if is_paused:
        return msgspec.structs.replace(record, paused=True)
    if record.import_state == "importing":
        raise importing(record)
    return msgspec.structs.replace(_with_rollups_from_now(record), paused=False, import_state="")


def _with_rollups_from_now(record: StreamRecord) -> StreamRecord:
    """Of an imported stream: `Nats-Rollup` of imported messages has had its effect in the original, or had none there
    because the original did not allow it then.
    """
    if not record.import_state or not record.settings.allow_rollup:
        return record
    before = msgspec.structs.replace(record.settings, allow_rollup=False)
    after = record.settings
    began = _with_former_rules(msgspec.structs.replace(record, settings=before, import_state=""), after)
    return msgspec.structs.replace(began, settings=after)


def importing_again(record: StreamRecord, command: BeginImport) -> StreamRecord:
    """Raises StreamRecreated; StreamConflict: it may have taken messages of its own."""
    _require_id(record, command.id)
    if not record.import_state or record.sealed:
        raise StreamConflict(
            f"stream {record.name!r} was resumed or sealed since it was imported, so nothing can be imported into it "
            "any more: import the export under another name (--as)",
            stream=record.name,
        )
    subjects = (one for one in command.subjects if one not in record.settings.subjects)
    former = tuple(dict.fromkeys((*record.former_subjects, *subjects)))
    return msgspec.structs.replace(record, import_state="importing", former_subjects=_bounded(former))


def imported(record: StreamRecord, command: FinishImport) -> StreamRecord:
    """Raises StreamRecreated, StreamConflict."""
    _require_id(record, command.id)
    if record.import_state != "importing":
        if record.lineage == command.lineage:
            return record  # a repeated request
        raise StreamConflict(
            f"stream {record.name!r} is not being imported: another import has completed it, or it was resumed",
            stream=record.name,
        )
    if command.resumes:
        record = _with_rollups_from_now(record)
    return msgspec.structs.replace(
        record,
        lineage=command.lineage,
        import_state="" if command.resumes else "imported",
        paused=not command.resumes,
    )


def importing(record: StreamRecord) -> StreamImporting:
    return StreamImporting(
        f"stream {record.name!r} is being imported: it can be used when the import is complete. If the import was "
        "interrupted, repeat it (natslog import), or delete the stream",
        stream=record.name,
    )


def _require_id(record: StreamRecord, stream_id: StreamId) -> None:
    if record.id != stream_id:
        raise StreamRecreated(
            f"stream {record.name!r} was deleted and created again meanwhile: repeat the import. Its id is "
            f"{record.id}, not {stream_id}",
            stream=record.name,
            id=record.id,
        )


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
