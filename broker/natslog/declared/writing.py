"""The streams of a cluster as a file that declares them as they are."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from natslog.declared.plan import chosen, present_settings
from natslog.stream_settings import SIZE_NAMES
from natslog.units import format_exact_size


def as_file(listed: Iterable[Mapping[str, Any]]) -> str:
    """TOML: for each stream its subjects, and the settings that are not the default.

    Streams that JetStream clients have created or changed are named in comments only: a file cannot state all of their
    configuration.

    Raises:
        InvalidRequest: a newer broker has settings that this version does not have.
    """
    blocks = []
    for shown in listed:
        name = shown["name"]
        if "jetstream" in shown:
            blocks.append(f"# Not declared here, because JetStream clients have created or changed it: {name}\n")
            continue
        settings, is_resizing = present_settings(shown)
        values = chosen(settings)
        if is_resizing:
            values.pop("min_isr", None)
        lines = (f"{setting} = {_toml(setting, value)}\n" for setting, value in values.items())
        blocks.append(f"[streams.{name if '.' not in name else json.dumps(name)}]\n" + "".join(lines))
    return "\n".join(blocks)


def _toml(setting: str, value: Any) -> str:
    if value is None:
        return '"none"'
    if setting in SIZE_NAMES:
        value = format_exact_size(value)
    return json.dumps(value, ensure_ascii=False)  # of text, numbers, booleans and lists, JSON is TOML
