"""Plans of brokers, with losses that are confirmed and reported."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from natslog.client import NatslogClient
from natslog.client.confirming import confirmed
from natslog.planning import AskedPlan, PlannedStream, ReadPlan, ReadPosition, TaskLimits
from pyspark_natslog.source.confirming import newest
from pyspark_natslog.source.loss import Loss, beyond_fork, recreated, report_loss, shorter
from pyspark_natslog.source.older_brokers import plan_read
from pyspark_natslog.source.options import Cutting, SourceOptions


def planned(client: NatslogClient, asked: AskedPlan, *, ignored: Collection[str] = ()) -> ReadPlan:
    """The plan. Something that it states as lost is lost only if the newest leader has confirmed it for some time.

    Args:
        ignored: streams with a position that may be missing.

    Raises:
        NatslogError: as `NatslogClient.plan_read`.
    """
    first = [asked]

    def ask() -> ReadPlan:
        again = msgspec.structs.replace(asked, seen={}, wait_ms=0)
        plan = plan_read(client, first.pop() if first else again)
        lossy = _lossy(plan, ignored)
        for name in lossy:
            newest(client, name)  # afterwards, answers of older leaders are ignored
        return plan_read(client, again) if lossy else plan

    return confirmed(ask, lambda plan: bool(_lossy(plan, ignored)))


def _lossy(plan: ReadPlan, ignored: Collection[str]) -> list[str]:
    deleted = [name for name, state in plan.others.items() if state == "deleted" and name not in ignored]
    return [*(name for name, one in plan.streams.items() if one.lost), *deleted]


def task_limits(cutting: Cutting, cores: int) -> TaskLimits:
    """As a request has them."""
    return TaskLimits(
        cores=cores,
        min_tasks=cutting.min_tasks,
        max_rows=cutting.max_rows,
        usual_bytes=cutting.usual_bytes,
        max_bytes=cutting.max_bytes,
        read_from=cutting.read_from,
        rack=cutting.rack,
    )


def report_losses(options: SourceOptions, plan: ReadPlan, positions: Mapping[str, ReadPosition]) -> None:
    """Raises DataLoss, or logs what the plan lacks, by `failOnDataLoss`."""
    for name, position in positions.items():
        if name in plan.streams:
            for loss in _losses_of(name, plan.streams[name], position):
                report_loss(options, loss)
        elif plan.others.get(name) == "deleted":
            report_loss(options, Loss(name, position.start, position.end, "the stream was deleted"))


def _losses_of(name: str, stream: PlannedStream, position: ReadPosition) -> list[Loss]:
    found = []
    for lost in stream.lost:
        match lost.why:
            case "removed":
                found.append(Loss(name, lost.start, lost.end, "retention or a purge removed these messages"))
            case "recreated":
                found.append(recreated(name, lost.start, lost.end, was=position.id, is_now=stream.id))
            case "forked":
                found.append(beyond_fork(name, lost.end or 0, lost.start, was=position.id, is_now=stream.id))
            case "shorter":
                found.append(shorter(name, lost.start, lost.end or 0, stream.high_watermark))
    return found
