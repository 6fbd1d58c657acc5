"""One broker: its data folder, its membership in the cluster, its replicas, its link to NATS. The HTTP layer has no
state.

Order of things. Start: claim the folder, read the metadata log, connect to NATS, join the cluster, open the logs, take
the roles the metadata says. Stop: transfer leaderships to other brokers, unsubscribe (what the server had sent still
arrives), commit and ack it, close the logs, leave links, NATS and the folder.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

from natslog.cluster.activity import Kind
from natslog.cluster.commands import Command
from natslog.config import BrokerConfig
from natslog.errors import (
    BrokerUnavailable,
    MetadataUnavailable,
    NatslogError,
    ShuttingDown,
)
from natslog.log_events import event
from natslog.model import BrokerId, StreamRecord
from natslog.node.clock import wait_for_at_most
from natslog.node.cluster_node import ClusterNode
from natslog.node.data_dir import DataDir
from natslog.node.history import History
from natslog.node.internal.activity import ActivityStream
from natslog.node.internal.cursor_leader import CursorLeader
from natslog.node.internal.cursors import Cursors
from natslog.node.internal.keeper import Keeper
from natslog.node.lag_history import LagHistory
from natslog.node.log_levels import LogLevels
from natslog.node.metadata.entries import Request
from natslog.node.operations import Operations
from natslog.node.peers.questions import Answerer
from natslog.node.publishing import Publishing
from natslog.node.removing import Removing
from natslog.node.replicas.consumer_cursors import ConsumerCursors
from natslog.node.replicas.hosting import Hosting
from natslog.node.replicas.jetstream import JetStream, JetStreamState
from natslog.node.replicas.lags import Lags
from natslog.node.replicas.positions import Positions
from natslog.node.replicas.read_plans import ReadPlans
from natslog.node.replicas.receipts import Receipts
from natslog.node.replicas.scrubbing import Scrubber
from natslog.node.replicas.staged_copies import StagedCopies
from natslog.node.replicas.stream import HostedStream
from natslog.node.replicas.upkeep import Upkeep
from natslog.node.replicas.watching import Watching
from natslog.node.security_start import enable_security
from natslog.node.stream_operations import StreamOperations
from natslog.node.supervisor import Supervisor
from natslog.node.threads import Threads
from natslog.node.writes.ingest_memory import IngestMemory
from natslog.node.writes.staging import Staging
from natslog.security.audit import AuditLog
from natslog.security.guard import Guard
from natslog.security.tls import BrokerTls, TlsFiles
from natslog.security.tokens import id_in
from natslog.wire import library
from natslog.wire.lanes import LANES, NatsLanes
from natslog.wire.leaf import LeafLink
from natslog.wire.link import NatsCredentials

logger = logging.getLogger("natslog.node")

Result = TypeVar("Result")
LeafState = Literal["off", "up", "down"]
"""Whether the leafnode connection to NATS is up; off without `nats_leaf_url`."""

_WRITER_THREADS = 8
_READER_THREADS = 8
_STOP_WITHIN_S = 12.0
_CANCELLED_WITHIN_S = 1.0  # of those; a request that waits for a thread ends with it
_TRANSFER_WITHIN_S = 10.0  # of those
_BARRIER_WITHIN_S = 2.0
_POLL_S = 0.05


class Broker:
    """Open with `await Broker(config, JetStreamApi).start()`; everything but construction runs in one event loop.

    Args:
        jetstream_of: makes the JetStream API of this broker, which is built on all other parts.

    Raises:
        ConfigError, DataDirError, CorruptLog: it cannot start; the message names the remedy.
    """

    def __init__(self, config: BrokerConfig, jetstream_of: Callable[[Broker], JetStream]) -> None:
        self.config = config
        self.stopping = self.has_started = False
        self.stopping_soon = asyncio.Event()
        self.failed: BaseException | None = None
        self.admin_token: str | None = None  # if this start has created it; shown once
        self._nats_down_since: float | None = None
        self._background = Supervisor(self.halt)
        self._maintenance = Supervisor(self.halt)  # ends by itself, because its threads use the logs
        self._requested = Supervisor(self._halt_unless_stopping, on_failure=_log_failure)
        self.memory = IngestMemory(config.ingest_memory_bytes)
        self.readers = Threads(_READER_THREADS, "read")
        self._writers = Threads(_WRITER_THREADS, "write", are_shared=True)
        secrets, tls = config.secrets(), tls_of(config)
        name = f"natslog-broker-{config.broker_id}"
        credentials = NatsCredentials(**config.nats_login, requires_private_files=True)
        self.leaf = self._leaf_of(config, name)
        self._data_dir = DataDir(Path(config.data_dir), config.broker_id)
        self.link = NatsLanes(config.nats_url, name=name, credentials=credentials, on_state=self._on_nats_state)
        try:
            self.cluster = ClusterNode(config, self._data_dir, self, secrets=secrets, tls=tls)
            self.staging = Staging(
                self._data_dir.path / "staged",
                BrokerId(config.broker_id),
                max_bytes=config.append_max_bytes,
                min_free_bytes=config.min_free_bytes,
            )
        except BaseException:
            self._data_dir.release()
            raise
        self.hosting = Hosting(
            config,
            self._data_dir,
            self.cluster.group,
            clock=self.cluster.clock,
            nats=self.link,
            writers=self._writers,
            readers=self.readers,
            memory=self.memory,
            link_to=self.cluster.link_to,
            ended=lambda: self.cluster.links.ended,
            requests=self._requested,
            broker=self,
        )
        self._build_calls()
        self._build_background()
        self.jetstream_api = jetstream_of(self)
        self.answerers = self._all_answerers()

    def _build_calls(self) -> None:
        """The parts that answer requests."""
        cluster, hosting = self.cluster, self.hosting
        self.guard = Guard(
            lambda: cluster.state.security,
            cluster.clock.latest_us,
            is_required=self.config.security,
            is_current=lambda: cluster.registration.is_done,
            certificate_names=self.config.tls_identity,
        )
        self.audit = AuditLog(self.config.broker_id, self.config.audit_file)
        self.operations = Operations(cluster)
        self.log_levels = LogLevels(self.config.log_level, cluster, self.operations)
        self.publishing = Publishing(self.link)
        self.positions = Positions(cluster, hosting)
        self.lags = Lags(cluster, self.positions, self.readers)
        self.read_plans = ReadPlans(cluster, self.positions, self.readers)
        self.consumer_cursors = ConsumerCursors(cluster, hosting, self.positions)
        self.watching = Watching(cluster, self.positions)
        self.receipts = Receipts(cluster, hosting)
        self.staged_copies = StagedCopies(cluster, self.staging)

    def _build_background(self) -> None:
        """The parts that work by themselves, from `start` on, and what uses them."""
        config, cluster, hosting, keeper = self.config, self.cluster, self.hosting, Keeper(self.cluster)
        self.upkeep = Upkeep(config, cluster.group, cluster.clock, hosting, self.staging, self.readers)
        self.removing = Removing(hosting, self.readers, self._background)
        self.scrubber = Scrubber(config, cluster, hosting, self.readers, self.removing)
        self.stream_operations = StreamOperations(config, cluster, hosting, self.upkeep, self.removing)
        cursor_leader = CursorLeader(cluster.group, hosting, self.positions, self.readers, self._requested)
        self.cursors = Cursors(cluster, cursor_leader, keeper)
        self.lag_history = LagHistory(cluster, self.positions, self.lags, self.cursors, self.consumer_cursors)
        self.history = History(
            cluster,
            hosting,
            self.positions,
            self.lag_history,
            folder=self._data_dir.path,
            problem=self.not_ready_because,
            nats_connections=lambda: (self.link.up, LANES),
        )
        self.activity = ActivityStream(
            cluster,
            hosting,
            keeper,
            directory=self._data_dir.identity.directory,
            life=lambda: self._data_dir.life.number,
        )

    def _all_answerers(self) -> dict[str, Answerer]:
        """Of requests of other brokers, by kind."""
        return {
            "read_index": self.cluster.answer_read_index,
            "clock": self.cluster.answer_clock,
            "ready": self.stream_operations.answer_ready,
            "kept_ids": self.hosting.kept_ids,
            "prepare_to_lead": self.hosting.prepare_to_lead,
            "stored_batches": self.scrubber.repairs.piece,
            "staged_part": self.staging.piece,
            "leading": self.positions.on_this_broker,
            "lags": self.lags.on_this_broker,
            "read_places": self.read_plans.places_here,
            "read_cuts": self.read_plans.cuts_here,
            "watch": self.watching.on_this_broker,
            "consumer_positions": self.consumer_cursors.on_this_broker,
            **self.cursors.answerers,
            "jetstream_states": self.jetstream_api.states_here,
            "activity": self.activity.on_this_broker,
            "history": self.history.on_this_broker,
            "stats": self.history.stats,
            "lag_history": self.lag_history.on_this_broker,
            "scrub": self.scrubber.on_this_broker,
            "accept_loss": self.scrubber.repairs.accept_loss,
            "erasure": self.receipts.on_this_broker,
            "log_level": self.log_levels.on_this_broker,
        }

    def _leaf_of(self, config: BrokerConfig, name: str) -> LeafLink | None:
        """None: there is no `nats_leaf_url`. Raises ConfigError: the URL is wrong, or two settings exclude each
        other.
        """
        if not config.nats_leaf_url:
            return None
        return LeafLink(
            config.nats_leaf_url,
            name=name,
            credentials=NatsCredentials(**config.nats_leaf_login, requires_private_files=True),
            on_state=lambda is_up: self.jetstream_api.consumers.link_changed(is_up),
            on_interest=lambda subject: self.jetstream_api.consumers.interest_changed(subject),
        )

    def take_admin_token(self) -> str | None:
        """The token that this start has created, once."""
        token, self.admin_token = self.admin_token, None
        return token

    def use_config(self, config: BrokerConfig) -> None:
        """The same settings with the port filled in that it listens on."""
        self.config = config
        self.cluster.use_config(config)

    # ---- life ----

    async def start(self) -> Broker:
        """Joins the cluster and opens all logs. Returns when messages are accepted, or when the broker waits for
        NATS.
        """
        if (reason := library.reason()) is not None:
            logger.warning(
                "messages are processed slowly, because there is no library of compiled kernels: %s",
                reason,
                extra=event("kernels.not_compiled", reason=reason),
            )
        await self.link.open()
        if self.leaf is not None:
            await self.leaf.open()
        await self.cluster.start()
        token_file = self.config.admin_token_file
        self.admin_token = await enable_security(
            self.cluster,
            is_wanted=self.config.security,
            new_admin_token=self.config.new_admin_token,
            token_file=None if token_file is None else Path(token_file),
            admin_identity=self.config.admin_identity,
        )
        if self.admin_token is not None:
            self.audit.changed(identity="", route="start of the broker", created_token=id_in(self.admin_token))
        self.hosting.start()
        self.hosting.warn_of_strays(self.cluster.state)
        await self._wait_for_own_streams()
        self._maintenance.start(self.upkeep.run(), "upkeep")
        self._maintenance.start(self.scrubber.run(), "scrubbing")
        self._background.start(self.removing.run(), "removing")
        self._background.start(self.activity.run(), "activity")
        self._background.start(self.cursors.run(), "cursors")
        self._background.start(self.history.run(), "history")
        self._background.start(self.lag_history.run(), "lags")
        self.has_started = True
        return self

    async def _wait_for_own_streams(self) -> None:
        """Until every replica here is open, and those that only this broker can lead are led."""
        for name, stream in list(self.streams.items()):
            alone = stream.record.replicas == (self.cluster.me,)
            while not stream.is_ready and stream.problem is None and (alone or stream.log is None):
                if self.stopping_soon.is_set() or self.stopping:
                    return
                if self.streams.get(name) is not stream:  # deleted, or moved away, meanwhile
                    break
                await wait_for_at_most(_POLL_S, stream.reconciled.wait())

    async def stop(self) -> None:
        """Transfers leadership, stops accepting messages, commits and acknowledges received messages, and leaves the
        cluster, within `_STOP_WITHIN_S`.
        """
        if self.stopping:
            return
        self.stopping = True
        deadline_s = asyncio.get_running_loop().time() + _STOP_WITHIN_S
        for stream in self.streams.values():
            stream.advanced.set()  # long polls answer now
        self.upkeep.stop_soon()
        self.scrubber.stop_soon()
        await self._background.stop()
        if self.has_started:
            await self.activity.deliver_last()
        try:
            if self.has_started and self.failed is None:
                async with asyncio.timeout(_TRANSFER_WITHIN_S):
                    await self.hosting.transfer_all_leadership()
        except TimeoutError:
            logger.warning(
                "the leadership of some streams was not transferred in time: other brokers become their leaders "
                "after a timeout",
                extra=event("broker.leadership_not_transferred"),
            )
        try:
            async with asyncio.timeout_at(deadline_s):
                await self._stop_all()
        except TimeoutError:
            # The folder remains locked until this process has ended: a thread may still be writing to it.
            logger.error(
                "not all messages were committed within %.0f s; the uncommitted messages were not acked",
                _STOP_WITHIN_S,
                extra=event("broker.messages_not_committed"),
            )
        else:
            self._data_dir.release()
        self._writers.shutdown(wait=False, cancel_futures=True)
        self.readers.shutdown(wait=False, cancel_futures=True)
        self.staging.close()

    async def _stop_all(self) -> None:
        problems = await self.hosting.close()
        await self._maintenance.ended()
        await self.cluster.stop()
        if self.leaf is not None:
            await self.leaf.close()
        await self.link.close()
        await self._requested.stop(within_s=_CANCELLED_WITHIN_S)
        for problem in problems:
            logger.error("error while stopping: %s", problem, exc_info=problem, extra=event("broker.stop_failed"))
        if not problems and self.has_started and self.failed is None:
            self._data_dir.end_life()

    def halt(self, what: str, error: BaseException) -> None:
        """A task that must not end has ended with an exception: the broker stops instead of continuing partially."""
        self.failed = self.failed or error
        logger.critical(
            "the broker stops, because %s failed: %s", what, error, exc_info=error, extra=event("broker.halted")
        )
        self.stopping_soon.set()

    def _on_nats_state(self, up: bool) -> None:
        if not up:
            self._nats_down_since = time.monotonic()
            if self.stopping:
                return
            logger.warning(
                "the connection to NATS at %s was lost (at least one connection); reconnecting. Messages that are "
                "published without acks meanwhile are not recorded by the streams that use this connection. If the "
                "log of the NATS server contains 'slow consumer', messages arrived faster than this broker could "
                "process them",
                self.link.shown_url,
                extra=event("nats.connection_lost", address=self.link.shown_url),
            )
        elif self._nats_down_since is not None:
            seconds = time.monotonic() - self._nats_down_since
            logger.warning(
                "all connections to NATS are re-established after %.1f s; streams are subscribed again",
                seconds,
                extra=event("nats.reconnected", seconds=round(seconds, 1)),
            )
        else:
            logger.info(
                "connected to NATS at %s",
                self.link.shown_url,
                extra=event("nats.connected", address=self.link.shown_url),
            )

    @property
    def leaf_state(self) -> LeafState:
        if self.leaf is None:
            return "off"
        return "up" if self.leaf.is_reachable else "down"

    @property
    def leaf_problem(self) -> str:
        """Why the leafnode connection is down; empty if that is not known, or it is not down."""
        return self.leaf.problem if self.leaf is not None and self.leaf_state == "down" else ""

    @property
    def jetstream(self) -> JetStreamState | None:
        """How the JetStream API is served; None until that was found out."""
        return self.jetstream_api.served

    @property
    def data_path(self) -> Path:
        return self._data_dir.path

    def not_ready_because(self) -> str | None:
        """Why this broker cannot serve fully now; None if it can."""
        if self.stopping:
            return "shutting down"
        if not self.cluster.has_joined.is_set():
            return "waiting for the other brokers of the cluster" if self.config.seeds else "starting"
        if (outdated := self.cluster.registration.outdated) is not None:
            return outdated.message
        if not self.has_started:
            done = sum(stream.log is not None or stream.problem is not None for stream in self.streams.values())
            return f"recovering logs: {done} of {len(self.streams)} streams are open" if self.streams else "starting"
        if self.cluster.group.disk.hangs:
            return f"the disk of {self.data_path} does not complete writes: check the disk and the kernel log"
        if not self.has_session():
            return "no metadata leader is reachable: too few brokers are running, or the network is partitioned"
        if not self.link.is_up:
            return f"no connection to NATS at {self.link.shown_url}"
        if not self.link.is_reachable:
            return f"NATS at {self.link.shown_url} does not respond: check the NATS server and the network"
        if self.jetstream is None:
            return "finding out whether the NATS server serves the JetStream API itself"
        return None

    # ---- for the replicas: `services.ReplicaOwner` ----

    def report_replica(self, kind: Kind, name: str, stream_id: str, message: str) -> None:
        self.activity.report_replica(kind, name, stream_id, message)

    def damage_found(self) -> None:
        self.scrubber.wake()

    def upkeep_due(self) -> None:
        self.upkeep.begin_round()

    # ---- the cluster ----

    def has_session(self) -> bool:
        """Whether the metadata of this broker is recent enough to state positions."""
        return self.cluster.has_session()

    # ---- streams ----

    @property
    def streams(self) -> dict[str, HostedStream]:
        return self.hosting.streams

    @property
    def state(self) -> Any:
        return self.cluster.state

    async def record(self, name: str) -> StreamRecord:
        """The stream in the current metadata. Before `StreamNotFound` is raised, the metadata leader is consulted.

        Raises:
            StreamNotFound. MetadataUnavailable: this broker does not have it, and no majority confirmed that its
            metadata is recent.
        """
        if name not in self.state.streams:
            await self.require_up_to_date()
        found: StreamRecord = self.state.stream(name)
        return found

    async def up_to_date(self) -> bool:
        """Whether all earlier changes are applied here; False if no majority could be reached."""
        try:
            async with asyncio.timeout(_BARRIER_WITHIN_S):
                await self.cluster.barrier()
        except (TimeoutError, MetadataUnavailable, BrokerUnavailable, NatslogError) as error:
            logger.debug("answering from the local copy of the metadata: %s", error)
            return False
        return True

    async def require_up_to_date(self) -> None:
        """The same. Raises MetadataUnavailable: no majority could be reached."""
        if not await self.up_to_date():
            raise self.cluster.group.unavailable()

    def url_of(self, broker: BrokerId) -> str | None:
        known = self.state.brokers.get(broker)
        return None if known is None else str(known.url)

    def _halt_unless_stopping(self, what: str, error: BaseException) -> None:
        """What a request uses may be closed while the broker stops."""
        if self.stopping:
            _log_failure(what, error)
        else:
            self.halt(what, error)

    async def _to_the_end(self, change: Coroutine[Any, Any, Result]) -> Result:
        """Completes a change even if the client that requested it disconnects meanwhile."""
        if self.stopping:
            change.close()
            raise ShuttingDown(
                "this broker is shutting down: send the request to another broker, or repeat it when this broker has "
                "restarted"
            )
        return await asyncio.shield(self._requested.start(change, "a change"))

    async def change(self, command: Command, request: Request) -> bool:
        """Completes a change of the metadata. Raises the error of a refusal, MetadataUnavailable, ShuttingDown."""
        return await self._to_the_end(self.cluster.group.propose(command, request))

    async def change_cluster(self, change: Coroutine[Any, Any, Result]) -> Result:
        """Completes an operator's change. Raises the errors of the change, and ShuttingDown."""
        return await self._to_the_end(change)


def _log_failure(what: str, error: BaseException) -> None:
    """It was also raised to the caller, if that one is still waiting."""
    logger.debug("%s ended with: %s", what, error)


def tls_of(config: BrokerConfig) -> BrokerTls | None:
    """None: HTTP without TLS. Raises ConfigError: a file cannot be used."""
    if config.tls_cert_file is None or config.tls_key_file is None:
        return None
    files = TlsFiles(config.tls_cert_file, config.tls_key_file, config.tls_ca_file)
    hosts = [urlsplit(url).hostname for url in (*config.client_urls, *config.peer_urls)]
    return BrokerTls(
        files, hosts=[host for host in hosts if host], requires_clients=config.tls_client_certs == "required"
    )
