"""What operators change in the cluster, executed at the metadata leader: members, drains, where replicas are.

Each call names the request that it was asked for by, so that a retry is applied once. What may break a cluster is
checked before anything is changed.
"""

from __future__ import annotations

from collections.abc import Sequence

from natslog.cluster.commands import DrainBroker, ForgetBroker, MoveReplicas
from natslog.cluster.stream_changes import wanted_replicas
from natslog.consensus import Member, require_safe_change
from natslog.errors import ClusterMismatch, InvalidRequest, NotEnoughBrokers, NotMetadataLeader
from natslog.model import BrokerId
from natslog.node.cluster_node import ClusterNode
from natslog.node.metadata.entries import Request
from natslog.subjects import is_internal
from natslog.urls import normal_url


class Operations:
    """All but `move` raise NotMetadataLeader where another broker leads the metadata, and MetadataUnavailable."""

    def __init__(self, cluster: ClusterNode) -> None:
        self._cluster, self._group = cluster, cluster.group

    @property
    def brokers(self) -> list[BrokerId]:
        """Members of the metadata group, and brokers that are registered."""
        members = self._group.raft.membership.members
        return sorted({member.id for member in members} | set(self._group.state.brokers))

    def member(self, broker: BrokerId) -> Member | None:
        """Of the metadata group."""
        return self._group.raft.membership.find(broker)

    async def add(self, url: str) -> BrokerId:
        """Makes the broker at this URL a member; it becomes a voter when it has caught up.

        Raises:
            MembershipChanging. InvalidRequest: it is no URL of a broker. ClusterMismatch, BrokerUnavailable: why it
            cannot be added.
        """
        self._require_leader()
        url = normal_url(url)
        self._check_scheme(url)
        hello = await self._cluster.links.meet(url)
        if self.member(hello.broker) is None:
            if hello.cluster_id:
                raise ClusterMismatch(f"the broker at {url} already belongs to a cluster: give it an empty data folder")
            newcomer = Member(id=hello.broker, directory=hello.directory, url=hello.url, is_voter=False)
            await self._group.change_members(lambda membership: membership.with_member(newcomer))
        return hello.broker

    def _check_scheme(self, url: str) -> None:
        """Raises InvalidRequest: no broker of the cluster has a URL with this scheme. A broker serves either HTTP or
        TLS, so that such a URL would only be tried until the time is up.
        """
        urls = [*self._cluster.addresses, *(member.url for member in self._group.raft.membership.members)]
        schemes = sorted({known.partition("://")[0] for known in urls})
        if url.partition("://")[0] not in schemes:
            raise InvalidRequest(
                f"{url} must begin with {' or '.join(f'{scheme}://' for scheme in schemes)}, as the URLs of the other "
                "brokers do: a cluster uses TLS on all of its brokers or on none"
            )

    async def drain(self, broker: BrokerId, is_draining: bool, request: Request) -> None:
        """Its replicas move to other brokers, and its leaderships; or no longer.

        Raises:
            InvalidRequest: no such broker, or the last one. NotEnoughBrokers: a stream would have nowhere to go.
        """
        self._require_leader()
        if is_draining:
            self._check_drainable(broker)
        await self._group.propose(DrainBroker(broker=broker, is_draining=is_draining), request)

    def _check_drainable(self, broker: BrokerId) -> None:
        state = self._group.state
        self._require_known(broker)
        staying = [one for one in state.brokers if one != broker and not state.brokers[one].is_draining]
        if not staying:
            raise InvalidRequest(
                f"broker {broker} is the last one: a cluster must have at least one broker", broker=broker
            )
        for record in state.streams.values():
            is_fixed = not is_internal(record.name)  # an internal stream has fewer replicas then
            if is_fixed and broker in record.replicas and wanted_replicas(record) > len(staying):
                raise NotEnoughBrokers(
                    f"stream {record.name!r} has {wanted_replicas(record)} replicas, but without broker {broker} "
                    f"there are only {len(staying)} brokers: add one first (natslog cluster add URL)",
                    stream=record.name,
                    brokers=len(staying),
                )

    def _require_known(self, broker: BrokerId) -> None:
        if broker not in self.brokers:
            raise InvalidRequest(f"there is no broker {broker}; there are {self.brokers}", broker=broker)

    async def remove(self, broker: BrokerId, *, force: bool, request: Request) -> None:
        """Takes a broker out of the group. It must keep no replica, unless `force`: then it is permanently gone.

        Raises:
            InvalidRequest: no such broker; it keeps replicas; it is the last voter, or most of the others are down.
            MembershipChanging.
        """
        self._require_leader()
        if broker not in self.brokers and self._group.state.outcome_of(request.id) is not None:
            return  # asked again: it is done
        self._require_known(broker)
        keeps = sorted(record.name for record in self._group.state.streams.values() if broker in record.replicas)
        if keeps and not force:
            raise InvalidRequest(
                f"broker {broker} keeps {len(keeps)} streams: drain it first (natslog cluster remove does), or, if it "
                "is permanently lost, use --force",
                broker=broker,
                streams=keeps[:10],
            )
        await self._check_removable(broker)  # before anything is changed
        if keeps:
            await self._group.propose(DrainBroker(broker=broker, is_draining=True), request)
        else:  # before it is out: this broker may be the one, and decides nothing afterwards
            await self._group.propose(ForgetBroker(broker=broker), request)
        await self._check_removable(broker)
        await self._group.change_members(lambda membership: membership.without(broker))

    async def _check_removable(self, broker: BrokerId) -> None:
        """A membership is in force as soon as it is proposed: without a majority of it alive nothing would be decided
        any more, not even to take it back.
        """
        self._require_leader()
        membership = self._group.raft.membership
        require_safe_change(membership, membership.without(broker))
        left = set(membership.voters) - {broker}
        down = sorted(await self._group.unresponsive(left))
        self._require_leader()
        if broker in membership.voters and 2 * len(down) >= len(left):
            raise InvalidRequest(
                f"without broker {broker} the cluster would have no majority: of brokers {sorted(left)}, {down} are "
                "down. Start these brokers, or remove them first",
                broker=broker,
                down=down,
            )

    async def move(self, stream: str, brokers: Sequence[BrokerId], request: Request | None = None) -> None:
        """Where the stream's replicas are to be, the preferred leader first. Raises StreamNotFound, InvalidRequest."""
        await self._group.propose(MoveReplicas(name=stream, target=tuple(brokers)), request)

    def transfer_metadata(self, to: BrokerId) -> None:
        """Raises InvalidRequest: that broker is no voter, or is down."""
        self._group.transfer(to)

    def _require_leader(self) -> None:
        if not self._group.is_leader:
            raise NotMetadataLeader(
                f"broker {self._group.leader} leads the metadata group: send the request to it",
                leader=self._group.leader,
            )
