"""The promises of docs/design FAULTS, each judged on a history and on what the replicas hold in the end.

`check_all` calls the rest; each returns what it found broken, and nothing where the promise was kept.
"""

from __future__ import annotations

import statistics
import subprocess
import time
from bisect import bisect_left, bisect_right
from collections.abc import Collection
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from natslog.arrow import ipc
from natslog.arrow.schema import COLUMNS, MESSAGE_SCHEMA
from natslog.errors import NatslogError
from natslog.log import LogOptions, StreamLog
from natslog.log.verify import check_file, files_of
from natslog.model import StreamSettings
from natslog.node.data_dir import stream_id_of
from tests.chaos.history import FaultEvent, History, Published, Violation, name_of
from tests.chaos.linearizable import by_name, is_linearizable
from tests.cluster_harness import Cluster, ClusterBroker
from tests.harness import stream_folder

_NAMED = 5
_SERVES_WITHIN_S = 30.0
_ORDERLY_FOR_S = 4.0


@dataclass(frozen=True, slots=True)
class Copy:
    """What one replica holds of the stream; `where` says how it was read."""

    broker: int
    where: str
    rows: Any  # pa.Table of MESSAGE_SCHEMA

    @property
    def name(self) -> str:
        return f"broker {self.broker} ({self.where})"

    def offsets(self) -> list[int]:
        return list(self.rows.column("offset").to_pylist())

    def values(self) -> list[bytes]:
        return list(self.rows.column("value").to_pylist())


# ---- reading the replicas ----


def served_copy(broker: ClusterBroker, stream: str, within_s: float = _SERVES_WITHIN_S) -> Copy:
    """Through this broker's own HTTP, without following a redirect, up to its own high watermark.

    A replica that finds damage as it is read redirects readers and is repaired: it has `within_s` for that.

    Raises:
        AssertionError: it does not serve.
    """
    tables, start = [MESSAGE_SCHEMA.empty_table()], 0
    deadline = time.monotonic() + within_s
    while True:
        end = broker.high_watermark(stream) or 0  # where it ends for all, its leader alone says
        path = f"/v1/streams/{stream}/messages?start={start}&end={end}&columns={','.join(COLUMNS)}"
        answer = broker.ask("GET", path, timeout_s=30)
        if answer is None or answer.status != 200:
            said = "nothing" if answer is None else f"{answer.status} {answer.data[:300]!r}"
            assert time.monotonic() < deadline, f"broker {broker.number} at offset {start}: {said}"
            time.sleep(0.2)
            continue
        following = int(answer.headers["Natslog-Next-Offset"])
        if following == start:
            return Copy(broker.number, "served", pa.concat_tables(tables))
        tables.append(pa.ipc.open_stream(answer.data).read_all())
        start = following


def stored_copy(broker: ClusterBroker, stream_id: str) -> Copy:
    """From the files of a broker that is stopped, by the log's own reader."""
    folder = stream_folder(broker.folder, stream_id)
    log = StreamLog(folder, stream_id, StreamSettings(subject=">"), LogOptions(min_free_bytes=0))
    with closing(log):  # also where it is damaged: an open file keeps the disk from being unmounted
        log.chain.committed = log.log_end_offset
        tables, start = [MESSAGE_SCHEMA.empty_table()], log.log_start_offset
        while start < log.log_end_offset:
            with log.reader.plan_read(start, max_bytes=8 * 1024 * 1024) as plan:
                tables += [pa.Table.from_batches([ipc.decode_batch(message)]) for message in plan.messages()]
                start = plan.next_offset
    return Copy(broker.number, "stored", pa.concat_tables(tables))


def check_files(folder: Path, broker: int, left: set[str]) -> list[Violation]:
    """Every CRC, as `natslog verify` does.

    Args:
        left: streams that this broker is no replica of any more: what is left of them is deleted later, and not
            repaired before.
    """
    paths = [
        path for path in files_of(folder) if ".damaged-" not in str(path) and stream_id_of(path.parent) not in left
    ]
    reports = [check_file(path) for path in paths]
    return [
        Violation("2 one history", f"broker {broker}: {report.file}: {'; '.join(report.problems)}")
        for report in reports
        if report.problems
    ]


# ---- judging ----


def check_no_acked_loss(history: History, copies: list[Copy]) -> list[Violation]:
    """Every acked message is on every copy; where its ack named an offset, there."""
    found = []
    for copy in copies:
        offsets_of: dict[tuple[int, int], list[int]] = {}
        for offset, value in zip(copy.offsets(), copy.values(), strict=True):
            offsets_of.setdefault(name_of(value), []).append(offset)
        for one in history.published:
            lost = [
                at for at, acked in enumerate(one.acked_s) if acked is not None and (one.number, at) not in offsets_of
            ]
            if lost:
                when = one.acked_s[lost[0]] or 0.0
                found.append(
                    Violation(
                        "1 no acked loss",
                        f"{copy.name}: {len(lost)} acked messages of publisher {one.number} are missing, the first is "
                        f"{lost[0]}, acked at {when - history.started_s:.2f} s (offset {one.acked_offset[lost[0]]})",
                    )
                )
            elsewhere = [
                at
                for at, offset in enumerate(one.acked_offset)
                if offset >= 0 and offset not in offsets_of.get((one.number, at), [offset])
            ]
            if elsewhere:
                found.append(
                    Violation(
                        "2 one history",
                        f"{copy.name}: {len(elsewhere)} messages of publisher {one.number} are not where their acks "
                        f"say: message {elsewhere[0]}, offset {one.acked_offset[elsewhere[0]]}",
                    )
                )
    return found


def check_stored_once(history: History, copy: Copy) -> list[Violation]:
    """No message id is stored twice."""
    with_ids = {one.number for one in history.published if one.has_ids}
    seen: dict[tuple[int, int], int] = {}
    twice = []
    for offset, value in zip(copy.offsets(), copy.values(), strict=True):
        name = name_of(value)
        if name[0] in with_ids and seen.setdefault(name, offset) != offset:
            twice.append((name, seen[name], offset))
    if not twice:
        return []
    (publisher, number), first, second = twice[0]
    sent = history.published[publisher].sent_s[number] - history.started_s
    text = f"{copy.name}: {len(twice)} ids are stored twice, the first: publisher {publisher}, message {number}, sent "
    return [Violation("3 once", text + f"at {sent:.2f} s, at offsets {first} and {second}")]


def duplicates_without_ids(history: History, copy: Copy) -> int:
    """Allowed, and counted: two leaders received the same message during a change of leaders."""
    without = {one.number for one in history.published if not one.has_ids}
    names = [name for value in copy.values() if (name := name_of(value))[0] in without]
    return len(names) - len(set(names))


def check_order(history: History, copy: Copy) -> list[Violation]:
    """Whatever was acked before another was sent lies before it; a batch sent once, in one go, lies in its order."""
    names = [name_of(value) for value in copy.values()]
    offsets = copy.offsets()
    found = []
    least_acked_s = float("inf")  # of all at higher offsets
    at_least = -1
    seen: set[tuple[int, int]] = set()
    first_places = [place for place, name in enumerate(names) if not (name in seen or seen.add(name))]  # type: ignore[func-returns-value]
    for place in reversed(first_places):
        one, number = history.published[names[place][0]], names[place][1]
        if least_acked_s < one.sent_s[number]:
            found.append(
                Violation(
                    "3 order",
                    f"{copy.name}: offset {offsets[place]} was sent at {one.sent_s[number] - history.started_s:.3f} s, "
                    f"after offset {at_least} had been acked at {least_acked_s - history.started_s:.3f} s",
                )
            )
        acked_s = one.acked_s[number]
        if acked_s is not None and acked_s < least_acked_s:
            least_acked_s, at_least = acked_s, offsets[place]
    return found[:_NAMED] + _check_batches(history, copy, [names[place] for place in first_places])


def _check_batches(history: History, copy: Copy, names: list[tuple[int, int]]) -> list[Violation]:
    last: dict[int, int] = {}
    for publisher, number in names:
        one = history.published[publisher]
        before = last.get(publisher, -1)
        if one.has_ids and number < before and one.batch[number] == one.batch[before] >= 0:
            text = f"{copy.name}: publisher {publisher}: message {before} lies before {number}, sent once in one batch"
            return [Violation("3 order", text)]
        last[publisher] = number
    return []


def check_dense(copies: list[Copy]) -> list[Violation]:
    found = []
    for copy in copies:
        offsets = copy.offsets()
        if offsets and offsets != list(range(offsets[0], offsets[0] + len(offsets))):
            found.append(Violation("2 one history", f"{copy.name}: offsets are not dense"))
    return found


def check_same(copies: list[Copy]) -> list[Violation]:
    """All columns, offset by offset, as far as two copies both reach."""
    found = []
    first = copies[0]
    for other in copies[1:]:
        start = max(one.offsets()[0] if one.rows.num_rows else 0 for one in (first, other))
        end = min(one.offsets()[-1] + 1 if one.rows.num_rows else 0 for one in (first, other))
        parts = [_between(one.rows, start, end) for one in (first, other)]
        if not parts[0].equals(parts[1]):
            rows = [part.to_pylist() for part in parts]
            apart = next(at for at, pair in enumerate(zip(*rows, strict=True)) if pair[0] != pair[1])
            text = f"{first.name} and {other.name} differ from offset {start + apart} on: "
            found.append(Violation("2 one history", text + f"{rows[0][apart]!r} and {rows[1][apart]!r}"))
    return found


def _between(rows: Any, start: int, end: int) -> Any:
    offsets = rows.column("offset")
    chosen = rows.filter(pc.and_(pc.greater_equal(offsets, start), pc.less(offsets, end)))
    return chosen.combine_chunks()


def check_same_end(copies: list[Copy]) -> list[Violation]:
    """When all is in sync and quiet, all have all."""
    sizes = {copy.name: copy.rows.num_rows for copy in copies}
    return (
        [Violation("2 one history", f"replicas in sync differ in length: {sizes}")]
        if len(set(sizes.values())) > 1
        else []
    )


def check_reads_stay(history: History, copy: Copy) -> list[Violation]:
    final = {offset: hash(value) for offset, value in zip(copy.offsets(), copy.values(), strict=True)}
    gone = [offset for offset, known in history.read.items() if final.get(offset) != known]
    if not gone:
        return []
    return [
        Violation("4 what was read stays", f"{len(gone)} offsets read otherwise in the end, the first is {min(gone)}")
    ]


def check_followed(history: History, copy: Copy) -> list[Violation]:
    """Each reader that is bound to a broker has come to the end."""
    end = copy.offsets()[-1] + 1 if copy.rows.num_rows else 0
    return [
        Violation("4 once and in order", f"the reader at broker {one.broker} came to {one.next_offset} of {end}")
        for one in history.followed
        if one.next_offset != end
    ]


def check_metadata(history: History) -> list[Violation]:
    found = []
    for name, changes in by_name(history.changes).items():
        if is_linearizable(changes) is False:
            lines = [
                f"{one.began_s - history.started_s:.3f}–{one.ended_s - history.started_s:.3f} broker {one.broker} "
                f"{one.kind}: {one.outcome}"
                for one in sorted(changes, key=lambda one: one.began_s)
            ]
            found.append(Violation("7 linearizable", f"no order explains {name}: " + "; ".join(lines)))
    return found


# ---- back in time ----


def seconds_to_resume(fault: FaultEvent, one: Published, until_s: float) -> float | None:
    """How long messages of this publisher found no ack because of the fault.

    The longest time without an ack, counted from the fault's begin (or, where it left no majority, from its healing)
    to the first ack once all was in sync; what the next fault, at `until_s`, adds to it is not counted. None where
    nothing was sent.
    """
    start = fault.began_s if fault.keeps_majority else (fault.healed_s or fault.began_s)
    end = min(until_s, (fault.in_sync_s or fault.healed_s or fault.began_s) + 1.0)
    if start >= until_s or bisect_left(one.sent_s, start) == len(one.sent_s):
        return None
    acks = sorted(acked for acked in one.acked_s if acked is not None)
    following = acks[bisect_right(acks, end) : bisect_right(acks, end) + 1]
    last = min([*following, max(until_s, end)]) if following or until_s < float("inf") else max(end, start)
    broken = [at for at in fault.broken_s if start < at < last]
    times = sorted([start, *broken, *acks[bisect_left(acks, start) : bisect_right(acks, end)], last])
    return max(later - earlier for earlier, later in zip(times, times[1:], strict=False))


def resume_times(history: History) -> list[tuple[FaultEvent, float]]:
    """Of every fault, as the probe saw it (the publisher without ids)."""
    probes = [one for one in history.published if not one.has_ids]
    following = [fault.began_s for fault in history.faults[1:]] + [float("inf")]
    found = []
    for fault, next_s in zip(history.faults, following, strict=False):
        times = [
            time for one in probes if (time := seconds_to_resume(fault, one, max(next_s, fault.began_s))) is not None
        ]
        if times:
            found.append((fault, max(times)))
    return found


def goes_on(hit: Collection[int], brokers: int, replicas: Collection[int], min_isr: int) -> bool:
    """Whether a majority of the brokers and `min_isr` replicas of a stream are whole and connected, but for those hit.

    Where it is False, a stream that stops until they are healed breaks no promise.
    """
    return 2 * (brokers - len(set(hit))) > brokers and len(set(replicas) - set(hit)) >= min_isr


def check_resumed(history: History, within_s: float) -> list[Violation]:
    return [
        Violation(
            "6 back in time", f"{fault.kind} {fault.place} at {fault.began_s - history.started_s:.1f} s: {took:.1f} s"
        )
        for fault, took in resume_times(history)
        if took > within_s
    ]


def orderly_gaps(history: History) -> list[tuple[FaultEvent, float]]:
    """Of every orderly stop: the longest time without an ack of the probe, from then on until the broker starts again,
    or some seconds later.
    """
    acks = sorted(one for probe in history.published if not probe.has_ids for one in probe.acked_s if one is not None)
    found = []
    for fault in history.faults:
        for stopped_s in fault.orderly_s:
            first = max(0, bisect_left(acks, stopped_s) - 1)
            until_s = stopped_s + _ORDERLY_FOR_S
            near = [*acks[first : bisect_right(acks, until_s)], until_s]
            gaps = [after - max(before, stopped_s) for before, after in pairwise(near)]
            found.append((fault, max(gaps, default=_ORDERLY_FOR_S)))
    return found


def check_orderly(history: History, within_s: float) -> list[Violation]:
    return [
        Violation(
            "orderly stops", f"{fault.place} at {fault.began_s - history.started_s:.1f} s: {gap:.2f} s without an ack"
        )
        for fault, gap in orderly_gaps(history)
        if gap > within_s
    ]


def check_in_sync_again(history: History, within_s: float) -> list[Violation]:
    found = []
    for fault in history.faults:
        if fault.is_awaited and fault.healed_s is not None and fault.in_sync_s is None:
            text = f"{fault.kind} {fault.place}: replicas were not all in sync within {within_s:.0f} s of the healing"
            found.append(Violation("6 back in sync", text + f" {fault.notes}"))
    return found


# ---- all of it ----


def judge(history: History, copies: list[Copy], resume_within_s: float, sync_within_s: float) -> list[Violation]:
    """Of one stream's copies that were read when all was quiet and in sync, and of the cluster."""
    return [*judge_cluster(history, sync_within_s), *judge_stream(history, copies, resume_within_s)]


def judge_cluster(history: History, sync_within_s: float) -> list[Violation]:
    return [*history.violations, *check_metadata(history), *check_in_sync_again(history, sync_within_s)]


def judge_stream(history: History, copies: list[Copy], resume_within_s: float) -> list[Violation]:
    return [
        *check_no_acked_loss(history, copies),
        *check_stored_once(history, copies[0]),
        *check_order(history, copies[0]),
        *check_dense(copies),
        *check_same_end(copies),
        *check_same(copies),
        *check_reads_stay(history, copies[0]),
        *check_followed(history, copies[0]),
        *check_resumed(history, resume_within_s),
    ]


def served_copies(cluster: Cluster, stream: str) -> tuple[list[Copy], list[Violation]]:
    """Of every replica, as its broker serves it."""
    copies: list[Copy] = []
    found: list[Violation] = []
    for broker in cluster.replicas_of(stream):
        try:
            copies.append(served_copy(broker, stream))
        except (AssertionError, ValueError) as error:
            found.append(Violation("1 no acked loss", f"{stream}: a replica does not serve: {error}"))
    return copies, found


def end_all(cluster: Cluster, holders: dict[str, list[ClusterBroker]]) -> list[Violation]:
    """All brokers are stopped gracefully, and every file is read.

    Args:
        holders: the replicas of each stream, by its id.
    """
    found = []
    for broker in cluster.brokers:
        try:
            broker.terminate()
        except (AssertionError, subprocess.TimeoutExpired) as error:
            broker.kill()
            found.append(
                Violation("5 ended by itself", f"broker {broker.number} did not end in order: {str(error)[-300:]}")
            )
    for broker in cluster.brokers:
        left = {stream_id for stream_id, brokers in holders.items() if broker not in brokers}
        found += check_files(broker.folder, broker.number, left)
    return found


def stored_copies(brokers: list[ClusterBroker], stream_id: str) -> tuple[list[Copy], list[Violation]]:
    """What the files of these brokers hold; they are stopped."""
    copies: list[Copy] = []
    found: list[Violation] = []
    for broker in brokers:
        try:
            copies.append(stored_copy(broker, stream_id))
        except (NatslogError, OSError, AssertionError) as error:
            found.append(Violation("1 no acked loss", f"broker {broker.number}'s copy cannot be read: {error}"))
    return copies, found


def lost(history: History, copies: list[Copy]) -> int:
    """Acked messages that are missing from a replica, each counted once."""
    acked = {
        (one.number, at) for one in history.published for at, acked_s in enumerate(one.acked_s) if acked_s is not None
    }
    missing: set[tuple[int, int]] = set()
    for copy in copies:
        missing |= acked - {name_of(value) for value in copy.values()}
    return len(missing)


def spread(times: list[float]) -> dict[str, float]:
    """Count, median and maximum."""
    if not times:
        return {"count": 0}
    return {"count": len(times), "median_s": round(statistics.median(times), 2), "max_s": round(max(times), 2)}
