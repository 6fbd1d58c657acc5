"""The client's calls about cursors and lag."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from natslog.client.asking import Asker, Facts, in_path


class CursorCalls(Asker):
    """A part of `NatslogClient`."""

    def cursors(self, *, consumer: str | None = None, stream: str | None = None) -> list[dict[str, Any]]:
        """All, or those of one consumer or stream, each with its `lag` (None where the stream has no leader now). Then
        JetStream consumers, as cursors whose name is `jetstream:` and that of the consumer: they are read only, and
        have their numbers in `jetstream` (see `cursor`).
        """
        return self._json("GET", "/v1/cursors", list[Facts], query={"consumer": consumer, "stream": stream})

    def cursor(self, consumer: str, stream: str) -> dict[str, Any]:
        """`{consumer, stream, id, offset, timestamp, rewound, lag}`. `jetstream:NAME` is the JetStream consumer `NAME`,
        and has in addition `jetstream`: `{delivered, ack_floor, num_pending, num_ack_pending, num_redelivered,
        num_waiting}` as CONSUMER.INFO states them; None where it is not served. `num_pending` is None until it is
        counted.

        Raises:
            StreamNotFound, CursorNotFound.
        """
        return self._json("GET", _path(consumer, stream), Facts)

    def set_cursor(self, consumer: str, stream: str, offset: int, *, expected_id: str | None = None) -> dict[str, Any]:
        """Sets the cursor of `consumer`: `offset` is the next offset that it has not read.

        Args:
            expected_id: the stream's id, if it must still be that one.

        Raises:
            StreamNotFound, StreamRecreated, TooManyCursors. InvalidRequest: a wrong name or offset.
        """
        body: dict[str, Any] = {"offset": offset} | ({} if expected_id is None else {"id": expected_id})
        return self._json("PUT", _path(consumer, stream), Facts, body=body)

    def set_cursors(self, cursors: Iterable[tuple[str, str, int]]) -> int:
        """Sets many cursors, given as (consumer, stream, offset): all of them, or none where one is refused. At most
        10,000. Returns how many.

        Raises:
            StreamNotFound, TooManyCursors. InvalidRequest: a wrong name or offset.
        """
        body = {"cursors": [{"consumer": one, "stream": on, "offset": offset} for one, on, offset in cursors]}
        return int(self._json("POST", "/v1/cursors", Facts, body=body)["set"])

    def delete_cursor(self, consumer: str, stream: str) -> None:
        """Raises StreamNotFound, CursorNotFound."""
        self._ask("DELETE", _path(consumer, stream))

    def lag(self, name: str, offset: int | str | None = None, *, cursor: str | None = None) -> dict[str, Any]:
        """The lag of an offset (also `earliest` and `latest`), or of a consumer's cursor.

        Returns:
            `{offset, rows, bytes, seconds, lost_rows, beyond_rows, log_start_offset, high_watermark, id}`.

        Raises:
            StreamNotFound, CursorNotFound.
        """
        query = {"offset": offset, "cursor": cursor}
        return self._json("GET", f"/v1/streams/{in_path(name)}/lag", Facts, query=query)

    def lags(self, positions: Mapping[str, int]) -> dict[str, dict[str, Any] | None]:
        """The lag of an offset in each of several streams; None for a stream that has no leader now, or does not
        exist.
        """
        return self._json("POST", "/v1/lags", dict[str, Facts | None], body=dict(positions))


def _path(consumer: str, stream: str) -> str:
    return f"/v1/cursors/{in_path(consumer)}/{in_path(stream)}"
