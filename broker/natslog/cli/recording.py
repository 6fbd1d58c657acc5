"""Which streams record a subject, and whether a publisher to it can get acks: for `pub` and `bench pub`."""

from __future__ import annotations

from typing import Any

from natslog.client.client import NatslogClient
from natslog.model import subjects_of
from natslog.subjects import cover


def streams_on(client: NatslogClient, subject: str) -> list[dict[str, Any]]:
    """The streams that record the subject, as the brokers list them. Raises NatslogError: no broker answers."""
    return [stream for stream in client.streams() if cover(subjects_of(stream), subject)]


def no_stream_on(subject: str) -> str:
    return f"No stream records {subject!r}. Create one: natslog stream create NAME --subject …"


def why_never_acked(found: list[dict[str, Any]], subject: str) -> str | None:
    """Why no ack will ever come from these streams, which record the subject; None where one may."""
    if not found:
        return no_stream_on(subject)
    reasons = [_why_stream_never_acks(stream, subject) for stream in found]
    return None if None in reasons else " ".join(filter(None, reasons))


def _why_stream_never_acks(stream: dict[str, Any], subject: str) -> str | None:
    name = stream["name"]
    if stream.get("sealed"):
        return f"Stream {name} on {subject!r} is sealed, so it is permanently read-only: publish to another stream."
    acks = stream.get("acks", "reply")
    if acks not in ("reply", "any"):
        return f"Stream {name} records {subject!r} with the setting acks={acks}, so it does not ack to reply subjects."
    return None
