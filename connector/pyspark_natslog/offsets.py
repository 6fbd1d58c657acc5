"""Positions in Spark's checkpoint: half-open, one per stream, with the stream's id.

    {"orders": {"id": "3ef2…", "offset": 42}, "returns": {"id": "9a01…", "offset": 7}}

Spark compares the JSON as text: names are sorted, and `id` comes before `offset`, always. Format version 1 has no
version field; a later one will.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from natslog.errors import ConfigError


@dataclass(frozen=True, slots=True)
class StreamOffset:
    """The next offset to read of the stream with this id."""

    id: str
    offset: int


Offsets = dict[str, StreamOffset]


def to_json(offsets: Mapping[str, StreamOffset]) -> dict[str, Any]:
    """The form Spark keeps; always the same text for the same positions."""
    return {name: {"id": offsets[name].id, "offset": offsets[name].offset} for name in sorted(offsets)}


def from_json(body: Mapping[str, Any]) -> Offsets:
    """Positions from Spark.

    Raises:
        ConfigError: not what this source wrote: the checkpoint is another query's.
    """
    try:
        return {name: StreamOffset(str(at["id"]), int(at["offset"])) for name, at in body.items()}
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"the checkpoint holds {body!r}, which is no natslog offset: use another checkpointLocation for this query"
        ) from error


def share_limit(waiting: Mapping[str, int], limit: int) -> dict[str, int]:
    """`limit` rows divided among streams in proportion to what waits in each; none that waits is starved, and every
    row that fits is given out.

    Args:
        waiting: rows that each stream has ready.
    """
    total = sum(waiting.values())
    if total <= limit:
        return dict(waiting)
    shares = {name: max(1, rows * limit // total) if rows else 0 for name, rows in waiting.items()}
    by_size = sorted(waiting, key=lambda name: (-waiting[name], name))
    while (left := limit - sum(shares.values())) != 0:  # rounding, at most a row or so for each stream
        for name in by_size:
            step = min(1, left, waiting[name] - shares[name]) if left > 0 else -min(1, -left, shares[name])
            shares[name] += step
            left -= step
    return shares
