"""The settings of a stream in requests and files: how they are parsed, and which of them contradict each other."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Any

import msgspec

from natslog.errors import InvalidRequest
from natslog.model import DEFAULT_WINDOW_S, MAX_SUBJECTS, SETTINGS, StreamSettings, default_min_isr
from natslog.setting_kinds import Size
from natslog.subjects import check_subject, is_wildcard, overlap
from natslog.units import format_duration

OF_NATS = {
    "$SYS": "the NATS server's own messages",
    "$JS": "requests to JetStream, and its answers,",
    "_INBOX": "answers to requests, and acks,",
}
"""First tokens of subjects that no stream records, and what is sent on them."""
_BY_NAME = {one.name: one for one in SETTINGS}
SIZE_NAMES = frozenset(one.name for one in SETTINGS if isinstance(one.setting, Size))
SETTING_NAMES = tuple(StreamSettings(subject="x").to_json())
"""Names of settings in JSON, in the order they are shown."""


def setting_fields(body: dict[str, Any]) -> tuple[str, ...]:
    """The fields of `StreamSettings` that a request body names; `subject` stands for all subjects."""
    names = {"subject" if name == "subjects" else name for name in body}
    return tuple(sorted(_BY_NAME[name].field if name in _BY_NAME else name for name in names))


def parse_settings(body: dict[str, Any], base: StreamSettings | None = None) -> StreamSettings:
    """Settings from a request body, checked.

    Args:
        body: JSON names to values; durations and sizes as numbers or text.
        base: settings to change (an edit); without it, `subject` or `subjects` is required and the rest has defaults.

    Raises:
        InvalidRequest: an unknown name, or a value out of range, the message names the valid values.
    """
    changes = parsed_fields(body)
    if base is None and "subject" not in changes:
        raise InvalidRequest("a stream needs a subject")
    replicas = changes.get("replicas", base.replicas if base else 1)
    if not changes.get("min_isr") and (base is None or "min_isr" in changes):
        changes["min_isr"] = default_min_isr(replicas)
    settings = msgspec.structs.replace(base, **changes) if base else StreamSettings(**changes)
    _check_first_tokens(settings, changes)
    _check_limits(settings, changes)
    return settings


def parsed_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `StreamSettings` that a request body stands for, each of them checked by itself.

    Raises:
        InvalidRequest: an unknown name, or a value out of range.
    """
    unknown = sorted(set(body) - set(SETTING_NAMES))
    if unknown:
        raise InvalidRequest(
            f"unknown setting {unknown[0]!r}; known are {', '.join(SETTING_NAMES)}", setting=unknown[0]
        )
    stated = [_BY_NAME[name] for name in body if name in _BY_NAME]
    return _parsed_subjects(body) | {one.field: one.setting.parse(body[one.name], one.name) for one in stated}


def settings_of_stream(shown: Mapping[str, Any]) -> StreamSettings:
    """The settings of a stream as the HTTP API shows it; those that an older broker does not state have defaults.

    Raises:
        InvalidRequest: they are not as this version has them.
    """
    return StreamSettings(**parsed_fields({name: shown[name] for name in SETTING_NAMES if name in shown}))


def _parsed_subjects(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that `subject` and `subjects` of a request body stand for. Raises InvalidRequest."""
    if "subjects" not in body:
        return {"subject": _recorded_subject(body["subject"]), "more_subjects": ()} if "subject" in body else {}
    given = body["subjects"]
    if not isinstance(given, list) or not 1 <= len(given) <= MAX_SUBJECTS:
        raise InvalidRequest(f"subjects must be a list of 1 to {MAX_SUBJECTS} subjects", setting="subjects")
    first, *more = map(_recorded_subject, given)
    if body.get("subject", first) != first:
        raise InvalidRequest(
            f"subject {body['subject']!r} is not the first of subjects, {first!r}: give only one of both settings",
            setting="subject",
        )
    for one, other in combinations((first, *more), 2):
        if overlap(one, other):
            raise InvalidRequest(
                f"the subjects {one!r} and {other!r} overlap: NATS would deliver a message on both twice. "
                "Remove one of them, or give subjects that have no message in common",
                setting="subjects",
                subjects=[one, other],
            )
    return {"subject": first, "more_subjects": tuple(more)}


def _recorded_subject(value: Any) -> str:
    subject = check_subject(value, wildcards=True)
    for internal, what in OF_NATS.items():
        if subject.split(".")[0] == internal:
            raise InvalidRequest(
                f"{what} are not recorded: choose another subject than {subject!r}", setting="subject", subject=subject
            )
    return subject


def _check_first_tokens(settings: StreamSettings, changes: dict[str, Any]) -> None:
    """What a subject that begins with a wildcard excludes. Raises InvalidRequest."""
    wild = [subject for subject in settings.subjects if is_wildcard(subject.split(".")[0])]
    if not wild or not {"subject", "acks"} & set(changes):
        return
    if settings.acks in ("reply", "any"):
        raise InvalidRequest(
            f"a stream on {wild[0]!r} records the requests to all services, and clients would receive its "
            "acks instead of the services' answers: choose acks header or never (--acks)",
            setting="acks",
        )
    for subject in settings.subjects:
        if subject.startswith("$"):
            raise InvalidRequest(
                f"a stream on {wild[0]!r} does not record subjects that begin with $: record {subject!r} with another "
                "stream",
                setting="subjects",
            )


def _check_limits(settings: StreamSettings, changes: dict[str, Any]) -> None:
    """Settings that contradict each other. Raises InvalidRequest."""
    if settings.min_isr > settings.replicas:
        raise InvalidRequest(f"min_isr {settings.min_isr} is more than the number of replicas, {settings.replicas}")
    largest, most = settings.max_message_bytes or 0, settings.max_bytes or 2**63
    if {"max_bytes", "max_message_bytes"} & set(changes) and largest > most:
        raise InvalidRequest(
            f"max_message_bytes {largest} is more than max_bytes {most}: the stream could not keep such a message. "
            "Lower max_message_bytes, or raise max_bytes",
            setting="max_message_bytes",
        )
    if settings.allow_rollup and settings.deny_purge:
        raise InvalidRequest(
            "roll-ups require the purge permission: a stream has either deny_purge or allow_rollup",
            setting="allow_rollup",
        )
    if settings.standby and settings.group is not None:
        raise InvalidRequest(
            "standby requires a stream without group: NATS delivers each message to one member of a group, so "
            "followers would not receive what the leader receives. Remove one of both settings",
            setting="standby",
        )
    if {"max_age_s", "ttl_s"} & set(changes):
        _check_ttl(settings)
    is_chosen = settings.dedupe_window_s != DEFAULT_WINDOW_S  # the default is in exports, too
    if is_chosen and {"max_age_s", "dedupe_window_s"} & set(changes):
        _check_window(settings)


def _check_ttl(settings: StreamSettings) -> None:
    ttl_s, max_age_s = settings.ttl_s, settings.max_age_s
    if ttl_s is not None and ttl_s < 1.0:
        raise InvalidRequest(f"ttl {format_duration(ttl_s)} must be at least 1s", setting="ttl")
    if ttl_s is not None and max_age_s is not None and ttl_s > max_age_s:
        raise InvalidRequest(
            f"ttl {format_duration(ttl_s)} is more than max_age {format_duration(max_age_s)}: messages would be "
            "removed before they expire. Lower ttl, or raise max_age",
            setting="ttl",
        )


def _check_window(settings: StreamSettings) -> None:
    """Ids of messages are found in the log: what retention has removed cannot be compared any more."""
    if settings.max_age_s is not None and settings.dedupe_window_s > settings.max_age_s:
        raise InvalidRequest(
            f"dedupe_window {format_duration(settings.dedupe_window_s)} is more than max_age "
            f"{format_duration(settings.max_age_s)}: messages would be removed before the window ends. Lower "
            "dedupe_window, or raise max_age",
            setting="dedupe_window",
        )
