"""`POST /v1/plans`: what a reader at some positions reads next; see `natslog.planning`."""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import web

from natslog.http.access import require_readable, with_counts
from natslog.http.context import broker_of
from natslog.http.endpoint import Call
from natslog.http.many_streams import selected
from natslog.http.ranges import in_turn, replica_urls
from natslog.http.shapes.common import Answer, shape_response
from natslog.http.shapes.reading import AskedPositions
from natslog.http.streams import problem_of
from natslog.model import StreamRecord
from natslog.node.replicas.read_plans import Unstated
from natslog.planning import AskedPlan, ReadPlan


async def plans(call: Call[None, AskedPlan]) -> Answer[ReadPlan]:
    """What a reader at some positions reads next, within its limits: the end of each stream, what is lost, and the
    ranges of each task

    The broker has all changes to the metadata: what it does not select was not created, or is among the others.
    """
    request, asked = call.request, call.body
    which = AskedPositions(asked.streams, asked.pattern, asked.group, asked.seen, asked.wait_ms)
    records, headers = await selected(request, which)
    if not asked.with_new:
        records = [record for record in records if record.name in asked.positions or record.name in asked.ends]
    others = asked.positions.keys() - {record.name for record in records}
    await require_readable(request, others)
    try:
        plan = await broker_of(request).read_plans.plan(records, asked)
    except Unstated as error:
        problem = problem_of(broker_of(request), error.record)
        return shape_response(ReadPlan(streams={}, problem=problem), headers=headers)
    streams = broker_of(request).state.streams
    plan.others = {name: "exists" if name in streams else "deleted" for name in others}
    _show(request, plan, {record.name: record for record in records}, asked)
    return shape_response(plan, headers=headers)


def _show(request: web.Request, plan: ReadPlan, records: Mapping[str, StreamRecord], asked: AskedPlan) -> None:
    """Adds the URLs of replicas, and leaves out counts that include messages which the identity may not read."""
    broker = broker_of(request)
    urls = {name: replica_urls(broker, records[name], asked.tasks.read_from, asked.tasks.rack) for name in plan.streams}
    plan.streams = {name: with_counts(request, records[name], one) for name, one in plan.streams.items()}
    for number, task in enumerate(plan.tasks):
        for at, one in enumerate(task):
            one.urls = in_turn(urls[one.stream], number)
            task[at] = with_counts(request, records[one.stream], one)
