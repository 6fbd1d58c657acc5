"""Direct appends, the client's side: rows staged in parts of a bounded size, then committed together, once.

    with NatslogClient("http://127.0.0.1:9292") as client:
        uploader = PartUploader(client, "orders", "nightly-load", 42, subject="orders.new")
        for batch in batches:
            uploader.add(batch)
        client.commit_append("orders", "nightly-load", 42, uploader.finish())

A part is an Arrow IPC stream of some megabytes, made in memory and sent while the next one fills, so that it can be
sent again, to another broker too. A commit may be repeated as well: the broker recognises batches that it has appended.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from natslog import tracing
from natslog.client.asking import Asker, in_path
from natslog.errors import InvalidRequest
from natslog.model import Appended, OnConflict, PartReceipt

if TYPE_CHECKING:
    import pyarrow as pa

PART_BYTES = 16 * 1024 * 1024
_PIECE_BYTES = 8 * 1024 * 1024
_COMMIT_TIMEOUT_S = 120.0


class LastAppend(msgspec.Struct, frozen=True):
    """The batch that a producer committed last (None: none is known), and brokers to upload to.

    `digest`: of its rows, 32 hexadecimal digits; None where it is not known.
    """

    batch: int | None
    start: int | None
    end: int | None
    urls: tuple[str, ...] = ()
    digest: str | None = None


class AppendAsker(Asker):
    """The HTTP calls. Use `PartUploader` to upload rows."""

    def last_append(self, name: str, producer: str) -> LastAppend:
        """Raises StreamNotFound."""
        return self._json("GET", _path(name, producer), LastAppend)

    def stage_part(
        self,
        name: str,
        producer: str,
        batch: int,
        part: str,
        data: Any,
        *,
        attempt: int = 0,
        subject: str | None = None,
        prefer: Sequence[str] = (),
    ) -> PartReceipt:
        """Uploads one part: an Arrow IPC stream, in memory.

        Args:
            attempt: attempts at a part replace nothing of each other. `subject`: of rows without that column.

        Raises:
            InvalidRequest: a column or row is invalid. PayloadTooLarge: more than the size limit of one run.
        """
        path = f"{_path(name, producer, batch)}/parts/{in_path(part)}"
        query = {"attempt": attempt, "subject": subject}
        return self._json("PUT", path, PartReceipt, query=query, body=memoryview(data), prefer=prefer)

    def commit_append(
        self,
        name: str,
        producer: str,
        batch: int,
        parts: Sequence[PartReceipt],
        *,
        on_conflict: OnConflict = "fail",
        parts_within_s: float = 0.0,
        prefer: Sequence[str] = (),
    ) -> Appended:
        """Appends the parts' rows as one run; returns when it is committed. Everything else that was staged is deleted.

        Args:
            on_conflict: for a batch that is not above the producer's last one, nor that one again with the same rows:
                `fail`; `append` it all the same; or `skip` it, which is for the last batch only.
            parts_within_s: at least so long it waits for brokers that do not respond. A process that cannot stage the
                batch again should wait for as long as a restart may take.

        Raises:
            BatchConflict: see `on_conflict`. PartsMissing: not all parts are staged any more: stage the batch again.
        """
        body = {"parts": [msgspec.to_builtins(part) for part in parts], "on_conflict": on_conflict}
        timeout_s = max(self.options.timeout_s, _COMMIT_TIMEOUT_S)
        path = _path(name, producer, batch)
        patience: dict[str, Any] = {"timeout_s": timeout_s, "parts_within_s": parts_within_s}
        attributes = tracing.messaging("publish", "send", name)
        with tracing.span(
            "publish", "producer", attributes | {"natslog.producer": producer, "natslog.batch": batch}
        ) as span:
            appended = self._json("POST", path, Appended, body=body, prefer=prefer, **patience)
            span.set(tracing.of_run(name, appended.start, appended.end))
        return appended

    def abort_append(self, name: str, producer: str, batch: int) -> None:
        """Deletes the staged parts of a batch; committed rows are not affected."""
        self._ask("DELETE", _path(name, producer, batch))


def _path(name: str, producer: str, batch: int | None = None) -> str:
    path = f"/v1/streams/{in_path(name)}/appends/{in_path(producer)}"
    return path if batch is None else f"{path}/{batch}"


class PartUploader:
    """Stages the rows of one task of a batch: one part is sent while the next one fills; two are in memory.

    Args:
        producer: its batches are counted upwards. Names that begin with `write-` are those of producers with one
            batch: brokers forget them sooner.
        label: prefix of the names of its parts, which must be unique within the batch.
        subject: of rows without a column `subject`; None: the stream's own, where that is no wildcard.
    """

    def __init__(
        self,
        client: AppendAsker,
        stream: str,
        producer: str,
        batch: int,
        *,
        label: str = "0",
        attempt: int = 0,
        subject: str | None = None,
    ) -> None:
        self._last_append = partial(client.last_append, stream, producer)
        self._stage = partial(client.stage_part, stream, producer, batch, attempt=attempt, subject=subject)
        self._label = label
        self._prefer: tuple[str, ...] | None = None
        self._sink: pa.BufferOutputStream | None = None
        self._writer: Any = None
        self._uploads: list[Future[PartReceipt]] = []  # at most the last one is under way
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="natslog-append")

    def add(self, rows: pa.RecordBatch) -> None:
        """Raises as `stage_part`, of rows given before; InvalidRequest: other columns than rows before had."""
        import pyarrow as pa

        most = max(1, rows.num_rows * _PIECE_BYTES // max(1, rows.nbytes))
        for start in range(0, rows.num_rows, most):
            if self._sink is None:
                self._sink = pa.BufferOutputStream()
                self._writer = pa.ipc.new_stream(self._sink, rows.schema)
            try:
                self._writer.write_batch(rows.slice(start, most))
            except pa.ArrowException as error:
                raise InvalidRequest(
                    f"all rows of one batch must have the same columns ({error}): correct the rows"
                ) from error
            if self._sink.tell() >= PART_BYTES:
                self._send()

    def _send(self) -> None:
        assert self._sink is not None, "there is a part to be sent"
        self._writer.close()
        data, self._sink = self._sink.getvalue(), None
        if self._uploads:
            self._uploads[-1].result()
        self._uploads.append(self._thread.submit(self._upload, f"{self._label}-{len(self._uploads)}", data))

    def _upload(self, part: str, data: pa.Buffer) -> PartReceipt:
        if self._prefer is None:
            self._prefer = self._last_append().urls
        return self._stage(part, data, prefer=self._prefer)

    def finish(self) -> list[PartReceipt]:
        """The receipts that the commit must name. Raises as `stage_part`."""
        try:
            if self._sink is not None:
                self._send()
            return [upload.result() for upload in self._uploads]
        finally:
            self._thread.shutdown(wait=True)
