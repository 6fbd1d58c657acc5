"""Positions in Spark's checkpoint: half-open, one per stream, with the stream's id.

    {"orders": {"id": "3ef2…", "offset": 42, "epoch": 5}, "returns": {"id": "9a01…", "offset": 7, "start": 0}}
    {"orders": {"id": "3ef2…", "offset": 90000, "epoch": 5, "tasks": [[1, 40000], [0, 90000]]}}
    {"orders": {"id": "3ef2…", "offset": 42, "epoch": 5, "passed": [{"by": "subject", "ends": [42, 57]}]}}

The first position of a stream that joined a running query (`streamPattern`, `group`, or named since) has `start`: Spark
has no earlier position, and a repeated batch must begin at the same offset. `epoch` is that of the leader which stated
that the messages before the offset exist: a query that is restarted ignores the answers of older leaders. Positions of
natslog 0.1.0, and those of the first epoch, have none. A position has `tasks` if the batch that ends there has more
than one task: which one reads up to which offset, in turn. A repeated batch is divided in the same way, even if the
stored batches, their leaders or the driver's cores have changed: the sink's message ids depend on it. Where several
readers shared a stream in real time, `passed` has the sets of shares of which some were read further than `offset`:
rows of share `i` below `ends[i]` are not read again. Spark compares the JSON as text: names are sorted, and `id` comes
before `offset`, always. Format version 1 has no version field; a later one will.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from natslog.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Passed:
    """Of each share of a stream, by subject or key, the offset below which all of its rows were read."""

    by: str
    ends: tuple[int, ...]

    def to_text(self) -> str:
        """As requests have it."""
        return f"{self.by}:{','.join(map(str, self.ends))}"


@dataclass(frozen=True, slots=True)
class StreamOffset:
    """The next offset to read of the stream with this id; `start` where it began, if it joined with this position.

    `tasks`: (number of the task, exclusive end of what it reads), ends rising up to `offset`; empty where one has all.
    `epoch`: of the leader that stated that the messages before the offset are there; 0 where it is not known.
    """

    id: str
    offset: int
    start: int | None = None
    tasks: tuple[tuple[int, int], ...] = ()
    epoch: int = 0
    passed: tuple[Passed, ...] = ()

    def passed_beyond(self, offset: int) -> tuple[Passed, ...]:
        """Those sets of shares that matter still for who has read up to there."""
        return tuple(one for one in self.passed if max(one.ends) > offset)

    def to_json(self) -> dict[str, Any]:
        body: dict[str, Any] = {"id": self.id, "offset": self.offset}
        if self.epoch:
            body["epoch"] = self.epoch
        if self.start is not None:
            body["start"] = self.start
        if self.tasks:
            body["tasks"] = [list(one) for one in self.tasks]
        if self.passed:
            body["passed"] = [{"by": one.by, "ends": list(one.ends)} for one in self.passed]
        return body


Offsets = dict[str, StreamOffset]


def to_json(offsets: Mapping[str, StreamOffset]) -> dict[str, Any]:
    """The form that Spark stores; always the same text for the same positions."""
    return {name: offsets[name].to_json() for name in sorted(offsets)}


def from_json(body: Mapping[str, Any]) -> Offsets:
    """Positions from Spark.

    Raises:
        ConfigError: this source did not write it: the checkpoint belongs to another query.
    """
    try:
        return {name: _one(at) for name, at in body.items()}
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"the checkpoint contains {body!r}, which is not an offset of natslog: it belongs to another query; set "
            "another checkpointLocation"
        ) from error


def _one(at: Mapping[str, Any]) -> StreamOffset:
    if not isinstance(at["id"], str):
        raise TypeError("an id is a text")
    start = at.get("start")
    if not isinstance(shares := at.get("tasks", []), list):
        raise TypeError("tasks are a list")
    tasks = tuple((_whole(number), _whole(end)) for number, end in shares)
    start = None if start is None else _whole(start)
    passed = tuple(_passed(one) for one in at.get("passed", []))
    return StreamOffset(at["id"], _whole(at["offset"]), start, tasks, _whole(at.get("epoch", 0)), passed)


def _passed(body: Mapping[str, Any]) -> Passed:
    if body["by"] not in ("subject", "key") or not body["ends"]:
        raise ValueError("rows are divided by subject or by key")
    return Passed(body["by"], tuple(map(_whole, body["ends"])))


def _whole(value: object) -> int:
    """Another number or text must not become a position by conversion. Raises TypeError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise TypeError("a position is a whole number of at least 0")
    return value
