"""The JetStream API, as the rest of a broker uses it: `natslog.jetstream` has it, which is built on `node`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from natslog.model import StreamRecord
from natslog.node.replicas.consumer_records import ConsumerOrigin, ConsumerPosition
from natslog.wire.frames import Frames

if TYPE_CHECKING:
    from natslog.node.replicas.stream import HostedStream

StreamChange: TypeAlias = Literal["created", "updated", "deleted"]
JetStreamState: TypeAlias = Literal["off", "on", "domain", "forbidden", "conflict"]
"""How a broker serves the JetStream API: not at all; at `$JS.API`; because the NATS server has JetStream itself, only
at `$JS.natslog.API`; or not at all, because its NATS user lacks permissions, or another cluster serves it in the same
NATS account.
"""


class Consumers(Protocol):
    """The JetStream consumers of the streams that this broker leads."""

    async def lead(self, stream: HostedStream) -> None:
        """They are served by this broker from now on."""

    async def end(self, stream: HostedStream) -> None:
        """They are not served by this broker any more."""

    async def import_consumers(self, stream: HostedStream, origins: Sequence[ConsumerOrigin]) -> list[tuple[str, str]]:
        """Those of an imported stream become these. Returns the names of others, and why they were refused."""

    def positions(self, stream: HostedStream) -> list[ConsumerPosition]: ...

    async def numbers(self, stream: HostedStream, name: str | None, deadline_s: float) -> list[ConsumerPosition]:
        """Their positions with their numbers, of all or of one of them, as exactly as that is possible until
        `deadline_s` of `time.monotonic`.
        """

    def interest_changed(self, subject: str) -> None:
        """Subscribers of this subject, which may have wildcards, have come or gone at the leafnode connection."""

    def link_changed(self, is_up: bool) -> None:
        """The leafnode connection is up, or was lost."""


class Advisories(Protocol):
    """What is published of streams for JetStream clients."""

    def began_to_lead(self, stream: HostedStream) -> None:
        """This broker leads the stream, and has subscribed to its subjects: also after these were edited."""

    def changed(self, change: StreamChange, name: str) -> None:
        """This was done here; for a repeated request perhaps again."""


class JetStream(Protocol):
    """Attributes: `served`: how it is served; None until that was found out."""

    served: JetStreamState | None

    @property
    def consumers(self) -> Consumers: ...

    @property
    def advisories(self) -> Advisories: ...

    def direct_subjects(self, record: StreamRecord) -> tuple[str, ...]:
        """The subjects of direct requests, to which the leader of a stream subscribes."""

    def receive_direct(self, stream: HostedStream, frames: Frames) -> None:
        """Takes the requests to them."""

    def domain(self) -> str:
        """The JetStream domain that acks name, or empty."""

    async def states_here(self, names: list[str]) -> Any:
        """Of streams that are led here, for other brokers."""

    async def start(self) -> None:
        """When the broker has started. Returns when requests are answered, or it is known that they are not."""

    async def stop(self) -> None: ...
