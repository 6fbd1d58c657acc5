"""What `natslog.client.confirming` asks before a loss is reported: the state by the newest leader."""

from __future__ import annotations

from natslog.client import NatslogClient
from natslog.errors import StreamNotFound
from pyspark_natslog.source.selection import StreamState


def newest(client: NatslogClient, stream: str) -> StreamState | None:
    """The state by the leader of the newest epoch; None if there is no such stream. Raises NatslogError."""
    try:
        return StreamState.of(client.newest_position(stream))
    except StreamNotFound:
        return None
