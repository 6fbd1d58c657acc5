"""Plans that need the leaders of other brokers: one that is older, one that does not answer."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from natslog.errors import BrokerUnavailable, CorruptLog, NatslogError, NotFound
from natslog.node.replicas.read_plans import ReadPlans, Unstated
from natslog.planning import AskedPlan, PlannedStream

RECORD: Any = SimpleNamespace(name="orders", id="a", leader=2)


class Link:
    """Of a broker that answers so, one answer after the other."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.asked = list(answers), list[str]()

    async def ask(self, what: str, timeout_s: float, **arguments: Any) -> Any:
        self.asked.append(what)
        answer = self.answers.pop(0)
        if isinstance(answer, NatslogError):
            raise answer
        return {"orders": answer}


def plans_of(link: Link) -> ReadPlans:
    cluster: Any = SimpleNamespace(me=1, link_to=lambda leader: link if leader == 2 else None)
    return ReadPlans(cluster, SimpleNamespace(), ThreadPoolExecutor(1))  # type: ignore[arg-type]


def stated(**fields: Any) -> dict[str, Any]:
    stream = PlannedStream(id="a", leader_epoch=1, log_start_offset=0, high_watermark=9, end=9, rows=9)
    return {"stream": {name: getattr(stream, name) for name in stream.__struct_fields__} | fields, "bytes": 90}


def test_all_that_waits_is_planned_with_one_request_to_its_leader() -> None:
    link = Link(stated())
    plan = asyncio.run(plans_of(link).plan([RECORD], AskedPlan()))
    (((part,),),) = [plan.tasks]
    assert (part.start, part.end, part.rows, part.bytes) == (0, 9, 9, 90)
    assert link.asked == ["read_places"]


def test_what_a_limit_allows_is_cut_by_the_leader() -> None:
    link = Link(stated(), {"parts": [{"start": 0, "end": 4, "rows": 3, "bytes": 30}]})
    asked = AskedPlan()
    asked.limits.max_rows = 3
    plan = asyncio.run(plans_of(link).plan([RECORD], asked))
    assert link.asked == ["read_places", "read_cuts"]
    assert (plan.streams["orders"].end, plan.streams["orders"].rows) == (4, 9)


def test_older_leader_is_asked_once_and_the_reader_plans_by_itself() -> None:
    link = Link(NatslogError("read_places: KeyError('read_places')"))
    plans = plans_of(link)
    for _ in range(3):
        with pytest.raises(NotFound, match="broker 2 is of an older version"):
            asyncio.run(plans.plan([RECORD], AskedPlan()))
    assert link.asked == ["read_places"]


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (BrokerUnavailable("no answer"), Unstated),
        (CorruptLog("damaged"), CorruptLog),
        (NatslogError("bug"), NatslogError),
    ],
)
def test_leader_that_does_not_answer_or_refuses(answer: NatslogError, error: type[Exception]) -> None:
    with pytest.raises(error):
        asyncio.run(plans_of(Link(answer)).plan([RECORD], AskedPlan()))
