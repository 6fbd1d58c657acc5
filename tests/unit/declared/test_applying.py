"""The order in which a plan is applied, and where it ends."""

from __future__ import annotations

import time
from typing import Any

import pytest

from natslog.client import NatslogClient
from natslog.declared.applying import apply_plan
from natslog.declared.plan import Planned
from natslog.errors import BrokerUnavailable, NatslogError


class Recording(NatslogClient):
    """Sends nothing. Creating the first stream raises `failure`."""

    def __init__(self, failure: BaseException | None) -> None:
        super().__init__("http://127.0.0.1:1")
        self.failure, self.calls = failure, list[str]()

    def create_stream(self, name: str, subject: Any, **settings: Any) -> dict[str, Any]:
        self.calls.append(f"create {name}")
        if name == "s000" and self.failure is not None:
            raise self.failure
        time.sleep(0.002)
        return {}

    def delete_stream(self, name: str, **condition: Any) -> None:
        self.calls.append(f"delete {name}")


def steps(count: int, *more: Planned) -> list[Planned]:
    created = (f"s{at:03}" for at in range(count))
    changes = [Planned(stream=name, action="create", requests=({"subject": name},)) for name in created]
    return [*more, *changes, Planned(stream="old", action="delete")]


def test_streams_are_deleted_last() -> None:
    client = Recording(None)
    outcomes = apply_plan(client, steps(20, Planned(stream="kept", action="protected", reason="why")))
    assert client.calls[-1] == "delete old"
    assert {one.stream: one.outcome for one in outcomes if one.outcome != "done"} == {"kept": "failed"}
    assert len(outcomes) == 22


@pytest.mark.parametrize("more", [(), (Planned(stream="no", action="refused", reason="why"),)])
def test_nothing_is_deleted_after_a_failure_or_a_refusal(more: tuple[Planned, ...]) -> None:
    client = Recording(None if more else NatslogError("no"))
    outcomes = {one.stream: one.outcome for one in apply_plan(client, steps(3, *more))}
    assert (outcomes["old"], outcomes["s002"]) == ("skipped", "done")
    assert "delete old" not in client.calls


def test_the_rest_is_not_tried_when_no_broker_responds() -> None:
    client = Recording(BrokerUnavailable("none"))
    outcomes = apply_plan(client, steps(300))
    assert len(client.calls) < 200
    assert {one.outcome for one in outcomes[-5:]} == {"skipped"}


def test_an_interrupt_ends_what_is_queued() -> None:
    client = Recording(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        apply_plan(client, steps(300))
    assert len(client.calls) < 200
