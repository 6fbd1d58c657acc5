"""What a run found, for people and for programs: a table, a JSON file, a picture of the time that passed."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.chaos.checkers import Copy, duplicates_without_ids, resume_times, spread
from tests.chaos.history import History, Violation

_BIN_S = 0.5


def summary(seed: int, history: History, copies: list[Copy], violations: list[Violation]) -> dict[str, Any]:
    resumed = resume_times(history)
    kept = [took for fault, took in resumed if fault.keeps_majority]
    lost = [took for fault, took in resumed if not fault.keeps_majority]
    rejoined = [
        fault.in_sync_s - fault.healed_s for fault in history.faults if fault.healed_s and fault.in_sync_s is not None
    ]
    return {
        "seed": seed,
        "seconds": round((history.samples[-1].at_s if history.samples else history.started_s) - history.started_s, 1),
        "sent": sum(len(one.sent_s) for one in history.published),
        "acked": history.acked,
        "stored": copies[0].rows.num_rows if copies else None,
        "read": len(history.read),
        "requests_to_read": history.reads,
        "duplicates_without_ids": duplicates_without_ids(history, copies[0]) if copies else None,
        "elections": max((one.epoch for one in history.samples), default=1) - 1,
        "metadata_changes": dict(Counter(f"{one.kind} {one.outcome}" for one in history.changes)),
        "faults": dict(Counter(fault.kind for fault in history.faults)),
        "resume_with_majority": spread(kept),
        "resume_after_healing": spread(lost),
        "back_in_sync_after_healing": spread(rejoined),
        "violations": [asdict(one) for one in violations],
        "timeline": [
            {
                "kind": fault.kind,
                "place": fault.place,
                "began_s": round(fault.began_s - history.started_s, 2),
                "healed_s": fault.healed_s and round(fault.healed_s - history.started_s, 2),
                "in_sync_s": fault.in_sync_s and round(fault.in_sync_s - history.started_s, 2),
                "resumed_after_s": next((round(took, 2) for one, took in resumed if one is fault), None),
                "notes": fault.notes,
            }
            for fault in history.faults
        ],
        "errors": dict(history.errors.most_common(40)),
    }


def write(folder: Path, found: dict[str, Any], history: History) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(found, indent=2) + "\n")
    _draw(folder / "timeline.png", found, history)


def show(found: dict[str, Any]) -> None:
    for name in ("seed", "seconds", "sent", "acked", "stored", "read", "duplicates_without_ids", "elections",
                 "metadata_changes", "faults", "resume_with_majority", "resume_after_healing",
                 "back_in_sync_after_healing"):  # fmt: skip
        print(f"{name.replace('_', ' ') + ':':32}{found[name]}")
    for one in found["violations"]:
        print(f"VIOLATION of {one['promise']}: {one['text']}")
    print("violations:".ljust(32) + str(len(found["violations"])))


def _draw(path: Path, found: dict[str, Any], history: History) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (rate, isr) = pyplot.subplots(
        2, 1, sharex=True, figsize=(16, 7), height_ratios=(3, 1), layout="constrained"
    )
    acks = [acked - history.started_s for one in history.published for acked in one.acked_s if acked is not None]
    last_s = max([*acks, found["seconds"]])
    bins = [at * _BIN_S for at in range(int(last_s / _BIN_S) + 2)]
    counts = Counter(int(ack / _BIN_S) for ack in acks)
    rate.plot(bins, [counts[at] / _BIN_S for at in range(len(bins))], linewidth=1)
    rate.set_ylabel("acked messages a second")
    rate.set_title(f"seed {found['seed']}: {found['acked']:,} acked, {len(found['violations'])} violations")
    top = max(counts.values(), default=1) / _BIN_S
    for number, fault in enumerate(found["timeline"]):
        end_s = fault["healed_s"] or last_s
        color = f"C{sorted(found['faults']).index(fault['kind']) % 10}"
        rate.axvspan(fault["began_s"], max(end_s, fault["began_s"] + 0.3), alpha=0.2, color=color, linewidth=0)
        rate.text(
            fault["began_s"], top * (0.98 - 0.09 * (number % 4)), fault["kind"], fontsize=7, rotation=20, va="top"
        )
    samples = history.samples
    isr.step([one.at_s - history.started_s for one in samples], [one.isr for one in samples], where="post")
    isr.set(ylabel="ISR size", xlabel="seconds", ylim=(0, 3.3))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
