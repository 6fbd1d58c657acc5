"""What a soak found, for people and for programs."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.chaos.history import History
from tests.soak.checkers import Count
from tests.soak.drivers import Driver


def summary(
    seed: int, history: History, drivers: list[Driver], counts: list[Count], conflicts: list[str]
) -> dict[str, Any]:
    return {
        "seed": seed,
        "seconds": round(time.monotonic() - history.started_s, 1),
        "sent": sum(len(one.sent_s) for one in history.published),
        "acked": history.acked,
        "places": [asdict(one) for one in counts],
        "faults": dict(Counter(one.kind for one in history.faults)),
        "drivers": [
            {
                "name": one.name,
                "starts": one.starts,
                "killed_half_done": one.killed_half_done,
                "batches": one.batches,
                "own_ends": one.own_ends,
            }
            for one in drivers
        ],
        "conflicts": conflicts,
        "violations": [asdict(one) for one in history.violations],
        "timeline": [
            {
                "kind": one.kind,
                "place": one.place,
                "began_s": round(one.began_s - history.started_s, 2),
                "healed_s": one.healed_s and round(one.healed_s - history.started_s, 2),
            }
            for one in history.faults
        ],
        "errors": dict(history.errors.most_common(40)),
    }


def write(folder: Path, found: dict[str, Any]) -> None:
    (folder / "report.json").write_text(json.dumps(found, indent=2) + "\n")


def show(found: dict[str, Any]) -> None:
    for name in ("seed", "seconds", "sent", "acked", "faults"):
        print(f"{name + ':':12}{found[name]}")
    for one in found["drivers"]:
        half_done = f"{one['killed_half_done']} kills in the middle of a batch"
        ends = f", ended {len(one['own_ends'])} times by itself" if one["own_ends"] else ""
        print(f"{one['name'] + ':':12}{one['batches']} batches, {one['starts']} starts, {half_done}{ends}")
    for one in found["places"]:
        print(
            f"{one['place'] + ':':12}{one['acked']} acked, {one['rows']} rows ({one['unacked']} of them never acked): "
            f"{one['lost']} lost, {one['twice']} twice, {one['strange']} never sent"
        )
        for text in one["named"]:
            print(f"            {text}")
    for text in found["conflicts"]:
        print(f"ended:      {text[:200]}")
    for one in found["violations"]:
        print(f"VIOLATION of {one['promise']}: {one['text']}")
    print(f"{'violations:':12}{len(found['violations'])}")
