"""The tasks of the metadata leader: it collects reports, decides, and promotes learners to voters.

Theory of operation. Every broker runs this; it does something only while it leads. A new term begins with a new
`Controller`, which does not have earlier reports: brokers report again within half a second.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

import msgspec

from natslog.cluster.commands import BackgroundCommand, FinishMoves, ForgetBroker
from natslog.cluster.controller import Controller
from natslog.cluster.incarnations import is_life
from natslog.consensus import Member
from natslog.errors import NatslogError
from natslog.log_events import event
from natslog.model import BrokerId, Epoch, StreamId
from natslog.node.clock import monotonic_ms
from natslog.node.cluster_clock import ClusterClock
from natslog.node.metadata.group import SESSION_TICKS, TICK_S, MetadataGroup
from natslog.node.peers.messages import TransferLeadership

logger = logging.getLogger("natslog.cluster")

_MOST_VOTERS = 7
_FIRST_PAUSE_MS, _LONGEST_PAUSE_MS = 200.0, 10_000.0


class Repeats:
    """Proposes a decision again only where it was not applied: the first time after 0.2 s, then with increasing
    intervals.

    A decision that the state machine refuses leaves the state as it was, and is made again at every tick.
    """

    def __init__(self) -> None:
        self._version = -1
        self._proposed: dict[BackgroundCommand, tuple[float, float]] = {}  # when it is due again, after which pause

    def due(self, commands: Iterable[BackgroundCommand], version: int, now_ms: float) -> list[BackgroundCommand]:
        """Args: version: of the state that the decisions were made for."""
        if version != self._version:
            self._version, self._proposed = version, {}
        found = []
        for command in commands:
            what = msgspec.structs.replace(command, moved_us=0) if isinstance(command, FinishMoves) else command
            due_ms, pause_ms = self._proposed.get(what, (now_ms, _FIRST_PAUSE_MS / 2))
            if now_ms >= due_ms:
                pause_ms = min(2 * pause_ms, _LONGEST_PAUSE_MS)
                self._proposed[what] = (now_ms + pause_ms, pause_ms)
                found.append(command)
        return found


class MetadataLeading:
    """Args: `request_transfer`: sends the frame to the broker that leads the streams in it.

    Attributes:
        lives: the incarnation that each broker last sent, with its nonce.
    """

    def __init__(
        self,
        group: MetadataGroup,
        clock: ClusterClock,
        request_transfer: Callable[[BrokerId, TransferLeadership], None],
    ) -> None:
        self.lives: dict[BrokerId, str] = {}
        self._group, self._clock = group, clock
        self._request_transfer = request_transfer
        self._of_term = -1
        self._controller: Controller | None = None
        self._repeats = Repeats()

    def _controller_now(self) -> Controller | None:
        """Of the present term; None where another broker leads the metadata."""
        term = self._group.raft.term
        if not self._group.is_leader:
            return None
        if self._controller is None or self._of_term != term:
            self._controller, self._of_term, self._repeats = Controller(monotonic_ms()), term, Repeats()
        return self._controller

    def _alive(self) -> set[BrokerId]:
        """Of the metadata leader: registered brokers that have a session, in the life that is registered."""
        active = self._group.raft.active_within(SESSION_TICKS)
        known = self._group.state.brokers
        return {one for one in active if one in known and is_life(known[one].incarnation, self.lives.get(one, ""))}

    def sessions(self) -> set[BrokerId] | None:
        """The brokers that have a session; None where this is not the metadata leader, or has not been for long."""
        if (controller := self._controller_now()) is None:
            return None
        alive = self._alive()
        all_are = len(alive) == len(self._group.state.brokers)
        return alive if all_are or controller.has_waited_for_brokers(monotonic_ms()) else None

    # ---- reports ----

    def reported_unresponsive(self, by: BrokerId, replicas: Iterable[tuple[StreamId, Epoch]]) -> None:
        if (controller := self._controller_now()) is not None:
            for stream_id, epoch in replicas:
                controller.reported_unresponsive(stream_id, epoch, by, monotonic_ms())

    def reported_position(self, by: BrokerId, positions: Iterable[tuple[StreamId, int, Epoch, int]]) -> None:
        if (controller := self._controller_now()) is not None:
            for stream_id, version, last_epoch, end in positions:
                controller.reported_position(stream_id, version, by, last_epoch, end, monotonic_ms())

    def reported_nats(self, by: BrokerId, reaches_nats: bool) -> None:
        if (controller := self._controller_now()) is not None:
            controller.reported_nats(by, reaches_nats, monotonic_ms())

    # ---- decisions ----

    async def run(self) -> None:
        """Decides again at every tick."""
        while True:
            await asyncio.sleep(TICK_S)
            if (controller := self._controller_now()) is not None:
                await self._decide(controller)

    async def _decide(self, controller: Controller) -> None:
        state, alive = self._group.state, self._alive()
        decisions = controller.decide(state, alive, monotonic_ms(), self._clock.latest_us())
        commands = [*decisions.commands, *self._removed_brokers()]
        for command in self._repeats.due(commands, state.version, monotonic_ms()):
            self._group.submit(command)
        for transfer in decisions.transfers:
            self._request_transfer(transfer.leader, TransferLeadership(((transfer.stream_id, transfer.to),)))
        await self._promote_learners()

    def _removed_brokers(self) -> list[ForgetBroker]:
        """Brokers that are not members any more and hold no replica: they were removed while they held some."""
        state, members = self._group.state, {member.id for member in self._group.raft.membership.members}
        removed = set(state.brokers) - members
        if removed:
            removed.difference_update(*(record.replicas for record in state.streams.values()))
        return [ForgetBroker(broker=broker) for broker in sorted(removed)]

    async def _promote_learners(self) -> None:
        raft = self._group.raft
        for member in raft.membership.members:
            caught_up = raft.match_of(member.id) >= raft.commit and member.id in self._group.state.brokers
            if not member.is_voter and caught_up and len(raft.membership.voters) < _MOST_VOTERS:
                await self._promote(msgspec.structs.replace(member, is_voter=True))
                return

    async def _promote(self, member: Member) -> None:
        try:
            await self._group.change_members(lambda membership: membership.with_member(member))
            logger.info(
                "broker %d has caught up and is now a voter", member.id, extra=event("broker.voter", peer=member.id)
            )
        except NatslogError as error:
            logger.info(
                "broker %d is not a voter yet: %s",
                member.id,
                error.message,
                extra=event("broker_not_voter", peer=member.id, reason=error.code),
            )
