"""Events that follow from commands of the metadata: what changed, who requested it, and from where."""

from __future__ import annotations

import re

import msgspec

from natslog.cluster.activity import KINDS, Activity, Before, is_silent, schema
from natslog.cluster.commands import (
    AppointLeaders,
    Appointment,
    BrokerRecord,
    ChangeIsrs,
    Command,
    CreateStream,
    DeleteStream,
    DrainBroker,
    EditStream,
    FinalizeUpgrade,
    ForgetBroker,
    IsrChange,
    MoveReplicas,
    PauseStream,
    Proposal,
    PurgeStream,
    RegisterBroker,
    SealStream,
    SetCursor,
)
from natslog.cluster.metadata import Metadata
from natslog.cluster.security_commands import CreateToken, EnableSecurity
from natslog.model import StreamSettings
from natslog.security.records import TokenRecord
from natslog.times import format_timestamp_us
from tests.pages import PAGES


def create(name: str = "orders", placement: tuple[int, ...] = (1, 2)) -> CreateStream:
    settings = StreamSettings(subject="orders.>", replicas=len(placement))
    return CreateStream(name=name, id=f"id-{name}", settings=settings, created_us=1, placement=placement)  # type: ignore[arg-type]


def register(number: int, life: int = 1) -> RegisterBroker:
    broker = BrokerRecord(id=number, url=f"http://b{number}", directory=f"d{number}", life=life, nonce=f"n{life}")  # type: ignore[arg-type]
    return RegisterBroker(broker=broker, lives=tuple(f"d{number}.{one}.n{one}" for one in range(1, life + 1)))


def applied(state: Metadata, command: Command, **origin: str) -> list[Activity]:
    """The events of a command."""
    proposal = Proposal(id=f"request {state.version}", command=command, **origin)
    before = Before(state, proposal)
    state.apply(command)
    time = format_timestamp_us(0)
    return [msgspec.convert({"id": "1", "time": time} | fields, Activity) for fields in before.compare(state)]


def kinds(events: list[Activity]) -> list[str]:
    return [event.event.removeprefix("activity.") for event in events]


def filled(*commands: Command) -> Metadata:
    state = Metadata(cluster_id="c", feature_level=2)
    for command in commands:
        state.apply(command)
    return state


def test_created_stream_is_one_event_with_who_and_from_where() -> None:
    (event,) = applied(filled(), create(), client="alice", address="10.0.0.7")
    assert (event.event, event.stream, event.stream_id) == ("activity.stream.created", "orders", "id-orders")
    assert (event.identity, event.address, event.request, event.cluster) == ("alice", "10.0.0.7", "request 0", "c")
    assert event.after["settings"]["subject"] == "orders.>"
    assert event.key == "orders"


def test_request_without_security_has_an_address_and_no_identity() -> None:
    (event,) = applied(filled(), create(), client="10.0.0.7", address="10.0.0.7")
    assert (event.identity, event.address) == (None, "10.0.0.7")


def test_decision_of_a_broker_has_no_origin() -> None:
    (event,) = applied(filled(), create(), client="broker 2")
    assert (event.identity, event.address, event.request) == (None, None, None)


def test_edit_names_only_the_settings_that_changed() -> None:
    settings = StreamSettings(subject="orders.>", replicas=2, max_bytes=7)
    (event,) = applied(filled(create()), EditStream(name="orders", settings=settings, changed=("max_bytes",)))
    assert (event.event, event.before, event.after) == (
        "activity.stream.edited",
        {"max_bytes": None},
        {"max_bytes": 7},
    )


def test_each_change_of_a_stream_is_its_own_kind() -> None:
    state = filled(create())
    stream_id = state.streams["orders"].id
    found = [
        *kinds(applied(state, PauseStream(name="orders", paused=True))),
        *kinds(applied(state, PauseStream(name="orders", paused=True))),  # nothing changes
        *kinds(applied(state, PauseStream(name="orders", paused=False))),
        *kinds(applied(state, PurgeStream(name="orders", id=stream_id, below=5))),  # type: ignore[arg-type]
        *kinds(applied(state, SealStream(name="orders"))),
        *kinds(applied(state, DeleteStream(name="orders", deleted_us=1))),
    ]
    assert found == [f"stream.{what}" for what in ("paused", "resumed", "purged", "sealed", "deleted")]


def test_leader_isr_and_replicas_are_events_with_both_values() -> None:
    state = filled(register(1), register(2), register(3), create())
    record = state.streams["orders"]
    lost = IsrChange(stream_id=record.id, epoch=record.leader_epoch, version=0, isr=(1,), incarnations=("",))  # type: ignore[arg-type]
    (isr,) = applied(state, ChangeIsrs(broker=1, changes=(lost,)))  # type: ignore[arg-type]
    assert (isr.event, isr.before, isr.after) == ("activity.stream.isr", {"isr": (1, 2)}, {"isr": (1,)})
    record = state.streams["orders"]
    appointment = Appointment(stream_id=record.id, version=record.version, leader=1, isr=(1,))  # type: ignore[arg-type]
    (leader,) = applied(state, AppointLeaders(appointments=(appointment,)))
    assert leader.event == "activity.stream.leader"
    assert leader.after == {"leader": 1, "leader_epoch": 2}
    (moved,) = applied(state, MoveReplicas(name="orders", target=(1, 3)))  # type: ignore[arg-type]
    assert (moved.event, moved.after["target"]) == ("activity.stream.replicas", (1, 3))


def test_broker_joins_starts_again_drains_and_leaves() -> None:
    state = filled(register(1))
    assert kinds(applied(state, register(2))) == ["broker.joined", "broker.started"]
    assert kinds(applied(state, register(2, life=2))) == ["broker.started"]
    (draining,) = applied(state, DrainBroker(broker=2, is_draining=True))  # type: ignore[arg-type]
    assert (draining.event, draining.key, draining.after) == ("activity.broker.draining", "2", {"draining": True})
    assert kinds(applied(state, ForgetBroker(broker=2))) == ["broker.left"]  # type: ignore[arg-type]


def test_broker_that_restarts_uncleanly_loses_the_leadership_in_the_same_command() -> None:
    state = filled(register(1), register(2), create())
    assert kinds(applied(state, register(1, life=2))) == ["stream.leader", "broker.started"]


def test_upgrade_is_an_event() -> None:
    state = Metadata(cluster_id="c", feature_level=2)
    (event,) = applied(state, FinalizeUpgrade(level=3))
    assert (event.event, event.before, event.after) == ("activity.cluster.upgraded", {"level": 2}, {"level": 3})


def test_event_of_a_token_does_not_contain_its_digest() -> None:
    token = TokenRecord(id="t1", identity="alice", digest="d" * 64, created_us=1)
    state = filled(EnableSecurity(token=token))
    other = msgspec.structs.replace(token, id="t2")
    (event,) = applied(state, CreateToken(token=other, roles=("reader",)), client="root", address="::1")
    assert event.event == "activity.security.changed"
    assert (event.after["change"], event.after["token"]["id"], event.after["roles"]) == (
        "CreateToken",
        "t2",
        ("reader",),
    )
    assert "d" * 64 not in msgspec.json.encode(event).decode()


def test_cursors_are_no_events() -> None:
    assert is_silent(SetCursor(consumer="a", stream="b", stream_id="c", offset=1, set_us=1))  # type: ignore[arg-type]
    assert not is_silent(create())


def test_schema_names_every_kind_and_field() -> None:
    (definition,) = schema()["$defs"].values()
    assert set(definition["properties"]) == set(Activity.__struct_fields__)
    assert definition["properties"]["event"]["enum"] == sorted(KINDS)


def test_page_has_every_field_of_the_schema_and_every_kind() -> None:
    table, _, fields = PAGES["ACTIVITY.md"].read_text().partition("## Guarantees")
    rows = re.findall(r"^\| (`.*`) \| (\w+) \|", fields, re.MULTILINE)
    listed = {name: kind for names, kind in rows for name in re.findall(r"`(\w+)`", names)}
    (definition,) = schema()["$defs"].values()
    types = {name: one.get("anyOf", [one])[0].get("type", "string") for name, one in definition["properties"].items()}
    assert listed == types
    for kind in KINDS:
        group, last = kind.rsplit(".", 1)
        assert f"`{kind}`" in table or (f"`{group}." in table and f"`.{last}`" in table), kind
