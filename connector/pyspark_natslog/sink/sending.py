"""What a task does with rows whose option `ack` is not given: `stored` where streams ack, `flush` elsewhere.

Theory of operation. The brokers are asked which streams record the subjects of the rows. Rows on subjects that streams
ack wait for these acks; other rows are confirmed by the NATS server, which is at most once and is logged. Where
`ackStreams` is given, each of these streams must record each subject. Rows of one subject stay in order.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from natslog.client.destinations import destinations
from natslog.client.publisher import BY_HEADER, BY_REPLY, Publisher, Rows
from natslog.errors import BrokerUnavailable, ConfigError, PublishFailed
from natslog.model import Ack
from natslog.wire.outgoing_rows import bad_subjects, check_rows
from pyspark_natslog.sink.options import SinkOptions

logger = logging.getLogger("pyspark_natslog")

Ways = npt.NDArray[np.uint8]

_SHOWN_SUBJECTS = 5
_FLUSH = 0
"""How rows are acked that no stream acks, beside the bits of `BY_REPLY` and `BY_HEADER`."""


class Sender:
    """Of one task; use it in a `with`."""

    def __init__(self, options: SinkOptions, publisher: Publisher) -> None:
        self._options, self._publisher = options, publisher
        self._last: tuple[Any, Ways] | None = None
        self._has_warned = False
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
        by_header = self._client is not None and bool((self._ways(pc.unique(subjects)) & BY_HEADER).any())
        return self._publisher.max_payload_bytes - (self._publisher.ack_header_bytes if by_header else 0)

    def send(self, rows: Rows, first_row: int = 0) -> None:
        """Raises NatslogError: as `Publisher.send`, or where no broker answers what is recorded."""
        if self._client is None:
            assert self._options.ack is not None, "given"
            self._publisher.send(rows, self._options.ack, first_row=first_row)
            return
        distinct = pc.unique(rows.subjects)
        ways = self._ways(distinct)
        different = np.unique(ways).tolist()
        if len(different) <= 1:
            self._send(rows, different[0] if different else BY_REPLY, first_row)
            return
        check_rows(rows, self.max_payload_bytes(distinct), first_row)  # before any of them is sent
        way_of = ways[pc.index_in(rows.subjects, distinct).to_numpy(zero_copy_only=False)]
        for way in different:
            self._send(rows.take(np.flatnonzero(way_of == way)), way, first_row)

    def _send(self, rows: Rows, way: int, first_row: int) -> None:
        ack: Ack = "flush" if way == _FLUSH else "stored"
        together = self._options.envelope and way != _FLUSH
        self._publisher.send(rows, ack, first_row=first_row, ack_to=way or BY_REPLY, envelope=together)

    def wait_for_acks(self) -> None:
        """Raises NatslogError: as `Publisher.wait_for_ack`."""
        self._publisher.wait_for_ack(self._options.ack or "stored")

    def _ways(self, subjects: Any) -> Ways:
        """How rows of each of these different subjects are acked; kept for the next batch, whose are often the same."""
        if self._last is None or not self._last[0].equals(subjects):
            refused = pc.fill_null(bad_subjects(subjects), True).to_numpy(zero_copy_only=False)  # by the publisher
            ways = np.full(len(subjects), BY_REPLY, np.uint8)
            if not refused.all():
                ways[~refused] = self._recorded(subjects.filter(pa.array(~refused)))
            self._last = (subjects, ways)
        return self._last[1]

    def _recorded(self, subjects: Any) -> Ways:
        assert self._client is not None, "it asks"
        try:
            options = self._options
            ways = destinations.ways(self._client, subjects, options.ack_streams, envelopes=options.envelope)
        except ConfigError as error:
            names = " or ".join(
                name for name, is_set in (("ackStreams", options.ack_streams), ("envelope", options.envelope)) if is_set
            )
            raise ConfigError(f"option {names}: {error.message}", option=names) from error
        except BrokerUnavailable as error:
            raise BrokerUnavailable(
                f"no broker stated which streams record the subjects of the rows ({error.message}). Correct "
                '.option("servers", …); or, if no stream is to ack the rows, set .option("ack", "flush"): they are '
                "then sent at most once"
            ) from error
        if self._options.ack is not None:
            return np.where(ways == _FLUSH, BY_REPLY, ways).astype(np.uint8)
        self._warn_of(subjects.filter(pa.array(ways == _FLUSH)))
        return ways

    def _warn_of(self, unacked: Any) -> None:
        """Once per task."""
        if len(unacked) == 0 or self._has_warned:
            return
        self._has_warned = True
        named = ", ".join(map(repr, unacked[:_SHOWN_SUBJECTS].to_pylist()))
        logger.warning(
            "no stream acks the subjects %s: their rows are sent at most once (ack flush). To store them, create a "
            'stream (natslog stream create); to accept this, set .option("ack", "flush")',
            named + (" …" if len(unacked) > _SHOWN_SUBJECTS else ""),
        )
