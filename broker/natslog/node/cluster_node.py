"""This broker as a member of its cluster: which brokers may connect to it, what it receives on links, how a cluster is
created and extended.

Theory of operation. A folder is blank until it belongs to a cluster. A broker without seeds creates a cluster alone.
Among seeds, the broker with the lowest id creates it once it has connected to all the others and all are blank; it adds
them as members, and informs them on the next link (`Welcome`). Later ones are added by an operator, as learners; the
metadata leader makes them voters when they have caught up. A member is a broker id *with its folder*: a broker that
lost its folder is not accepted until it was removed and added again, so no member votes twice. The same holds for a
member with an older copy of its folder: each broker compares the life that its metadata has registered with those that
the other's folder had (ADR 11).

Invariant. Raft's messages, fetches and questions pass only between folders of one cluster.
"""

from __future__ import annotations

import asyncio
import logging
import secrets as chance
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Protocol

from natslog.cluster.commands import Proposal
from natslog.cluster.features import LATEST_LEVEL
from natslog.cluster.metadata import Metadata
from natslog.config import BrokerConfig
from natslog.consensus import Member, Message
from natslog.errors import (
    CorruptLog,
    NatslogError,
    OutdatedFolder,
)
from natslog.log_events import event
from natslog.model import BrokerId, Epoch, StreamId
from natslog.node.clock import elapsed_us, monotonic_ms, now_us
from natslog.node.data_dir import REMEDY, DataDir
from natslog.node.metadata.admission import LOG_EVERY_MS, Admission
from natslog.node.metadata.group import MetadataGroup, founding_snapshot
from natslog.node.metadata.leader import MetadataLeading
from natslog.node.metadata.raft_stored import damage
from natslog.node.metadata.registration import Registration
from natslog.node.metadata.session import Session
from natslog.node.metadata.upgrade import Upgrade
from natslog.node.peers.handshake import Hello
from natslog.node.peers.keys import KeyRing
from natslog.node.peers.link_socket import LinkSocket
from natslog.node.peers.links import DialledLink, Links
from natslog.node.peers.messages import (
    Ask,
    FetchRequest,
    Forwarded,
    Frame,
    NatsReachability,
    Positioned,
    RaftMessages,
    TransferLeadership,
    UnresponsiveLeaders,
    Welcome,
)
from natslog.node.peers.questions import Answering, Questions, Reply
from natslog.node.peers.reception import Reception
from natslog.node.peers.requests import Requests
from natslog.node.peers.secret_file import READ_EVERY_S, SecretFile
from natslog.node.supervisor import Supervisor
from natslog.request_ids import current_request_id, handling
from natslog.security.tls import BrokerTls

logger = logging.getLogger("natslog.cluster")

_REPORT_EVERY_S, _LOOK_EVERY_S = 0.5, 0.1
_COMPARE_CLOCKS_EVERY_S = 1.0
_MISSING_CLOCKS_EVERY_S = 0.1  # while fewer than a majority's are known: epochs wait for them
_LATEST_US = 1 << 53  # of a clock that another broker may claim: the year 2255
_LINKS_EVERY_S = 0.2
_FIRST_LOG_MS = 5_000.0


class LocalReplicas(Protocol):
    """The replicas of this broker, as its cluster uses them."""

    def reconcile(self) -> None:
        """Metadata was applied."""

    def serve_fetch(self, peer: Hello, request: FetchRequest, reply: Reply) -> None: ...

    def transfer_leaderships(self, frame: TransferLeadership) -> None:
        """As the metadata leader requested."""

    def reaches_nats(self) -> bool:
        """Whether streams that are led here can take messages."""

    def unresponsive_leaders(self, ended: Collection[BrokerId]) -> list[tuple[StreamId, Epoch]]:
        """Streams whose leader is one of these brokers, or has not responded for too long."""

    def unproven_positions(self) -> list[tuple[StreamId, int, Epoch, int]]:
        """Where the logs end that this broker restarted with uncleanly: (stream, record version, last epoch, end)."""


class LocalBroker(Answering, Protocol):
    """This broker, as its membership uses it from `start` on."""

    @property
    def hosting(self) -> LocalReplicas: ...

    def halt(self, what: str, error: BaseException) -> None:
        """A bug: the broker stops."""


class ClusterNode(Admission):
    """Args: `secrets`: of the cluster, the first of which signs. `broker`: what the cluster requests is done by it."""

    def __init__(
        self,
        config: BrokerConfig,
        data_dir: DataDir,
        broker: LocalBroker,
        *,
        secrets: Sequence[bytes],
        tls: BrokerTls | None = None,
    ) -> None:
        group = MetadataGroup(
            data_dir.raft,
            BrokerId(config.broker_id),
            send=self._send_raft,
            forward=self._forward,
            on_applied=lambda: broker.hosting.reconcile(),
            on_leader=lambda: self._report_due.set(),
            on_bug=broker.halt,
            raise_level=data_dir.raise_level,
        )
        self._report_due = asyncio.Event()
        super().__init__(config, data_dir, group, KeyRing(secrets))
        self._broker = broker
        self.tls = tls
        self.links = Links(self, tls)
        self.reception = Reception(self, self.keys)
        self._session = Session(self.barrier)
        self.registration = Registration(self, data_dir, lambda: self.links.all)
        self.leading = MetadataLeading(group, self.clock, self._request_transfer)
        self.upgrade = Upgrade(group, self.link_to)
        self.served: set[LinkSocket] = set()
        self._questions = Questions(broker)
        self.requests = Requests(self.me, self.link_to, broker)
        self.has_joined = asyncio.Event()
        self._logged_ms = monotonic_ms() - LOG_EVERY_MS + _FIRST_LOG_MS
        self._tasks = Supervisor(broker.halt)

    @property
    def state(self) -> Metadata:
        return self.group.state

    def use_config(self, config: BrokerConfig) -> None:
        """The same settings with the port filled in that the broker listens on."""
        self.config = config

    # ---- life ----

    async def start(self) -> None:
        """Returns when this broker belongs to a cluster and its new life is registered."""
        others = self._seeds()
        if not self.cluster_id and not self.group.store.is_blank:
            self._finish_founding()
        if self.cluster_id:
            self._check_not_lost()
            self._begin()
        elif not others:
            self._found([])
        else:
            logger.warning(
                "the data folder is empty: waiting for the other brokers of the cluster: %s",
                ", ".join(others),
                extra=event("cluster.waiting"),
            )
        for work, name in (
            (self._keep_links(), "links"),
            (self.leading.run(), "controller"),
            (self._report(), "reports"),
            (self._session.run(), "session"),
            (self._compare_clocks(), "clocks"),
            (self._refresh_secrets(), "secrets"),
        ):
            self._tasks.start(work, name)
        await self.has_joined.wait()
        await self.registration.run()
        self.leading.lives[self.me] = self._data_dir.life.name

    def _finish_founding(self) -> None:
        """The folder does not name its cluster: the creation of the cluster was interrupted, or `broker` was
        missing.
        """
        member = self.group.raft.membership.find(self.me)
        if member is None or member.directory != self._data_dir.identity.directory or not self.state.cluster_id:
            raise CorruptLog(
                f"{self._data_dir.raft} contains a metadata log, but the data folder does not belong to a "
                f"cluster: the files of several folders were mixed. {REMEDY}"
            )
        self._data_dir.join(self.state.cluster_id)
        logger.warning(
            "this data folder belongs to cluster %s, but its file `broker` did not name the cluster; the file is "
            "written again",
            self.cluster_id,
            extra=event("cluster.identity_rewritten", cluster=self.cluster_id),
        )

    def _check_not_lost(self) -> None:
        """A folder that belongs to a cluster has a log; that of a broker which has only received `Welcome` so far is
        blank.
        """
        if self.group.store.is_missing:
            raise damage(self._data_dir.raft, "the metadata log is missing, but the data folder belongs to a cluster")
        self.registration.check_life()
        member = self.group.raft.membership.find(self.me)
        if member is not None and member.directory != self._data_dir.identity.directory:
            raise CorruptLog(
                f"{self._data_dir.raft} belongs to another data folder ({member.directory}): the files of "
                f"several folders were mixed. {REMEDY}",
            )

    def _begin(self) -> None:
        if not self.has_joined.is_set():  # a link that was served before `start` may have received the `Welcome`
            self.group.start()
            self.has_joined.set()

    async def stop(self) -> None:
        await self._questions.stop()
        await self._tasks.stop()
        await self.links.close()
        for socket in list(self.served):
            socket.close()
        await self.group.stop()

    # ---- founding and growing ----

    def _seeds(self) -> set[str]:
        return {seed.rstrip("/") for seed in self.config.seeds} - {self.config.url}

    def _found(self, peers: list[Hello]) -> None:
        identity = self._data_dir.identity
        state = Metadata(cluster_id=chance.token_hex(8), feature_level=LATEST_LEVEL)
        members = [Member(id=self.me, directory=identity.directory, url=self.config.url)]
        members += [Member(id=peer.broker, directory=peer.directory, url=peer.url) for peer in peers]
        members.sort(key=lambda member: member.id)
        self.group.found(founding_snapshot(state, tuple(members)))
        self._data_dir.join(state.cluster_id)
        logger.info(
            "created cluster %s with brokers %s",
            state.cluster_id,
            [member.id for member in members],
            extra=event("cluster.created", cluster=state.cluster_id),
        )
        self._begin()
        self.links.redial()

    def _join(self, cluster_id: str) -> None:
        if not self.cluster_id and self.group.store.is_blank:  # otherwise the log names the cluster: `start`
            self.group.store.begin()  # so that a missing one is damage
            self._data_dir.join(cluster_id)
            logger.info(
                "this broker belongs to cluster %s now", cluster_id, extra=event("cluster.joined", cluster=cluster_id)
            )
            self._begin()
            self.links.redial()

    async def _refresh_secrets(self) -> None:
        if self.config.cluster_secret_file is None:
            return
        file = SecretFile(self.keys, self.config.secrets)
        while True:
            file.refresh()
            await asyncio.sleep(READ_EVERY_S)

    async def _keep_links(self) -> None:
        while True:
            self.links.dial(self._urls())
            if not self.cluster_id:
                self._found_if_all_are_blank()
                self._log_missing_brokers()
            self.registration.log_if_outdated()
            for link in self.links.all:
                self._hang_up_on_outdated(link)
                if link.is_up and link.peer is not None and (welcome := self.welcome_for(link.peer)) is not None:
                    link.send(welcome)
            await asyncio.sleep(_LINKS_EVERY_S)

    def _hang_up_on_outdated(self, link: DialledLink) -> None:
        if link.is_up and link.peer is not None:
            try:
                self.check_still_current(link.peer)
            except OutdatedFolder:
                link.hang_up()  # the next handshake reports the reason

    def _urls(self) -> set[str]:
        """Of everyone else: as they registered, or as they were added. While a broker is not reached there, also the
        URLs in the seeds: brokers may have new addresses, and register them only when a majority is connected.
        """
        urls = {member.id: member.url for member in self.group.raft.membership.members}
        urls |= {broker.id: broker.url for broker in self.state.brokers.values() if broker.id in urls}
        urls.pop(self.me, None)
        known, reached = set(urls.values()), {link.url for link in self.links.all if link.is_up}
        return known if known and known <= reached else known | self._seeds()

    def _found_if_all_are_blank(self) -> None:
        links = [link for link in self.links.all if not link.is_self]
        peers = [link.peer for link in links if link.is_up and link.peer is not None]
        if len(peers) < len(links) or any(peer.cluster_id for peer in peers):
            return
        numbers = [self.me, *(peer.broker for peer in peers)]
        if len(set(numbers)) == len(numbers) and self.me == min(numbers):
            self._found(peers)

    def _log_missing_brokers(self) -> None:
        if self.cluster_id or monotonic_ms() - self._logged_ms < LOG_EVERY_MS:
            return
        self._logged_ms = monotonic_ms()
        others = [link for link in self.links.all if not link.is_self]
        missing = [f"{link.url} ({link.problem})" for link in others if not link.is_up]
        belonging = [link.peer for link in others if link.is_up and link.peer is not None and link.peer.cluster_id]
        if belonging:
            logger.warning(
                "cluster %s exists already and this broker's data folder is not a member of it: run natslog "
                "--server %s cluster add %s",
                belonging[0].cluster_id,
                belonging[0].url,
                self.config.url,
                extra=event("cluster.not_a_member", cluster=belonging[0].cluster_id),
            )
        elif missing:
            logger.warning(
                "a new cluster is created when all its seeds are running; not reached: %s. Start these brokers, "
                "or correct the seeds",
                ", ".join(missing),
                extra=event("cluster.waiting"),
            )

    # ---- received on links: LinkOwner ----

    def link_changed(self, peer: Hello, is_up: bool) -> None:
        logger.debug("the link to broker %d is %s", peer.broker, "up" if is_up else "down")

    def admitted(self, hello: Hello) -> None:
        super().admitted(hello)
        self.links.began(hello.broker)

    def process_ended(self, peer: Hello) -> None:
        logger.debug("the process of broker %d has ended", peer.broker)
        self.group.member_ended(peer.broker)
        self._report_due.set()

    def received(self, peer: Hello, frame: Frame, reply: Reply) -> None:
        if isinstance(frame, Welcome):
            self._join(frame.cluster_id)
            return
        if not self.cluster_id or peer.cluster_id != self.cluster_id:
            return
        self.check_still_current(peer)
        match frame:
            case RaftMessages(messages=messages):
                if self.group.raft.membership.find(peer.broker) is None:
                    self.links.keep(peer.url)
                self.leading.lives[peer.broker] = peer.incarnation
                self.group.received(tuple(one for one in messages if one.sender == peer.broker))
            case FetchRequest():
                self._broker.hosting.serve_fetch(peer, frame, reply)
            case Forwarded(proposal=proposal, request_id=request_id):
                with handling(request_id):
                    self.group.forwarded(proposal)
            case UnresponsiveLeaders(replicas=replicas):
                self.leading.reported_unresponsive(peer.broker, replicas)
            case Positioned(positions=positions):
                self.leading.reported_position(peer.broker, positions)
            case NatsReachability(reaches_nats=reaches_nats):
                self.leading.reported_nats(peer.broker, reaches_nats)
            case TransferLeadership():
                if peer.broker == self.group.leader:
                    self._broker.hosting.transfer_leaderships(frame)
            case Ask():
                self._questions.received(frame, reply)
            case _:
                logger.warning(
                    "broker %d sent an unexpected message: %s",
                    peer.broker,
                    type(frame).__name__,
                    extra=event("peer.unexpected_message", peer=peer.broker),
                )

    async def answer_read_index(self) -> int:
        """Of the metadata leader, for the barrier of another broker."""
        return await self.group.read_index()

    # ---- what is sent ----

    def link_to(self, broker: BrokerId) -> DialledLink | None:
        return self.links.of(broker)

    def is_connected(self, broker: BrokerId) -> bool:
        """Whether there is a link to it; this broker is connected with itself."""
        return broker == self.me or self.links.of(broker) is not None

    def usable(self) -> list[BrokerId]:
        """Brokers that are connected and not being drained: new replicas go there."""
        return [one.id for one in self.state.brokers.values() if not one.is_draining and self.is_connected(one.id)]

    def _send_raft(self, messages: list[Message]) -> None:
        by_broker: dict[BrokerId, list[Message]] = {}
        for message in messages:
            by_broker.setdefault(message.to, []).append(message)
        for broker, batch in by_broker.items():
            if (link := self.links.of(broker)) is not None:
                link.send(RaftMessages(tuple(batch)))

    def _forward(self, leader: BrokerId, proposal: Proposal) -> None:
        if (link := self.links.of(leader)) is not None:
            link.send(Forwarded(proposal, current_request_id()))

    async def barrier(self) -> None:
        """Returns when all changes of the metadata that any client was informed of before now are applied here.

        Raises:
            MetadataUnavailable: no majority could be reached in time.
        """
        group = self.group
        if group.is_leader:
            index = await group.read_index()
        else:
            link = self.links.of(group.leader) if group.leader is not None else None
            if link is None:
                raise group.unavailable()
            index = await link.ask("read_index", 2.0)
        await group.applied(index)

    def has_session(self) -> bool:
        """Whether the metadata here is recent enough to state positions by it: see `Session`."""
        return self.group.has_session() and (self.group.is_alone or self._session.is_valid())

    # ---- requests of the metadata leader, and reports to it ----

    def _request_transfer(self, leader: BrokerId, frame: TransferLeadership) -> None:
        if leader == self.me:
            self._broker.hosting.transfer_leaderships(frame)
        elif (link := self.links.of(leader)) is not None:
            link.send(frame)

    async def _report(self) -> None:
        """Twice a second; at once when leaders do not respond any more, or another broker leads the metadata."""
        reported, next_s = list[tuple[StreamId, Epoch]](), 0.0
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_EVERY_S):
                    await self._report_due.wait()
            leaders = self._broker.hosting.unresponsive_leaders(self.links.ended)
            if self._report_due.is_set() or leaders != reported or time.monotonic() >= next_s:
                self._report_due.clear()
                reported, next_s = leaders, time.monotonic() + _REPORT_EVERY_S
                self._send_reports(leaders)

    def _send_reports(self, leaders: list[tuple[StreamId, Epoch]]) -> None:
        leader, replicas = self.group.leader, self._broker.hosting
        if leader is None or not self.has_joined.is_set():
            return
        reaches_nats, positions = replicas.reaches_nats(), replicas.unproven_positions()
        if leader == self.me:
            self.leading.reported_nats(self.me, reaches_nats)
            self.leading.reported_unresponsive(self.me, leaders)
            self.leading.reported_position(self.me, positions)
        elif (link := self.links.of(leader)) is not None:
            link.send(NatsReachability(reaches_nats))
            if leaders:
                link.send(UnresponsiveLeaders(tuple(leaders)))
            if positions:
                link.send(Positioned(tuple(positions)))

    # ---- clocks ----

    async def _compare_clocks(self) -> None:
        while True:
            if self.clock.refresh(member.id for member in self.group.raft.membership.members):
                await asyncio.to_thread(self.clock.store)
            await asyncio.gather(*(self._ask_clock(link) for link in self.links.all if link.is_up))
            await asyncio.sleep(_COMPARE_CLOCKS_EVERY_S if self.clock.has_time else _MISSING_CLOCKS_EVERY_S)

    async def _ask_clock(self, link: DialledLink) -> None:
        asked_us, peer = elapsed_us(), link.peer
        try:
            wall_us = await link.ask("clock", _COMPARE_CLOCKS_EVERY_S)
        except NatslogError:
            return  # it does not respond: its last sample expires
        if peer is not None and type(wall_us) is int and 0 <= wall_us < _LATEST_US:
            self.clock.note(peer.broker, wall_us, asked_us)

    async def answer_clock(self) -> int:
        """The wall clock of this machine, microseconds since 1970 UTC."""
        return now_us()
