"""What the metadata leader decides from reports: the next leader when a leader has failed, the completion of moves, the
return of a stream to its preferred leader. Soft state only: a new metadata leader receives every report again.

Theory of operation. A leader has failed when it has no session with the metadata leader, when its process began a new
life, or when a majority of those who hold everything committed report it as unresponsive (no session counts as a
report). A new metadata leader has no sessions yet: until every broker has had the time to begin one, reports alone
count. The next one is a proven member of the ISR, else an eligible one; where all of them have restarted uncleanly
(power lost everywhere), the longest log of enough of them. No other broker becomes leader: the stream waits. A leader
without a working NATS connection accepts no messages: leadership is transferred to an in-sync replica that does. A
broker that stops transfers its leadership itself, and gets none.

Invariant: every decision names the version of the record that it was made for, so that an outdated one changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from natslog.cluster.commands import AppointLeaders, Appointment, BackgroundCommand, FinishMoves, MoveReplicas
from natslog.cluster.metadata import Metadata
from natslog.cluster.placement import Loads
from natslog.cluster.roles import quorum_position
from natslog.errors import NotEnoughBrokers
from natslog.model import BrokerId, Epoch, StreamId, StreamRecord, companion_id

_FIRST_REPORTS_MS = 3000.0
REPORT_HOLDS_MS = 6000.0
_POSITIONS_WAIT_MS = 1500.0
_STABLE_MS = 5000.0
_TRANSFERS_AT_ONCE = 50
_TRANSFER_AGAIN_MS = 5_000.0
_MOVES_AT_ONCE = 4
_REACHABILITY_LASTS_MS = 1500.0
_SETTLED_MS = 10_000.0
"""Longer than each of these times: by then, time alone changes no decision any more."""


@dataclass(frozen=True, slots=True)
class LeadershipTransfer:
    """A live leader is requested to transfer its leadership."""

    stream_id: StreamId
    leader: BrokerId
    to: BrokerId


@dataclass(frozen=True, slots=True)
class Decisions:
    commands: tuple[BackgroundCommand, ...] = ()
    transfers: tuple[LeadershipTransfer, ...] = ()


@dataclass(slots=True)
class _Positions:
    version: int
    since_ms: float
    known: dict[BrokerId, tuple[Epoch, int]] = field(default_factory=dict)


class Controller:
    """One per term as metadata leader. Times are of a clock that never jumps."""

    def __init__(self, now_ms: float) -> None:
        self._unresponsive: dict[StreamId, tuple[Epoch, dict[BrokerId, float]]] = {}
        self._positions: dict[StreamId, _Positions] = {}
        self._alive: frozenset[BrokerId] = frozenset()
        self._changed_ms = self._began_ms = now_ms
        self._transferred_ms: dict[StreamId, float] = {}
        self._reaches_nats: dict[BrokerId, tuple[bool, float]] = {}  # as reported, and since when
        self._decided_for: tuple[int, frozenset[BrokerId]] | None = None  # version of the state, brokers alive
        self._news_ms = now_ms
        self._is_quiescent = False

    def has_waited_for_brokers(self, now_ms: float) -> bool:
        """Whether every broker has had the time to report since this one leads."""
        return now_ms - self._began_ms >= _FIRST_REPORTS_MS

    # ---- reports ----

    def reported_unresponsive(self, stream_id: StreamId, epoch: Epoch, by: BrokerId, now_ms: float) -> None:
        """A replica has received no answer from the leader of this epoch for a while."""
        self._note_news(now_ms)
        known_epoch, reports = self._unresponsive.get(stream_id, (epoch, {}))
        if epoch > known_epoch:
            reports = {}
        if epoch >= known_epoch:
            reports[by] = now_ms
            self._unresponsive[stream_id] = (epoch, reports)

    def reported_position(
        self, stream_id: StreamId, version: int, by: BrokerId, last_epoch: Epoch, end_offset: int, now_ms: float
    ) -> None:
        """Where the log of a replica ends that restarted uncleanly; it stays so until a leader is appointed. Companion
        logs are reported by their own ids (`companion_id`).
        """
        self._note_news(now_ms)
        known = self._positions.get(stream_id)
        if known is None or version > known.version:
            known = self._positions[stream_id] = _Positions(version, now_ms)
        if version == known.version:
            known.known[by] = (last_epoch, end_offset)

    def reported_nats(self, broker: BrokerId, reaches_nats: bool, now_ms: float) -> None:
        """Whether a broker's NATS server responds, as the broker reports repeatedly."""
        known = self._reaches_nats.get(broker)
        if known is None or known[0] != reaches_nats:
            self._note_news(now_ms)
            self._reaches_nats[broker] = (reaches_nats, now_ms)

    def _note_news(self, now_ms: float) -> None:
        self._news_ms, self._is_quiescent = now_ms, False

    # ---- decisions ----

    def decide(self, state: Metadata, alive: Collection[BrokerId], now_ms: float, wall_us: int = 0) -> Decisions:
        """While brokers are missing, a new metadata leader only replaces leaders that a majority reports, until the
        others have had the time to report. While nothing is new, and nothing was to be decided, the streams are not
        looked at again.

        Args:
            alive: registered brokers that have a session.
            wall_us: the time now, for tombstones.
        """
        if len(alive) < len(state.brokers) and not self.has_waited_for_brokers(now_ms):
            self._alive = frozenset(alive)
            reported = [record for record in state.streams.values() if self._is_reported(record, (), now_ms)]
            return Decisions(self._appoint(state, reported, {}, now_ms))
        if frozenset(alive) != self._alive:
            self._alive, self._changed_ms = frozenset(alive), now_ms
        if self._decided_for != (state.version, self._alive):
            self._decided_for = state.version, self._alive
            self._note_news(now_ms)
        if self._is_quiescent:
            return Decisions()
        moves: list[tuple[StreamId, int]] = []
        transfers: list[LeadershipTransfer] = []
        loads: dict[BrokerId, int] = {}
        unled: list[StreamRecord] = []
        sound = {one for one in self._alive if not state.brokers[one].is_draining and self._reaches(one, True, now_ms)}
        for record in state.streams.values():
            if record.leader in sound and _is_at_rest(record) and record.id not in self._unresponsive:
                loads[record.leader] = loads.get(record.leader, 0) + 1  # as nearly all of thousands
            elif self._is_led(record, now_ms):
                assert record.leader is not None, "it is led"
                loads[record.leader] = loads.get(record.leader, 0) + 1
                if _is_move_done(record):
                    moves.append((record.id, record.version))
                elif (transfer := self._transfer(state, record, now_ms)) and len(transfers) < _TRANSFERS_AT_ONCE:
                    self._transferred_ms[record.id] = now_ms
                    transfers.append(transfer)
            else:
                unled.append(record)
        commands: list[BackgroundCommand] = [*self._appoint(state, unled, loads, now_ms)]
        if moves:
            commands.append(FinishMoves(moves=tuple(moves), moved_us=wall_us))
        decisions = Decisions((*commands, *self._drains(state)), tuple(transfers))
        if decisions != Decisions():
            self._note_news(now_ms)
        self._is_quiescent = now_ms - self._news_ms >= _SETTLED_MS
        return decisions

    def _is_led(self, record: StreamRecord, now_ms: float) -> bool:
        if record.leader is None or record.leader not in self._alive:
            return False
        absent = [broker for broker in record.candidates if broker not in self._alive]
        return not self._is_reported(record, absent, now_ms)

    def _is_reported(self, record: StreamRecord, absent: Collection[BrokerId], now_ms: float) -> bool:
        """Whether a majority reports the leader: of those who hold everything, where the absent ones count as reports,
        or of all replicas, as the leader may have just removed one of them from those who hold everything.
        """
        epoch, reports = self._unresponsive.get(record.id, (record.leader_epoch, {}))
        if epoch != record.leader_epoch or not reports:
            return False
        holding = set(record.candidates)
        missing = {broker for broker, at_ms in reports.items() if now_ms - at_ms < REPORT_HOLDS_MS}
        is_missed_by_holders = 2 * len(holding & missing.union(absent)) > len(holding)
        return is_missed_by_holders or 2 * len(missing.intersection(record.replicas)) > len(record.replicas)

    def _appoint(
        self, state: Metadata, unled: Iterable[StreamRecord], loads: dict[BrokerId, int], now_ms: float
    ) -> tuple[AppointLeaders, ...]:
        """Leaders of these streams, where there is one to be found. Args: loads: of each broker; brought up to date."""
        appointments: list[Appointment] = []
        for record in unled:
            if (chosen := self._successor(state, record, loads, now_ms)) is not None:
                loads[chosen.leader] = loads.get(chosen.leader, 0) + 1
                appointments.append(chosen)
        if not appointments:
            return ()
        self._changed_ms = now_ms
        return (AppointLeaders(appointments=tuple(appointments)),)

    def _successor(
        self, state: Metadata, record: StreamRecord, loads: dict[BrokerId, int], now_ms: float
    ) -> Appointment | None:
        live = [one for one in record.candidates if one in self._alive and not state.brokers[one].is_stopping]
        _, reports = self._unresponsive.get(record.id, (record.leader_epoch, {}))
        others = [broker for broker in live if broker != record.leader]
        live = others if record.leader in live and reports else live
        proven = [broker for broker in live if broker not in record.unproven or record.candidates == (broker,)]
        if proven:
            in_sync = [broker for broker in proven if broker in record.isr] or proven
            preferred = (record.target or record.replicas)[0]
            cut_off = {one for one in in_sync if self._reaches(one, False, now_ms)}
            leader = min(
                in_sync,
                key=lambda one: (one in cut_off, one != preferred, loads.get(one, 0), record.replicas.index(one)),
            )
        else:
            found = self._by_position(record, live, now_ms)
            if found is None:
                return None
            leader = found
        isr = tuple(broker for broker in record.isr if broker in self._alive or broker == leader)
        isr = isr if leader in isr else (leader,)
        if record.leader in isr and record.leader != leader:
            isr = tuple(broker for broker in isr if broker != record.leader)
        return Appointment(stream_id=record.id, version=record.version, leader=leader, isr=isr)

    def _by_position(self, record: StreamRecord, live: list[BrokerId], now_ms: float) -> BrokerId | None:
        positions = self._positions.get(record.id)
        if positions is None or positions.version != record.version:
            return None
        known = {broker: where for broker, where in positions.known.items() if broker in live}
        if len(known) < len(live) and now_ms - positions.since_ms < _POSITIONS_WAIT_MS:
            return None
        if not record.has_companion:
            return quorum_position(known, record.candidates)
        companions = self._positions.get(companion_id(record.id))
        if companions is None or companions.version != record.version:
            return None
        return quorum_position(known, record.candidates, companions.known)

    def _transfer(self, state: Metadata, record: StreamRecord, now_ms: float) -> LeadershipTransfer | None:
        """Back to the preferred leader, or away from a broker that is drained, moved from, or does not reach NATS."""
        assert record.leader is not None, "only a stream that is led is transferred"
        wanted = record.target or record.replicas
        ready = [
            broker
            for broker in wanted
            if broker in record.isr and broker in self._alive and broker not in record.unproven
        ]
        ready = [one for one in ready if not state.brokers[one].is_draining and not state.brokers[one].is_stopping]
        reaching = [broker for broker in ready if self._reaches(broker, True, now_ms)]
        ready = reaching or ready
        is_cut_off = bool(reaching) and self._reaches(record.leader, False, now_ms)
        if not ready or record.leader == ready[0] or (now_ms - self._changed_ms < _STABLE_MS and not is_cut_off):
            return None
        leaves = is_cut_off or record.leader not in wanted or state.brokers[record.leader].is_draining
        if not leaves and (ready[0] != wanted[0] or len(record.isr) < len(record.replicas)):
            return None
        if now_ms - self._transferred_ms.get(record.id, -_TRANSFER_AGAIN_MS) < _TRANSFER_AGAIN_MS:
            return None
        return LeadershipTransfer(record.id, record.leader, ready[0])

    def _reaches(self, broker: BrokerId, reaches_nats: bool, now_ms: float) -> bool:
        """Whether it has reported this for longer than a NATS server takes to restart."""
        reported, since_ms = self._reaches_nats.get(broker, (True, -_REACHABILITY_LASTS_MS))
        return reported == reaches_nats and now_ms - since_ms >= _REACHABILITY_LASTS_MS

    def _drains(self, state: Metadata) -> list[MoveReplicas]:
        """Moves off brokers that are being drained, a few at a time."""
        draining = {broker.id for broker in state.brokers.values() if broker.is_draining}
        if not draining:
            return []
        usable = [broker for broker in sorted(state.brokers) if broker not in draining and broker in self._alive]
        loads = Loads(state)
        under_way = sum(bool(record.target) for record in state.streams.values())
        moves: list[MoveReplicas] = []
        for record in state.streams.values():
            leaving = next((broker for broker in record.target or record.replicas if broker in draining), None)
            if leaving is None or (not record.target and under_way >= _MOVES_AT_ONCE):
                continue  # one that is under way already gets another target at once: it may never end as it is
            try:
                moves.append(MoveReplicas(name=record.name, target=loads.replace(record, leaving, usable)))
                under_way += not record.target
            except NotEnoughBrokers:
                continue  # it stays until there is another broker; `cluster remove` says so before it drains
        return moves


def _is_at_rest(record: StreamRecord) -> bool:
    """Whether its preferred leader leads, nothing is to be proven of it, and no replica is to be moved."""
    preferred = record.leader == record.replicas[0] and not record.target
    return preferred and record.leader in record.isr and not record.unproven


def _is_move_done(record: StreamRecord) -> bool:
    return bool(record.target) and set(record.target) <= set(record.isr) and record.leader in record.target
