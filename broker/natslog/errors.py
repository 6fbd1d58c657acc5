"""All errors of natslog, named for the action of the caller.

A bug is an `assert`; what can happen in operation is a `NatslogError`. Each carries a stable `code`, whether the
same request may succeed later (`retriable`), the HTTP status that stands for it, and facts a program can use. The
JSON form is the one of the HTTP API: `{"error": {"code", "message", "retriable", ...facts}}`.
"""

from __future__ import annotations

import difflib
import errno
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar


class NatslogError(Exception):
    """Base of all errors in operation.

    Args:
        message: what happened and what to do next, in one or two sentences.
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
    """A stream of that name does not exist: create it, or correct the name."""

    code, status = "stream_not_found", 404


class StreamConflict(NatslogError):
    """A stream of that name exists with other settings; the facts name those that differ."""

    code, status = "stream_conflict", 409


class SettingsConflict(NatslogError):
    """The settings of the stream were edited since they were read; the facts hold the present ones."""

    code, status = "settings_conflict", 409


class RemovalDenied(NatslogError):
    """The stream is protected against this removal (`deny_purge`, `deny_delete`, `prevent_delete`); nothing was
    removed.
    """

    code, status = "removal_denied", 409


class StreamRecreated(NatslogError):
    """The stream was deleted and created again: offsets of the old stream are not valid in the new one."""

    code, status = "stream_recreated", 409


class MessageNotFound(NatslogError):
    """There is no message at that offset: it is outside of the stream, or was removed."""

    code, status = "message_not_found", 404


class ErasureNotFound(NatslogError):
    """There is no erasure with this id on the stream, or its receipt is not kept any more."""

    code, status = "erasure_not_found", 404


class ViewExpired(NatslogError):
    """The view of a stream that a reader began with is no longer known: begin to read again."""

    code, status = "view_expired", 409


class CursorNotFound(NatslogError):
    """The consumer has no cursor on that stream: it was never set, or was deleted with a stream of that name."""

    code, status = "cursor_not_found", 404


class TooManyCursors(NatslogError):
    """The limit of cursors is reached: delete those that are no longer used."""

    code, status = "too_many_cursors", 409


class NotFound(NatslogError):
    """No such path in the API."""

    code, status = "not_found", 404


class PayloadTooLarge(NatslogError):
    """The body or message exceeds a limit: send less at once."""

    code, status = "payload_too_large", 413


class MessageTooLarge(NatslogError):
    """A message is larger than its stream permits (`max_message_bytes`): make it smaller, or raise the limit."""

    code, status = "message_too_large", 400


class PartsMissing(NatslogError):
    """Parts that a commit names are not staged on this broker: stage the batch again, then commit."""

    code, status = "parts_missing", 409


class PartsUnavailable(NatslogError):
    """The broker at which a part is staged does not respond; it may be restarting. The facts name it."""

    code, status, retriable = "parts_unavailable", 503, True


class BatchConflict(NatslogError):
    """The batch is not above the last one of its producer, nor that one again with the same rows: appending it could
    store rows twice, leaving it out could lose them. The facts name both batches.
    """

    code, status = "batch_conflict", 409


class OffsetOutOfRange(NatslogError):
    """The position is not in the log; the facts hold both bounds."""

    code, status = "offset_out_of_range", 416


class DataLoss(NatslogError):
    """Messages between the reader's position and the log start were deleted; the facts name the range."""

    code = "data_loss"


class MalformedPayload(NatslogError):
    """The payload of a message does not match the reader's schema; the facts name stream and offset."""

    code = "malformed_payload"


class NotEnoughBrokers(NatslogError):
    """The cluster has fewer brokers than the replication factor asks for."""

    code, status = "not_enough_brokers", 503


class NotMetadataLeader(NatslogError):
    """Another broker leads the metadata group: send the request to the broker in the facts, or wait if they name
    none.
    """

    code, status, retriable = "not_metadata_leader", 421, True


class MembershipChanging(NatslogError):
    """Another membership change is in progress: repeat the request when it is complete."""

    code, status, retriable = "membership_changing", 409, True


class NotEnoughReplicas(NatslogError):
    """Fewer replicas are in sync than the stream's `min_isr`: writes resume when enough replicas are in sync."""

    code, status, retriable = "not_enough_replicas", 503, True


class NoLeader(NatslogError):
    """The stream has no leader at the moment: repeat the request; a leader is being chosen."""

    code, status, retriable = "no_leader", 503, True


class NotLeader(NatslogError):
    """Another broker leads this stream; the facts name it and its URL."""

    code, status, retriable = "not_leader", 421, True


class MetadataUnavailable(NatslogError):
    """No metadata leader is available because no majority of the brokers is connected: start the missing brokers."""

    code, status, retriable = "metadata_unavailable", 503, True


class ClusterMismatch(NatslogError):
    """A broker has another cluster, version, secret or data folder: the message names the difference and the remedy."""

    code, status = "cluster_mismatch", 403


class Unauthorized(NatslogError):
    """The request has no valid credentials: send a token or a client certificate that is valid."""

    code, status = "unauthorized", 401


class Forbidden(NatslogError):
    """No access rule permits this to the identity: an administrator may add one."""

    code, status = "forbidden", 403


class QuotaExceeded(NatslogError):
    """The identity has reached one of its limits; the facts name it. `retry_after_s`: when to repeat the request."""

    code, status, retriable = "quota_exceeded", 429, True


class StorageQuotaExceeded(NatslogError):
    """The identity has as many streams, bytes or cursors as it may have: delete some, or get a higher quota."""

    code, status = "storage_quota_exceeded", 403


class SecurityConflict(NatslogError):
    """The change of tokens, rules or roles contradicts those that exist; the message names the remedy."""

    code, status = "security_conflict", 409


class SecurityNotFound(NatslogError):
    """There is no such token, rule, role or quota."""

    code, status = "security_not_found", 404


class OutdatedFolder(ClusterMismatch):
    """A broker's data folder is an older copy: the message names the broker that must get its newest one, or none."""

    code = "outdated_folder"


class CorruptLog(NatslogError):
    """Bytes on disk differ from what was written; the facts name file, position and offsets."""

    code, status = "corrupt_log", 503


class CorruptAnswer(NatslogError):
    """The response of a broker is damaged, or does not match the request: it is requested again. Data on disk is not
    damaged.
    """

    code, status, retriable = "corrupt_answer", 503, True


class StorageFull(NatslogError):
    """The disk is (nearly) full: writes resume automatically when there is free space."""

    code, status, retriable = "storage_full", 503, True


class StorageUnavailable(NatslogError):
    """A new file could not be created (for example because of too many open files); nothing was written, and the same
    call may succeed.
    """

    code, status, retriable = "storage_unavailable", 503, True


class FileUnavailable(NatslogError, OSError):
    """A file could not be used now: too many open files, a disk that is full or fails, missing permissions. The same
    call may succeed when that is over. As an `OSError` it has the `errno`.
    """

    code, status, retriable = "file_unavailable", 503, True

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message, **facts)
        self.errno, self.strerror = facts.get("errno"), message

    @classmethod
    def of(cls, error: OSError) -> FileUnavailable:
        remedy = _REMEDIES.get(error.errno or 0, "check the disk and the kernel log")
        name = "" if error.filename is None else f" {error.filename}"
        return cls(f"a file{name} cannot be used: {error.strerror or error}; {remedy}", errno=error.errno)


_REMEDIES = {
    errno.EMFILE: "raise the limit of open files of the broker (LimitNOFILE), or close connections",
    errno.ENFILE: "raise the limit of open files of the machine (fs.file-max)",
    errno.ENOSPC: "free space on the disk",
    errno.EDQUOT: "raise the quota of the broker's user on the disk",
    errno.EROFS: "the disk is mounted read-only: check it and the kernel log",
    errno.EACCES: "give the broker's user the rights to the data folder",
    errno.EPERM: "give the broker's user the rights to the data folder",
    errno.ENOMEM: "the machine has no memory left",
    errno.EIO: "check the disk and the kernel log",
    errno.ESTALE: "check the disk and the kernel log",
}
"""What an operator can do about errors of files, by number."""
FILE_ERRORS = frozenset(_REMEDIES)
"""Those of which a broker stays up: others are bugs, or have another meaning."""


class StorageFailed(NatslogError):
    """A write or fsync failed; the stream accepts no writes until the broker is restarted."""

    code, status = "storage_failed", 503


class Overloaded(NatslogError):
    """The broker's memory limit is reached: repeat the request later, at a lower rate."""

    code, status, retriable = "overloaded", 429, True


class ConditionFailed(NatslogError):
    """A condition of the publish is not met: read what the stream has now, then decide. The message is JetStream's,
    and the fact `err_code` its number.
    """

    code, status = "condition_failed", 400


class PublishRefused(NatslogError):
    """The stream does not allow what a header of the message requests. The message is JetStream's, and the fact
    `err_code` its number.
    """

    code, status = "publish_refused", 400


class RollupRefused(NatslogError):
    """The stream does not allow roll-ups (`allow_rollup`), or the value of `Nats-Rollup` is none. The message is
    JetStream's, and the fact `err_code` its number.
    """

    code, status = "rollup_refused", 500


class LimitReached(NatslogError):
    """A stream with `discard: new` has as many messages or bytes as it may have: remove messages, or raise the limit.
    The message begins with JetStream's, and the fact `err_code` is its number.
    """

    code, status = "limit_reached", 503


class StreamPaused(NatslogError):
    """The stream was paused by an operator: resume it to write."""

    code, status, retriable = "stream_paused", 503, True


class StreamImporting(NatslogError):
    """An export is being imported into the stream: it is served when the import is complete."""

    code, status, retriable = "stream_importing", 503, True


class StreamSealed(NatslogError):
    """The stream was made permanently read-only: create another one to write to."""

    code, status = "stream_sealed", 409


class ShuttingDown(NatslogError):
    """The broker is shutting down: send the request to another broker, or repeat it after the restart."""

    code, status, retriable = "shutting_down", 503, True


class DamagedExport(NatslogError):
    """The files of an export are damaged, incomplete, or not what an export has: use another copy."""

    code, status = "damaged_export", 400


class ExportFailed(NatslogError):
    """An export could not be written, or does not continue the one in its folder; what was there before is intact."""

    code = "export_failed"


class MigrationFailed(NatslogError):
    """A stream of JetStream could not be copied: correct what the message states, then repeat the import."""

    code = "migration_failed"


class TableConflict(NatslogError):
    """Another process has written to the table what this one was about to write, or the table belongs to another
    stream: run one process for a table.
    """

    code, status = "table_conflict", 409


class TableFailed(NatslogError):
    """The table cannot be read or written: correct what the message states. What was committed before is intact."""

    code, retriable = "table_failed", True


class NotReady(NatslogError):
    """The broker is starting and has not loaded its streams yet: repeat the request in a moment."""

    code, status, retriable = "not_ready", 503, True


class Starting(NatslogError):
    """The broker is starting and does not know yet who may do what: repeat the request in a moment."""

    code, status, retriable = "starting", 503, True


class BrokerUnavailable(NatslogError):
    """No broker responded: start one, or correct the address."""

    code, status, retriable = "broker_unavailable", 503, True


class NatsUnavailable(NatslogError):
    """The NATS server did not respond: start it, or correct the address."""

    code, status, retriable = "nats_unavailable", 503, True


class NatsLoginRefused(NatsUnavailable):
    """The NATS server refused user, password, token or credentials file: correct them."""

    code, retriable = "nats_login_refused", False


class PublishFailed(NatslogError):
    """Messages could not be published, or were not acked; the facts name them."""

    code, status = "publish_failed", 502


class DataDirError(NatslogError):
    """The data folder cannot be used: it belongs to another broker, is newer, locked, or not writable."""

    code = "data_dir"


class UpgradeRequired(DataDirError):
    """The data are of a newer natslog, or of feature level 1: another version must be installed, as the message states.
    Nothing was changed, and no field was dropped.
    """

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
    """The error in the response of a broker, as the class that it had there (`NatslogError` where the code is
    unknown).
    """
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
