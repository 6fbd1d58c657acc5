"""Positions in Spark's checkpoint: half-open, one per stream, with the stream's id.

    {"orders": {"id": "3ef2…", "offset": 42}, "returns": {"id": "9a01…", "offset": 7, "start": 0}}

`start` is there in the first position of a stream that joined a running query (`streamPattern`, `group`, or named
since): Spark knows no earlier one, and a batch that is repeated must begin where it began. Spark compares the JSON as
text: names are sorted, and `id` comes before `offset`, always. Format version 1 has no version field; a later one will.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from natslog.errors import ConfigError


@dataclass(frozen=True, slots=True)
class StreamOffset:
    """The next offset to read of the stream with this id; `start` where it began, if it joined with this position."""

    id: str
    offset: int
    start: int | None = None

    def to_json(self) -> dict[str, Any]:
        body: dict[str, Any] = {"id": self.id, "offset": self.offset}
        return body if self.start is None else body | {"start": self.start}


Offsets = dict[str, StreamOffset]


def to_json(offsets: Mapping[str, StreamOffset]) -> dict[str, Any]:
    """The form Spark keeps; always the same text for the same positions."""
    return {name: offsets[name].to_json() for name in sorted(offsets)}


def from_json(body: Mapping[str, Any]) -> Offsets:
    """Positions from Spark.

    Raises:
        ConfigError: not what this source wrote: the checkpoint is another query's.
    """
    try:
        return {name: _one(at) for name, at in body.items()}
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"the checkpoint holds {body!r}, which is no natslog offset: use another checkpointLocation for this query"
        ) from error


def _one(at: Mapping[str, Any]) -> StreamOffset:
    start = at.get("start")
    return StreamOffset(str(at["id"]), int(at["offset"]), None if start is None else int(start))
