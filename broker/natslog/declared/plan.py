"""What to do so that the streams of a cluster have the settings that files state. Pure functions.

Only stated settings are compared and changed; a stream keeps the others, and the plan names those that are not the
default. `wanted` settings come from the same functions as in a broker, so that a plan refuses what a broker would.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from natslog.cluster.stream_changes import EDITABLE_IF_SEALED, PROTECTIONS, differences
from natslog.declared.reading import Declared
from natslog.errors import InvalidRequest
from natslog.model import StreamSettings, default_min_isr, min_isr_after_resize
from natslog.stream_settings import parse_settings, settings_of_stream
from natslog.subjects import is_internal

Action = Literal["create", "change", "unchanged", "refused", "delete", "protected", "unlisted"]
"""`refused`: the stream cannot be as it is declared. `protected`: no file declares the stream any more, and it is not
deleted. `unlisted`: the same without `--prune`, which would delete the stream, or find it protected.
"""
BUCKET_PREFIXES = ("KV_", "OBJ_")
"""Names of the streams of key-value buckets and object stores of JetStream clients begin so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What is planned for one stream.

    Attributes:
        changes: setting → (as it is, as stated), in the form of the API; of a stream to create: (None, as stated).
        keeps: settings that no file states and that are not the default. requests: bodies of the edits or the creation.
        id, settings_version: those that the plan was made for. messages: of a stream to delete, where they are known.
    """

    stream: str
    action: Action
    changes: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    keeps: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""
    messages: int | None = None
    requests: tuple[Mapping[str, Any], ...] = ()
    id: str | None = None
    settings_version: int | None = None

    def to_json(self) -> dict[str, Any]:
        body: dict[str, Any] = {"stream": self.stream, "action": self.action}
        if self.changes:
            body["changes"] = {name: {"from": was, "to": wanted} for name, (was, wanted) in self.changes.items()}
        if self.keeps:
            body["keeps"] = dict(self.keeps)
        if self.reason:
            body["reason"] = self.reason
        return body if self.messages is None else body | {"messages": self.messages}


def plan_of(declared: Declared, listed: Iterable[Mapping[str, Any]], *, prune: bool) -> list[Planned]:
    """For each declared stream, and each that `--prune` deletes or would delete, by name.

    Args:
        listed: all streams of the cluster, as the API shows them.
    """
    present = {one["name"]: one for one in listed if not is_internal(one["name"])}
    steps = [
        _change(name, stated, present[name]) if name in present else _creation(name, stated)
        for name, stated in declared.streams.items()
    ]
    steps += [
        _deletion(one, prune=prune)
        for name, one in present.items()
        if name not in declared.streams and one.get("managed_by") in declared.managed_by
    ]
    return sorted(steps, key=lambda step: step.stream)


def require_few_deletions(
    steps: Iterable[Planned], declared: Declared, listed: Iterable[Mapping[str, Any]], *, most: int, delete_all: bool
) -> None:
    """Raises InvalidRequest: more streams would be deleted than `most`, or, without `delete_all`, all of a declaration.

    A file that is truncated or was generated from nothing looks like this.
    """
    deleted = [step.stream for step in steps if step.action == "delete"]
    if len(deleted) > most:
        raise InvalidRequest(
            f"--prune would delete {len(deleted)} streams ({', '.join(deleted[:5])}{', …' * (len(deleted) > 5)}), more "
            f"than --max-deletions {most}: nothing was changed. Check that the files are whole, or raise the limit",
            streams=deleted,
        )
    owners = {one["name"]: one.get("managed_by") for one in listed}
    declaring = {stated.get("managed_by") for stated in declared.streams.values()}
    for name in deleted:
        if owners[name] not in declaring and not delete_all:
            raise InvalidRequest(
                f"--prune would delete every stream with managed_by {owners[name]!r}, because the files declare none: "
                "nothing was changed. Check that the files are whole, or pass --delete-all as well",
                streams=deleted,
            )


def present_settings(shown: Mapping[str, Any]) -> tuple[StreamSettings, bool]:
    """The settings of a listed stream; while its number of replicas is being changed, with the new number, and whether
    that is so: `min_isr` is then that of before or the default.

    Raises:
        InvalidRequest: a newer broker has settings or values that this version does not have.
    """
    settings = settings_of_stream(shown)
    wanted = len(shown.get("target_replica_ids") or ()) or settings.replicas
    if wanted == settings.replicas:
        return settings, False
    min_isr = min_isr_after_resize(settings, wanted)
    return msgspec.structs.replace(settings, replicas=wanted, min_isr=min_isr), True


def chosen(settings: StreamSettings) -> dict[str, Any]:
    """Subjects, and the settings that are not the default, in the form of the API."""
    default = StreamSettings(subject=settings.subject, min_isr=default_min_isr(settings.replicas))
    values, defaults = settings.to_json(), default.to_json()
    del values["subject"]
    return {name: value for name, value in values.items() if name == "subjects" or value != defaults[name]}


# ---- one stream ----


def _creation(name: str, stated: Mapping[str, Any]) -> Planned:
    try:
        settings = parse_settings(dict(stated))
    except InvalidRequest as error:
        return Planned(stream=name, action="refused", reason=f"it cannot be created: {error.message}")
    wanted = settings.to_json()
    names = ["subjects", *(name for name in stated if name not in ("subject", "subjects"))]
    changes = {one: (None, wanted[one]) for one in names}
    return Planned(stream=name, action="create", changes=changes, requests=(stated,))


def _change(name: str, stated: Mapping[str, Any], shown: Mapping[str, Any]) -> Planned:
    try:
        present, is_resizing = present_settings(shown)
        wanted = parse_settings(_effective(stated, present, is_resizing=is_resizing), present)
    except InvalidRequest as error:
        return Planned(stream=name, action="refused", reason=f"it cannot be changed: {error.message}")
    changes = differences(present, wanted)
    hidden = {*stated, "subject", "subjects"}
    keeps = {one: value for one, value in chosen(present).items() if one not in hidden}
    if not changes:
        return Planned(stream=name, action="unchanged", keeps=keeps)
    if reason := _why_not(changes, shown):
        return Planned(stream=name, action="refused", changes=changes, reason=f"it cannot be changed: {reason}")
    return Planned(
        stream=name,
        action="change",
        changes=changes,
        keeps={one: value for one, value in keeps.items() if one not in changes},
        requests=_edits(stated, changes),
        id=shown["id"],
        settings_version=shown.get("settings_version"),
    )


def _effective(stated: Mapping[str, Any], present: StreamSettings, *, is_resizing: bool) -> dict[str, Any]:
    """With the `min_isr` that follows from another number of replicas; while that is being changed, the API does not
    show the `min_isr` that will be, so it is not compared.
    """
    replicas = stated.get("replicas", present.replicas)
    if replicas == present.replicas:
        return {name: value for name, value in stated.items() if not (is_resizing and name == "min_isr")}
    return {"min_isr": min_isr_after_resize(present, replicas)} | dict(stated)


def _why_not(changes: Mapping[str, tuple[Any, Any]], shown: Mapping[str, Any]) -> str:
    """Empty where it can be changed."""
    was, wanted = changes.get("managed_by", (None, None))
    if was is not None and wanted is not None:
        return (
            f"it has managed_by {was!r}, not {wanted!r}: two declarations would change it in turns. Remove it from one "
            f"of them, or run natslog stream edit {shown['name']} --managed-by {wanted}"
        )
    for name in PROTECTIONS:
        if name in changes and changes[name][0]:
            return f"{name} cannot be turned off"
    fixed = sorted(set(changes) - {"replicas", *EDITABLE_IF_SEALED})
    if shown.get("sealed") and fixed:
        return f"the stream is sealed, so {', '.join(fixed)} cannot be edited any more"
    return ""


def _edits(stated: Mapping[str, Any], changes: Mapping[str, tuple[Any, Any]]) -> tuple[Mapping[str, Any], ...]:
    """The bodies of the edits. Another number of replicas, with its `min_isr`, is an edit of its own: only one change
    can be compared with a version.
    """
    resize = {name: stated[name] for name in ("replicas", "min_isr") if name in stated and "replicas" in changes}
    subjects = ("subject", "subjects")
    others = {
        name: value
        for name, value in stated.items()
        if name not in resize and (name in changes or (name in subjects and not changes.keys().isdisjoint(subjects)))
    }
    return tuple(body for body in (others, resize) if body)


def _deletion(shown: Mapping[str, Any], *, prune: bool) -> Planned:
    name, reason = shown["name"], ""
    if shown.get("prevent_delete"):
        reason = (
            "it has prevent_delete: declare the stream again, or turn that off (natslog stream edit "
            f"{name} --no-prevent-delete)"
        )
    elif "jetstream" in shown or name.startswith(BUCKET_PREFIXES):
        reason = f"JetStream clients have created or changed it: delete it with them, or with natslog stream rm {name}"
    if reason:
        reason = f"it is not declared any more, and is not deleted: {reason}"
    if reason or not prune:
        return Planned(stream=name, action="protected" if prune else "unlisted", reason=reason)
    return Planned(
        stream=name,
        action="delete",
        messages=shown.get("messages"),
        id=shown["id"],
        settings_version=shown.get("settings_version"),
    )
