"""The interface of the broker for its links."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from natslog.errors import NatslogError
from natslog.node.peers.handshake import Hello
from natslog.node.peers.keys import KeyRing
from natslog.node.peers.link_socket import LinkSocket
from natslog.node.peers.messages import Frame, Payload, Welcome


class LinkOwner(Protocol):
    """Decisions of the broker that links execute."""

    keys: KeyRing
    served: set[LinkSocket]

    @property
    def addresses(self) -> Sequence[str]:
        """Every URL at which this broker is dialled."""

    def hello(self, dialled: str = "") -> Hello: ...

    def check_peer(self, hello: Hello) -> None:
        """Raises ClusterMismatch if the other broker does not belong to this cluster. Changes nothing."""

    def admitted(self, peer: Hello) -> None:
        """The other side is authenticated and belongs to this cluster."""

    def welcome_for(self, hello: Hello) -> Welcome | None: ...

    def received(self, peer: Hello, frame: Frame, reply: Callable[[Frame, Payload | None], None]) -> None:
        """A frame on a link that the other side dialled."""

    def refused(self, error: NatslogError) -> None:
        """A link was refused; it is tried repeatedly."""

    def link_changed(self, peer: Hello, is_up: bool) -> None: ...

    def process_ended(self, peer: Hello) -> None:
        """The link was closed by the other side, where no process listens any more."""
