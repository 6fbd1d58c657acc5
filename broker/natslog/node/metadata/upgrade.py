"""The end of an upgrade: the feature level is raised when every broker of the cluster is connected and supports it."""

from __future__ import annotations

from collections.abc import Callable

from natslog.cluster.commands import FinalizeUpgrade
from natslog.cluster.features import LATEST_LEVEL, OWN_LEVELS, Levels, blocking
from natslog.errors import NotMetadataLeader, UpgradeBlocked
from natslog.model import BrokerId
from natslog.node.metadata.group import MetadataGroup
from natslog.node.peers.links import DialledLink


class Upgrade:
    """Args: `link_to`: the link to a broker, where it is up."""

    def __init__(self, group: MetadataGroup, link_to: Callable[[BrokerId], DialledLink | None]) -> None:
        self._group = group
        self._link_to = link_to

    def supported_levels(self) -> dict[BrokerId, Levels | None]:
        """Of every member, voter or learner, and every registered broker; None: it is not connected."""
        me = self._group.me
        members = {member.id for member in self._group.raft.membership.members}
        others = sorted((members | set(self._group.state.brokers)) - {me})
        return {me: OWN_LEVELS} | {broker: self._levels_of(broker) for broker in others}

    def _levels_of(self, broker: BrokerId) -> Levels | None:
        link = self._link_to(broker)
        peer = None if link is None else link.peer
        return None if peer is None else (peer.min_level, peer.max_level)

    async def finalize(self) -> bool:
        """Of the metadata leader: raises the feature level to the latest one of this version. Whether it was lower.

        Raises:
            NotMetadataLeader, MetadataUnavailable. UpgradeBlocked: a broker is too old, or not connected.
        """
        self._require_leader()
        level = self._group.state.feature_level
        if level >= LATEST_LEVEL:
            return False
        levels = self.supported_levels()
        if blockers := blocking(levels, LATEST_LEVEL):
            raise UpgradeBlocked(
                f"the feature level is still {level}: "
                + "; ".join(_remedy(broker, levels[broker]) for broker in blockers)
                + ". Then run natslog cluster finalize-upgrade again",
                feature_level=level,
                brokers=blockers,
            )
        return await self._group.propose(FinalizeUpgrade(level=LATEST_LEVEL))

    def _require_leader(self) -> None:
        if not self._group.is_leader:
            leader = self._group.leader
            raise NotMetadataLeader(f"broker {leader} leads the metadata group: send the request to it", leader=leader)


def _remedy(broker: BrokerId, levels: Levels | None) -> str:
    if levels is None:
        return f"broker {broker} is not connected: start it, or remove it (natslog cluster remove {broker})"
    return f"broker {broker} supports levels {levels[0]} to {levels[1]}, but not {LATEST_LEVEL}: upgrade it"
