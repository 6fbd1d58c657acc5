"""The registration of this broker's life: the cluster records it, or refuses it if the folder is an older copy.

Theory of operation. A life is proposed until its outcome is applied from the log on this broker. Before that it is
listed in the folder, durably, so every later state of the folder names the registered life; `Metadata` and the
handshakes of the other brokers compare both (ADR 11). A refused broker does not vote and does not serve requests; it
reports this, and waits for an operator.

Roles are taken only in a life that is registered (`Hosting.is_registered`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from natslog.cluster.commands import BrokerRecord, RegisterBroker
from natslog.errors import CorruptLog, NatslogError, OutdatedFolder, StorageUnavailable
from natslog.log_events import event
from natslog.node.clock import monotonic_ms
from natslog.node.data_dir import REMEDY, DataDir
from natslog.node.metadata.admission import LOG_EVERY_MS, Admission
from natslog.node.metadata.entries import Request
from natslog.node.metadata.group import TICK_S
from natslog.node.peers.links import DialledLink

logger = logging.getLogger("natslog.cluster")

_RETRY_S = 0.2
_LEADER_WITHIN_MS = 10_000.0


class Registration:
    """Args: `links`: those that this broker dials."""

    def __init__(self, admission: Admission, data_dir: DataDir, links: Callable[[], Iterable[DialledLink]]) -> None:
        self.is_done = False
        self._admission, self._data_dir, self._links = admission, data_dir, links
        self._group, self._life = admission.group, data_dir.life
        self._refused: OutdatedFolder | None = None
        self._logged_ms = -LOG_EVERY_MS

    @property
    def _is_alone(self) -> bool:
        return [member.id for member in self._group.raft.membership.members] == [self._admission.me]

    # ---- required files ----

    def check_life(self) -> None:
        """Raises CorruptLog: `life` is missing, in the folder of one of several brokers."""
        if self._life.is_missing and not self._is_alone:
            raise CorruptLog(
                f"{self._data_dir.path / 'life'} is missing, so it cannot be verified that this is the newest data "
                f"folder of broker {self._admission.me}. {REMEDY}"
            )

    # ---- older copies ----

    @property
    def outdated(self) -> OutdatedFolder | None:
        """The error with which this broker's folder was refused: in the handshakes of others, or by the metadata."""
        if self.is_done:
            return None
        for link in self._links():
            refusal = link.refusal
            is_mine = isinstance(refusal, OutdatedFolder) and refusal.facts.get("broker") == self._admission.me
            if is_mine and not link.is_up:
                assert isinstance(refusal, OutdatedFolder)
                return refusal
        return self._refused

    def log_if_outdated(self) -> None:
        outdated = self.outdated
        if outdated is not None and monotonic_ms() - self._logged_ms >= LOG_EVERY_MS:
            self._logged_ms = monotonic_ms()
            logger.error(
                "this broker does not vote and does not serve requests: %s",
                outdated.message,
                extra=event("broker.outdated", reason=outdated.code),
            )

    # ---- registering ----

    async def run(self) -> None:
        """Returns when this life is registered; with an older copy of a member's folder, never."""
        while not self.is_done:
            try:
                await self._find_leader()
                await self._propose()
                self.is_done = True
            except OutdatedFolder as error:
                if self._is_alone:
                    await self._follow_own_metadata()
                else:
                    self._refused = error
                    await asyncio.sleep(_RETRY_S)
            except NatslogError as error:
                if self.outdated is None:
                    logger.warning(
                        "this broker is waiting for the cluster: %s",
                        error.message,
                        extra=event("cluster.waiting", reason=error.code),
                    )
                await asyncio.sleep(_RETRY_S)

    async def _find_leader(self) -> None:
        """Raises MetadataUnavailable. A start without a leader proposes nothing, and the folder need not list it."""
        give_up_ms = monotonic_ms() + _LEADER_WITHIN_MS
        while self._group.leader is None or self._group.store.is_blank:
            if monotonic_ms() > give_up_ms:
                raise self._group.unavailable()
            await asyncio.sleep(TICK_S)

    async def _propose(self) -> None:
        """Raises OutdatedFolder. Others (MetadataUnavailable, StorageUnavailable): propose again."""
        if self._life.is_missing:
            await self._follow_own_metadata()
        await self._change_life(self._life.note)
        config, life = self._admission.config, self._life
        me = BrokerRecord(
            id=self._admission.me,
            url=config.url,
            rack=config.rack,
            directory=self._data_dir.identity.directory,
            life=life.number,
            nonce=life.nonce,
            tags=config.tags,
        )
        command = RegisterBroker(broker=me, after=life.after, lives=life.lives)
        await self._group.propose(command, Request(f"{life.name} is up", f"broker {me.id}"))

    async def _follow_own_metadata(self) -> None:
        """The only broker of a cluster has every decision: the restored copy of its folder continues from there, as
        after an unclean end.
        """
        await self._group.applied(await self._group.read_index())
        known = self._group.state.brokers.get(self._admission.me)
        if known is not None:
            logger.warning(
                "the data folder was restored, or its file `life` was lost: this broker continues %s",
                known.incarnation,
                extra=event("broker.life_continued"),
            )
            await self._change_life(lambda: self._life.follow(known.life, known.incarnation))

    async def _change_life(self, change: Callable[[], None]) -> None:
        """Raises StorageUnavailable."""
        try:
            await asyncio.to_thread(change)
        except OSError as error:
            raise StorageUnavailable(
                f"{self._data_dir.path / 'life'} cannot be written: {error.strerror or error}. Free space on that "
                "disk; this broker tries again"
            ) from error
