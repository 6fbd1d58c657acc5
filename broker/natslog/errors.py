"""Every error a user of natslog can meet, named for what the caller does about it.

A bug is an `assert`; what can happen in operation is a `NatslogError`. Each carries a stable `code`, whether the
same request may succeed later (`retriable`), the HTTP status that stands for it, and facts a program can use. The
JSON form is the one of the HTTP API: `{"error": {"code", "message", "retriable", ...facts}}`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar


class NatslogError(Exception):
    """Base of all errors in operation.

    Args:
        message: what happened and what to do next, one or two sentences for a person.
        facts: JSON-serialisable details for programs (`stream="orders"`, `high_watermark=42`).
    """

    code: ClassVar[str] = "internal"
    status: ClassVar[int] = 500
    retriable: ClassVar[bool] = False

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.message = message
        self.facts = facts

    def to_json(self) -> dict[str, Any]:
        """The body of the HTTP answer."""
        return {"error": {"code": self.code, "message": self.message, "retriable": self.retriable, **self.facts}}

    def __reduce__(self) -> tuple[Any, ...]:  # Spark pickles errors between processes
        return _rebuild, (type(self), self.message, self.facts)


def _rebuild(kind: type[NatslogError], message: str, facts: dict[str, Any]) -> NatslogError:
    return kind(message, **facts)


class InvalidRequest(NatslogError):
    """The request can never succeed as it stands: correct it."""

    code, status = "invalid_request", 400


class StreamNotFound(NatslogError):
    """No stream of that name: create it, or correct the name."""

    code, status = "stream_not_found", 404


class StreamConflict(NatslogError):
    """A stream of that name exists with other settings; the facts name those that differ."""

    code, status = "stream_conflict", 409


class StreamRecreated(NatslogError):
    """The stream was deleted and made again: positions in the old one mean nothing in the new one."""

    code, status = "stream_recreated", 409


class CursorNotFound(NatslogError):
    """No cursor of that consumer on that stream: it was never set, or went with a stream of that name."""

    code, status = "cursor_not_found", 404


class TooManyCursors(NatslogError):
    """The cluster keeps no more cursors: remove those that are not moved any more."""

    code, status = "too_many_cursors", 409


class NotFound(NatslogError):
    """No such path in the API."""

    code, status = "not_found", 404


class PayloadTooLarge(NatslogError):
    """The body or message exceeds a limit: send less at once."""

    code, status = "payload_too_large", 413


class PartsMissing(NatslogError):
    """Parts that a commit names are not staged on this broker: stage the batch again, then commit."""

    code, status = "parts_missing", 409


class OffsetOutOfRange(NatslogError):
    """The position is not in the log; the facts hold both bounds."""

    code, status = "offset_out_of_range", 416


class DataLoss(NatslogError):
    """Messages between the reader's position and the log are gone; the facts name the range."""

    code = "data_loss"


class MalformedPayload(NatslogError):
    """A message's payload is not what the reader was told; the facts name stream and offset."""

    code = "malformed_payload"


class NotEnoughBrokers(NatslogError):
    """The cluster has fewer brokers than the replication factor asks for."""

    code, status = "not_enough_brokers", 503


class NotMetadataLeader(NatslogError):
    """Another broker leads the metadata group: ask the one the facts name, or wait where they name none."""

    code, status, retriable = "not_metadata_leader", 421, True


class MembershipChanging(NatslogError):
    """Another change of the group's members is under way: propose again when it is done."""

    code, status, retriable = "membership_changing", 409, True


class NotEnoughReplicas(NatslogError):
    """Fewer replicas are in sync than the stream's `min_isr`: writing resumes when they are back."""

    code, status, retriable = "not_enough_replicas", 503, True


class NoLeader(NatslogError):
    """The stream has no leader at the moment: ask again, it is being chosen."""

    code, status, retriable = "no_leader", 503, True


class NotLeader(NatslogError):
    """Another broker leads this stream; the facts name it and its URL."""

    code, status, retriable = "not_leader", 421, True


class MetadataUnavailable(NatslogError):
    """No majority of the brokers agrees on a metadata leader: start the missing brokers."""

    code, status, retriable = "metadata_unavailable", 503, True


class ClusterMismatch(NatslogError):
    """A broker of another cluster, version, secret or data folder: the message names which, and the remedy."""

    code, status = "cluster_mismatch", 403


class OutdatedFolder(ClusterMismatch):
    """A broker's data folder is an older copy: the message names the broker that must get its newest one, or none."""

    code = "outdated_folder"


class CorruptLog(NatslogError):
    """Bytes on disk are not what was written; the facts name file, position and offsets."""

    code, status = "corrupt_log", 503


class CorruptAnswer(NatslogError):
    """What a broker sent is not what was written, or requested: it is requested again. Nothing on disk is damaged."""

    code, status, retriable = "corrupt_answer", 503, True


class StorageFull(NatslogError):
    """The disk is (nearly) full: writes resume by themselves when there is room."""

    code, status, retriable = "storage_full", 503, True


class StorageUnavailable(NatslogError):
    """A new file could not be made (too many open files, say); nothing was written, and the same call may succeed."""

    code, status, retriable = "storage_unavailable", 503, True


class StorageFailed(NatslogError):
    """A write or fsync failed; the stream takes no more until the broker is restarted."""

    code, status = "storage_failed", 503


class Overloaded(NatslogError):
    """The broker's bounded memory is full: send again more slowly."""

    code, status, retriable = "overloaded", 429, True


class StreamPaused(NatslogError):
    """The stream was paused by an operator: resume it to write."""

    code, status, retriable = "stream_paused", 503, True


class StreamSealed(NatslogError):
    """The stream was made read-only for good: create another one to write to."""

    code, status = "stream_sealed", 409


class ShuttingDown(NatslogError):
    """The broker is on its way out: ask another, or this one again when it is back."""

    code, status, retriable = "shutting_down", 503, True


class NotReady(NatslogError):
    """The broker is starting and does not know its streams yet: ask again in a moment."""

    code, status, retriable = "not_ready", 503, True


class BrokerUnavailable(NatslogError):
    """No broker answered: start one, or correct the address."""

    code, status, retriable = "broker_unavailable", 503, True


class NatsUnavailable(NatslogError):
    """The NATS server did not answer: start it, or correct the address."""

    code, status, retriable = "nats_unavailable", 503, True


class PublishFailed(NatslogError):
    """Messages could not be published, or were not acked; the facts name them."""

    code = "publish_failed"


class DataDirError(NatslogError):
    """The data folder cannot be used: another broker's, newer, locked, or not writable."""

    code = "data_dir"


class UpgradeRequired(DataDirError):
    """A newer natslog wrote this: upgrade this broker. Nothing is changed, and no field is dropped."""

    code = "upgrade_required"


class UpgradeBlocked(NatslogError):
    """The feature level cannot be raised: the facts name the brokers that are too old or not connected."""

    code, status = "upgrade_blocked", 409


class ConfigError(NatslogError):
    """A setting or option is wrong; the nearest known one is named."""

    code, status = "config", 400


def _all_kinds(kind: type[NatslogError]) -> dict[str, type[NatslogError]]:
    kinds = {kind.code: kind}
    for sub in kind.__subclasses__():
        kinds.update(_all_kinds(sub))
    return kinds


KINDS = _all_kinds(NatslogError)


def from_json(body: Mapping[str, Any]) -> NatslogError:
    """The error a broker answered with, as the class it had there (`NatslogError` where the code is unknown)."""
    stated = body.get("error")
    error = dict(stated) if isinstance(stated, dict) else {}
    kind = KINDS.get(str(error.pop("code", "")), NatslogError)
    message = str(error.pop("message", "the broker gave no reason"))
    return kind(message, **{name: fact for name, fact in error.items() if name not in ("retriable", "self")})


def natslog_version() -> str:
    """Of the installed package; `unknown` in a checkout that was never installed."""
    from importlib.metadata import PackageNotFoundError, version  # slower to import than all of this module

    try:
        return version("natslog")
    except PackageNotFoundError:
        return "unknown"


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """`; did you mean 'x'?` with the nearest known word, or the list of all where none is near."""
    by_lower = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), list(by_lower), n=1, cutoff=0.5)
    return f"; did you mean {by_lower[near[0]]!r}?" if near else f"; known are {', '.join(sorted(known))}"
