"""What a run found, for people and for programs: a table, a JSON file, a picture of the time that passed."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.chaos.checkers import Copy, duplicates_without_ids, lost, orderly_gaps, resume_times, spread
from tests.chaos.history import FaultEvent, History, Violation
from tests.chaos.removal_checkers import figures
from tests.chaos.removal_history import RemovalHistory

_BIN_S = 0.5


def summary(
    seed: int,
    brokers: int,
    history: History,
    streams: list[History],
    removing: list[RemovalHistory],
    copies: dict[str, list[Copy]],
    violations: list[Violation],
) -> dict[str, Any]:
    rejoined = [
        fault.in_sync_s - fault.healed_s for fault in history.faults if fault.healed_s and fault.in_sync_s is not None
    ]
    last_s = max((one.samples[-1].at_s for one in streams if one.samples), default=history.started_s)
    return {
        "seed": seed,
        "brokers": brokers,
        "seconds": round(last_s - history.started_s, 1),
        "acked": sum(one.acked for one in (*streams, *removing)),
        "streams": {
            **{one.stream: _of_stream(one, copies.get(one.stream, [])) for one in streams},
            **{one.stream: figures(one, copies.get(one.stream, [])) for one in removing},
        },
        "flips": history.flips,
        "metadata_changes": dict(Counter(f"{one.kind} {one.outcome}" for one in history.changes)),
        "faults": dict(Counter(fault.kind for fault in history.faults)),
        "back_in_sync_after_healing": spread(rejoined),
        "violations": [asdict(one) for one in violations],
        "timeline": [
            {
                "kind": fault.kind,
                "place": fault.place,
                "began_s": round(fault.began_s - history.started_s, 2),
                "healed_s": fault.healed_s and round(fault.healed_s - history.started_s, 2),
                "in_sync_s": fault.in_sync_s and round(fault.in_sync_s - history.started_s, 2),
                "resumed_after_s": {one.stream: _resumed(one, fault) for one in streams},
                "notes": fault.notes,
            }
            for fault in history.faults
        ],
        "errors": dict(sum((one.errors for one in (history, *streams, *removing)), Counter[str]()).most_common(60)),
    }


def _of_stream(history: History, copies: list[Copy]) -> dict[str, Any]:
    resumed = resume_times(history)
    return {
        "sent": sum(len(one.sent_s) for one in history.published),
        "acked": history.acked,
        "lost": lost(history, copies) if copies else None,
        "stored": copies[0].rows.num_rows if copies else None,
        "copies": len(copies),
        "read": len(history.read),
        "read_through_broker": {one.broker: one.next_offset for one in history.followed},
        "duplicates_without_ids": duplicates_without_ids(history, copies[0]) if copies else None,
        "elections": max((one.epoch for one in history.samples), default=1) - 1,
        "resume_with_majority": spread([took for fault, took in resumed if fault.keeps_majority]),
        "longest_without_ack_after_an_orderly_stop": spread([took for _, took in orderly_gaps(history)]),
        "resume_after_healing": spread([took for fault, took in resumed if not fault.keeps_majority]),
    }


def _resumed(history: History, fault: FaultEvent) -> float | None:
    times = (round(took, 2) for one, took in resume_times(history) if one.began_s == fault.began_s)
    return next(times, None)


def write(folder: Path, found: dict[str, Any], streams: list[History]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(found, indent=2) + "\n")
    _draw(folder / "timeline.png", found, streams)


def show(found: dict[str, Any]) -> None:
    for name in (
        "seed",
        "brokers",
        "seconds",
        "acked",
        "metadata_changes",
        "faults",
        "flips",
        "back_in_sync_after_healing",
    ):
        print(f"{name.replace('_', ' ') + ':':32}{found[name]}")
    for stream, of_stream in found["streams"].items():
        for name, figure in of_stream.items():
            print(f"{stream + ' ' + name.replace('_', ' ') + ':':32}{figure}")
    for one in found["violations"]:
        print(f"VIOLATION of {one['promise']}: {one['text']}")
    print("violations:".ljust(32) + str(len(found["violations"])))


def _draw(path: Path, found: dict[str, Any], streams: list[History]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (rate, isr) = pyplot.subplots(
        2, 1, sharex=True, figsize=(16, 7), height_ratios=(3, 1), layout="constrained"
    )
    last_s, top = found["seconds"], 1.0
    for history in streams:
        acks = [acked - history.started_s for one in history.published for acked in one.acked_s if acked is not None]
        bins = [at * _BIN_S for at in range(int(max([*acks, last_s]) / _BIN_S) + 2)]
        counts = Counter(int(ack / _BIN_S) for ack in acks)
        rate.plot(bins, [counts[at] / _BIN_S for at in range(len(bins))], linewidth=1, label=history.stream)
        top = max(top, max(counts.values(), default=1) / _BIN_S)
        at_s = [one.at_s - history.started_s for one in history.samples]
        isr.step(at_s, [one.isr for one in history.samples], where="post")
    rate.legend(loc="upper right")
    rate.set_ylabel("acked messages a second")
    rate.set_title(f"seed {found['seed']}: {found['acked']:,} acked, {len(found['violations'])} violations")
    for number, fault in enumerate(found["timeline"]):
        end_s = fault["healed_s"] or last_s
        color = f"C{sorted(found['faults']).index(fault['kind']) % 10}"
        rate.axvspan(fault["began_s"], max(end_s, fault["began_s"] + 0.3), alpha=0.2, color=color, linewidth=0)
        rate.text(
            fault["began_s"], top * (0.98 - 0.09 * (number % 4)), fault["kind"], fontsize=7, rotation=20, va="top"
        )
    isr.set(ylabel="ISR size", xlabel="seconds", ylim=(0, found["brokers"] + 0.3))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
