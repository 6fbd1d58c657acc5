"""Which fields of answers, settings and events get into the archive, and what each may contain.

A shape is a `Kind`, a list with the shape of its elements, an object with the shapes of its fields (`dict`), or a
`MapOf`. `kept` takes what fits; everything else is left out, whatever it is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

from natslog import config
from natslog.diagnosis.bundle.redaction import Redactor
from natslog.setting_kinds import Choice, Duration, Flag, Setting, Size, Texts, Url, Urls, Whole
from natslog.urls import separate_urls

MOST_ITEMS = 5_000
_WORD = re.compile(r"[\w.:+-]{0,64}")


class Kind(Enum):
    """Of a value. `WORD`: one of natslog's own words, an id, a version, a time or a duration. `IS_SET`: only whether
    there is one.
    """

    NUMBER = 1
    WORD = 2
    TEXT = 3
    NAME = 4
    URL = 5
    URLS = 6
    IS_SET = 7


@dataclass(frozen=True, slots=True)
class MapOf:
    """An object with any keys, of one kind."""

    key: Kind
    value: Shape


Shape: TypeAlias = "Kind | MapOf | list[Any] | dict[str, Any]"
_NOTHING = object()


def kept(value: Any, shape: Shape, redactor: Redactor) -> Any:
    """The part of a decoded JSON value that fits the shape; None if none does."""
    found = _kept(value, shape, redactor)
    return None if found is _NOTHING else found


def _kept(value: Any, shape: Shape, redactor: Redactor) -> Any:
    if value is None:
        return None
    match shape:
        case Kind():
            return _of_kind(value, shape, redactor)
        case MapOf() if isinstance(value, dict):
            pairs = (
                (_kept(key, shape.key, redactor), _kept(one, shape.value, redactor))
                for key, one in list(value.items())[:MOST_ITEMS]
            )
            return {key: one for key, one in pairs if key is not _NOTHING and one is not _NOTHING}
        case dict() if isinstance(value, dict):
            fields = {name: _kept(value[name], inner, redactor) for name, inner in shape.items() if name in value}
            return {name: one for name, one in fields.items() if one is not _NOTHING}
        case [inner] if isinstance(value, list | tuple):
            return [kept(one, inner, redactor) for one in value[:MOST_ITEMS]]  # columns stay aligned
    return _NOTHING


def _of_kind(value: Any, kind: Kind, redactor: Redactor) -> Any:
    if kind is Kind.IS_SET:
        return bool(value)
    if kind is Kind.NUMBER:
        return value if isinstance(value, bool | int | float) else _NOTHING
    if not isinstance(value, str):
        return _NOTHING
    match kind:
        case Kind.WORD:
            return redactor.without_secrets(value) if _WORD.fullmatch(value) else _NOTHING
        case Kind.TEXT:
            return redactor.text(value)
        case Kind.NAME:
            return redactor.name(value)
        case Kind.URL:
            return redactor.url(value)
        case _:
            return list(map(redactor.url, separate_urls(value)))


NUMBER, WORD, TEXT, NAME = Kind.NUMBER, Kind.WORD, Kind.TEXT, Kind.NAME
PROBLEM: Shape = {"code": WORD, "message": TEXT, "retriable": NUMBER}

CLUSTER: Shape = {
    **dict.fromkeys(("cluster_id", "version", "jetstream", "nats_leaf"), WORD),
    **dict.fromkeys(("metadata_leader", "metadata_term", "is_current", "streams", "under_replicated"), NUMBER),
    **dict.fromkeys(("leaderless", "feature_level", "supported_level", "upgrade_waits"), NUMBER),
    "upgrade_waits_for": [NUMBER],
    "nats_leaf_problem": TEXT,
    "brokers": [
        {
            **dict.fromkeys(
                ("id", "alive", "draining", "stopping", "leads", "replicas", "in_sync", "clock_apart_s"), NUMBER
            ),
            "url": Kind.URL,
            "rack": NAME,
            "tags": [NAME],
            "role": WORD,
            "problem": PROBLEM,
        }
    ],
}
_BROKER_STATS = (
    *(
        "id",
        "messages_per_s",
        "stored_bytes_per_s",
        "sent_bytes_per_s",
        "commits_per_s",
        "commit_ms",
        "ack_ms",
        "behind",
    ),
    *("disk_free_bytes", "store_bytes", "memory_bytes", "cpu_share", "disk_full_s", "has_disk_room"),
)
OVERVIEW: Shape = {
    "at": WORD,
    "cluster": CLUSTER,
    "findings": [
        {
            "code": WORD,
            "level": WORD,
            "where": TEXT,
            "what": TEXT,
            "remedy": TEXT,
            "count": NUMBER,
            "streams": [NAME],
        }
    ],
    "broker_stats": [
        dict.fromkeys(_BROKER_STATS, NUMBER) | {"problem": TEXT, "kernels_problem": TEXT, "nats_connections": [NUMBER]}
    ],
    "streams": {
        "name": [NAME],
        "subjects": [[NAME]],
        "group": [NAME],
        "state": [WORD],
        "max_age": [WORD],
        **{key: [NUMBER] for key in ("leader", "replicas", "in_sync", "high_watermark", "log_start_offset")},
        **{key: [NUMBER] for key in ("messages", "bytes", "messages_per_s", "bytes_per_s")},
    },
}
STREAM: dict[str, Any] = {
    "name": NAME,
    "id": WORD,
    "subject": NAME,
    "subjects": [NAME],
    "former_subjects": [NAME],
    "group": NAME,
    "managed_by": NAME,
    "prevent_delete": NUMBER,
    "standby": NUMBER,
    "placement_tags": [NAME],
    **dict.fromkeys(("tombstone_retention", "ttl", "discard", "compression", "acks", "max_age", "dedupe_window"), WORD),
    **dict.fromkeys(("import_state", "created"), WORD),
    **dict.fromkeys(
        ("replicas", "min_isr", "max_bytes", "max_messages", "max_messages_per_subject", "compact"), NUMBER
    ),
    **dict.fromkeys(("allow_ttl", "max_message_bytes", "deny_delete", "deny_purge", "allow_rollup"), NUMBER),
    **dict.fromkeys(("settings_version", "paused", "sealed", "envelopes", "leader", "leader_epoch"), NUMBER),
    **dict.fromkeys(("log_start_offset", "high_watermark", "messages", "bytes", "segments", "purged_below"), NUMBER),
    **dict.fromkeys(("max_age_s", "dedupe_window_s", "tombstone_retention_s", "ttl_s"), NUMBER),
    **{key: [NUMBER] for key in ("replica_ids", "isr", "target_replica_ids", "target")},
    "problem": PROBLEM,
}
HISTORY: Shape = {"every_s": NUMBER, "brokers": MapOf(WORD, MapOf(WORD, [NUMBER]))}
READY: Shape = {
    "status": WORD,
    "reason": TEXT,
    "streams_with_problems": MapOf(NAME, TEXT),
    "warnings": [TEXT],
    "has_disk_room": NUMBER,
}
_CHANGED: Shape = {
    **STREAM,
    "settings": STREAM,
    "replicas": [NUMBER],
    "url": Kind.URL,
    "rack": NAME,
    "incarnation": WORD,
    "method": WORD,
    "change": WORD,
    **dict.fromkeys(("status", "level", "free_bytes", "draining"), NUMBER),
}
ACTIVITY: Shape = {
    **dict.fromkeys(("id", "event", "time", "cluster", "stream_id"), WORD),
    "stream": NAME,
    "broker": NUMBER,
    "identity": NAME,
    "before": _CHANGED,
    "after": _CHANGED,
    "message": TEXT,
}
"""Without `address`, and of requests without path, query and body."""

LOG_LINE: Shape = {
    **dict.fromkeys(("time", "level", "code", "logger", "request_id", "reason", "method", "cluster"), WORD),
    **dict.fromkeys(("log_level", "log_logger"), WORD),
    **dict.fromkeys(("stream", "consumer", "cursor", "producer", "subject"), NAME),
    **dict.fromkeys(("broker", "peer", "batch", "offset", "end_offset", "epoch", "term", "count", "bytes"), NUMBER),
    **dict.fromkeys(("seconds", "feature_level"), NUMBER),
    **dict.fromkeys(("message", "address", "path"), TEXT),
}
"""Without `audit`, and of `error` only the places."""

_SETTINGS_OF_KIND: dict[type[Setting], Shape] = {
    **dict.fromkeys((Whole, Size, Duration, Flag), NUMBER),
    Choice: WORD,
    Url: Kind.URLS,
    Urls: [Kind.URL],
    Texts: [NAME],
}
SETTINGS: Shape = {one.field: _SETTINGS_OF_KIND.get(type(one.setting), Kind.IS_SET) for one in config.SETTINGS} | {
    "http_host": WORD,
    "data_dir": TEXT,
    "rack": NAME,
    "admin_identity": NAME,
}
"""Of files and users: only whether they are set."""
