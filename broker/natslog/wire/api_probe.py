"""Who answers the JetStream API in an account of NATS: brokers of natslog state their cluster in the headers."""

from __future__ import annotations

import asyncio
import re
import time

from natslog.errors import NatsUnavailable
from natslog.wire.frames import Frames
from natslog.wire.layout import HEADER_LEN, PAYLOAD
from natslog.wire.link import NatsLink

BROKER_HEADER, CLUSTER_HEADER = "Natslog-Broker", "Natslog-Cluster"
PROBE_HEADER = b"Natslog-Probe: true\r\n"
"""Of a request of which only the headers of the answers are read: brokers leave out what takes time."""
_CLUSTER = re.compile(rf"^{CLUSTER_HEADER}: (\w+)\r$", re.MULTILINE)
_LATER_ANSWERS_S = 0.3
_NO_RECEIVER = "NATS/1.0 503"
_POLL_S = 0.01


async def headers_of_answers(link: NatsLink, subject: str, inbox: str, *, within_s: float) -> list[str] | None:
    """The headers of each answer to a request without a payload, without that of a server which has no receiver for
    it; None if the user may not ask.

    Args:
        within_s: until the first answer; others are waited for a little longer, as a server may answer after a broker.
            That there is no receiver is the only answer.

    Raises:
        NatsUnavailable.
    """
    forbidden, answers = link.forbidden, asyncio.Queue[str]()

    def receive(frames: Frames) -> None:
        for row in frames.rows:
            answers.put_nowait(bytes(frames.buffer[row[PAYLOAD] - row[HEADER_LEN] : row[PAYLOAD]]).decode())

    attachment = await link.attach((inbox,), receive)
    try:
        if not link.send_now(_request(subject, inbox)):
            raise NatsUnavailable(f"NATS at {link.shown_url} is not connected", url=link.shown_url)
        deadline_s = time.monotonic() + within_s
        while (  # noqa: ASYNC110 (a refusal sets no event)
            answers.empty() and link.forbidden == forbidden and time.monotonic() < deadline_s
        ):
            await asyncio.sleep(_POLL_S)
        if link.forbidden > forbidden:
            return None
        found = [] if answers.empty() else [answers.get_nowait()]
        if found and not found[0].startswith(_NO_RECEIVER):
            await asyncio.sleep(_LATER_ANSWERS_S)
        found += [answers.get_nowait() for _ in range(answers.qsize())]
        return [headers for headers in found if not headers.startswith(_NO_RECEIVER)]
    finally:
        await link.detach(attachment)


def _request(subject: str, inbox: str) -> bytes:
    headers = b"NATS/1.0\r\n" + PROBE_HEADER + b"\r\n"
    return f"HPUB {subject} {inbox} {len(headers)} {len(headers)}\r\n".encode() + headers + b"\r\n"


def is_of_broker(headers: str) -> bool:
    """Whether a broker of natslog has answered."""
    return BROKER_HEADER in headers


def clusters_in(headers: str) -> list[str]:
    """The id of the cluster of the broker that has answered; of an older one none."""
    return _CLUSTER.findall(headers)
