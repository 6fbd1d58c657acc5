"""What the record of a stream puts in force at its replica: which messages are hidden, and which are refused."""

from __future__ import annotations

from natslog.cluster.stream_changes import importing
from natslog.errors import NatslogError, StreamPaused, StreamSealed
from natslog.log import ReplicaLog
from natslog.log.rules import Expiry, Rule
from natslog.model import Epoch, StreamRecord


def rules_of(record: StreamRecord) -> tuple[Rule, ...]:
    """Oldest first; the last one is in force for new messages. Roll-ups of imported messages have no effect."""
    settings, rules, epoch = record.settings, [], Epoch(0)
    rolls_up = settings.allow_rollup and not record.import_state
    for former in record.former_rules:
        rules.append(Rule(epoch, former.max_messages_per_subject, former.compact, former.allow_rollup))
        epoch = former.until_epoch
    return (*rules, Rule(epoch, settings.max_messages_per_subject, settings.compact, rolls_up))


def adopt_settings(log: ReplicaLog, record: StreamRecord) -> None:
    """At once, also the rules by which messages are hidden."""
    settings = log.settings = record.settings
    log.chain.purged_below = record.purged_below
    log.visibility.set_rules(rules_of(record), log.log_start_offset, record.rules_version)
    tombstones_us = int(settings.tombstone_retention_s * 1e6) if settings.compact else None
    log.visibility.set_expiry(Expiry(settings.allow_ttl, tombstones_us), log.log_start_offset)


def refusal_of(record: StreamRecord) -> NatslogError | None:
    """Why the stream takes no messages, if an operator decided so."""
    if record.sealed:
        return StreamSealed(
            f"stream {record.name!r} is sealed and therefore permanently read-only: write to another stream"
        )
    if record.import_state == "importing":
        return importing(record)
    if record.paused:
        return StreamPaused(f"stream {record.name!r} is paused: resume it, then send the message again")
    return None
