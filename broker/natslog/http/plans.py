"""`GET /v1/cluster/plan`: the moves that would even out the loads of the brokers, or those that a drain causes. Nothing
is changed.
"""

from __future__ import annotations

from natslog.cluster.placement import Loads
from natslog.cluster.rebalancing import Load, Move, Place, Placed, loads_of, rebalanced
from natslog.errors import InvalidRequest, NotEnoughBrokers
from natslog.http.context import broker_of
from natslog.http.endpoint import Call
from natslog.http.shapes import cluster as shapes
from natslog.http.shapes.common import Answer, shape_response
from natslog.model import BrokerId
from natslog.node.broker import Broker
from natslog.node.threads import in_thread
from natslog.subjects import is_internal

_NOTHING = Load()


async def plan(call: Call[shapes.PlanFor, None]) -> Answer[shapes.Plan]:
    """The fewest moves that even out replicas, leaders and bytes of the brokers; or the moves that draining a broker
    would cause. Nothing is changed
    """
    leaving, broker = call.parameters.drain, broker_of(call.request)
    await broker.require_up_to_date()
    if leaving is not None and leaving not in broker.state.brokers:
        raise InvalidRequest(f"there is no broker {leaving}", parameter="drain")
    positions = await broker.positions.everywhere()
    sizes = {name: position["bytes"] or 0 for name, position in positions.items()}
    records = [record for name, record in sorted(broker.state.streams.items()) if not is_internal(name)]
    streams = [
        Placed(one.name, one.target or one.replicas, sizes.get(one.name, 0), frozenset(one.settings.placement_tags))
        for one in records
    ]
    if leaving is None:
        moves, problem = await in_thread(broker.readers, rebalanced, _usable(broker), streams), None
    else:
        moves, problem = _moves_off(broker, sizes, BrokerId(leaving))
    before, after = loads_of(streams), loads_of(streams, moves)
    return shape_response(
        shapes.Plan(
            moves=[shapes.PlannedMove(one.name, list(one.before), list(one.after), one.copied_bytes) for one in moves],
            under_way=sum(bool(record.target) for record in records),
            brokers=[
                _shown(number, before.get(number, _NOTHING), after.get(number, _NOTHING))
                for number in sorted(broker.state.brokers)
            ],
            problem=problem,
        )
    )


def _shown(number: BrokerId, before: Load, after: Load) -> shapes.PlannedLoad:
    return shapes.PlannedLoad(
        id=number,
        replicas=before.replicas,
        leaders=before.leaders,
        bytes=before.size_bytes,
        replicas_after=after.replicas,
        leaders_after=after.leaders,
        bytes_after=after.size_bytes,
    )


def _usable(broker: Broker) -> list[Place]:
    """Brokers that are connected and not being drained."""
    node, state = broker.cluster, broker.state
    return [
        Place(number, known.rack, frozenset(known.tags))
        for number, known in sorted(state.brokers.items())
        if not known.is_draining and node.is_connected(number)
    ]


def _moves_off(broker: Broker, sizes: dict[str, int], leaving: BrokerId) -> tuple[list[Move], str | None]:
    """As the controller will choose them, one after the other; and why the first stream cannot leave, if one cannot.
    Internal streams are moved as well, and have fewer replicas where there is no other broker.
    """
    usable = [place.id for place in _usable(broker) if place.id != leaving]
    loads, moves, problem = Loads(broker.state), [], None
    for record in list(broker.state.streams.values()):
        before = record.target or record.replicas
        if leaving not in before:
            continue
        try:
            after = loads.replace(record, leaving, usable)
        except NotEnoughBrokers as error:
            problem = problem or (None if is_internal(record.name) else error.message)
            continue
        moves.append(Move(record.name, before, after, sizes.get(record.name, 0)))
    return moves, problem
