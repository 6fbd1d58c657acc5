"""What a task does with rows whose option `ack` is not given: `stored` where streams ack, `flush` elsewhere.

Theory of operation. The brokers are asked which streams record the subjects of the rows. Rows on subjects that streams
ack wait for these acks; other rows are confirmed by the NATS server, which is at most once and is logged. Where
`ackStreams` is given, each of these streams must record each subject. Rows of one subject stay in order.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow.compute as pc

from natslog.client.destinations import Destination, destinations
from natslog.client.publisher import BY_HEADER, BY_REPLY, Publisher, Rows
from natslog.errors import BrokerUnavailable, ConfigError, InvalidRequest, PublishFailed
from natslog.model import Ack
from natslog.subjects import check_subject
from natslog.wire.outgoing_rows import check_rows
from pyspark_natslog.sink.options import SinkOptions

logger = logging.getLogger("pyspark_natslog")

_SHOWN_SUBJECTS = 5
_FLUSH = 0
"""How rows are acked that no stream acks, beside the bits of `BY_REPLY` and `BY_HEADER`."""


class Sender:
    """Of one task; use it in a `with`."""

    def __init__(self, options: SinkOptions, publisher: Publisher) -> None:
        self._options, self._publisher = options, publisher
        self._ack_to: dict[str | None, int] = {}
        self._client = options.client() if options.asks_brokers else None

    def __enter__(self) -> Sender:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._client is not None:
            if isinstance(error, PublishFailed):
                destinations.forget(self._client.servers)  # the streams may have changed
            self._client.close()

    def max_payload_bytes(self, subjects: Any) -> int:
        """Of rows on these subjects, without the header in which their acks are requested. Raises as `send`."""
        by_header = self._client is not None and any(way & BY_HEADER for way in self._ways(pc.unique(subjects)))
        return self._publisher.max_payload_bytes - (self._publisher.ack_header_bytes if by_header else 0)

    def send(self, rows: Rows, first_row: int = 0) -> None:
        """Raises NatslogError: as `Publisher.send`, or where no broker answers what is recorded."""
        if self._client is None:
            assert self._options.ack is not None, "given"
            self._publisher.send(rows, self._options.ack, first_row=first_row)
            return
        distinct = pc.unique(rows.subjects)
        ways = self._ways(distinct)
        if len(set(ways)) <= 1:
            self._send(rows, ways[0] if ways else BY_REPLY, first_row)
            return
        check_rows(rows, self.max_payload_bytes(distinct), first_row)  # before any of them is sent
        way_of = np.array(ways)[pc.index_in(rows.subjects, distinct).to_numpy(zero_copy_only=False)]
        for way in sorted(set(ways)):
            self._send(rows.take(np.flatnonzero(way_of == way)), way, first_row)

    def _send(self, rows: Rows, way: int, first_row: int) -> None:
        ack: Ack = "flush" if way == _FLUSH else "stored"
        self._publisher.send(rows, ack, first_row=first_row, ack_to=way or BY_REPLY)

    def wait_for_acks(self) -> None:
        """Raises NatslogError: as `Publisher.wait_for_ack`."""
        self._publisher.wait_for_ack(self._options.ack or "stored")

    def _ways(self, subjects: Any) -> list[int]:
        """How rows of each subject are acked."""
        texts: list[str | None] = subjects.to_pylist()
        new = [text for text in texts if text is not None and text not in self._ack_to and _is_plain(text)]
        if new:
            self._note(self._recorded(new))
        return [self._ack_to.get(text, BY_REPLY) for text in texts]  # what is not plain is refused by the publisher

    def _recorded(self, subjects: list[str]) -> Mapping[str, Destination]:
        assert self._client is not None, "it asks"
        try:
            return destinations.of(self._client, subjects, self._options.ack_streams)
        except BrokerUnavailable as error:
            raise BrokerUnavailable(
                f"no broker stated which streams record the subjects of the rows ({error.message}). Correct "
                '.option("servers", …); or, if no stream is to ack the rows, set .option("ack", "flush"): they are '
                "then sent at most once"
            ) from error

    def _note(self, found: Mapping[str, Destination]) -> None:
        for subject, destination in found.items():
            for name in self._options.ack_streams:
                self._require_acks(name, subject, destination)
            self._ack_to[subject] = destination.ack_to or (_FLUSH if self._options.ack is None else BY_REPLY)
        unacked = [subject for subject in found if self._ack_to[subject] == _FLUSH]
        if unacked:
            shown = ", ".join(map(repr, unacked[:_SHOWN_SUBJECTS])) + (" …" if len(unacked) > _SHOWN_SUBJECTS else "")
            logger.warning(
                "no stream acks the subjects %s: their rows are sent at most once (ack flush). To store them, create a "
                'stream (natslog stream create); to accept this, set .option("ack", "flush")',
                shown,
            )

    @staticmethod
    def _require_acks(name: str, subject: str, destination: Destination) -> None:
        acks = destination.acks_of(name)
        if acks is None:
            others = ", ".join(stream for stream, _ in destination.streams) or "none"
            raise ConfigError(
                f"option ackStreams: stream {name!r} does not record the subject {subject!r}; streams that do: "
                f"{others}",
                option="ackStreams",
            )
        if not acks:
            raise ConfigError(
                f"option ackStreams: stream {name!r} does not ack the subject {subject!r}: it is sealed, or its "
                "setting acks is never",
                option="ackStreams",
            )


def _is_plain(subject: str) -> bool:
    try:
        check_subject(subject, wildcards=False)
    except InvalidRequest:
        return False
    return True
