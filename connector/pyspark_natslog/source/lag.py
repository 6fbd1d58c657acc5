"""How far a query is behind, for the progress that Spark reports.

    {"orders": {"id": "3ef2…", "offset": 5000, "rows_behind": 42, "bytes_behind": 7310, "seconds_behind": 1.2,
                "rows_lost": 0}}

Theory of operation. Spark requests the latest offsets right after it has planned a batch, so the lag is what the batch
leaves unread. For most queries that is nothing; then no request is made, and all values are 0. Otherwise rows are a
difference of offsets; bytes and seconds come from a broker, by one request for all streams.

Invariant. The report never fails, and never waits longer than `_WAIT_S`. Values that are unknown by then are null.
After a failure or a slow answer no request is made for `_PAUSE_S`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from natslog.client import ClientOptions, NatslogClient
from pyspark_natslog.options import in_passing

logger = logging.getLogger("pyspark_natslog")

_WAIT_S = 0.1
_PAUSE_S = 5.0
_LOG_EVERY_S = 60.0

Number = TypeVar("Number", int, float)
OffsetsJson: TypeAlias = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class StreamLag:
    """The part of a stream that a query has not read yet; None: unknown.

    `lost`: offsets of the stream that the query was to read and that were lost, since it was started.
    """

    rows: int | None
    bytes: int | None
    seconds: float | None
    lost: int | None = 0


class LagReport:
    """Adds the lag to the latest offsets. For one thread; picklable (a copy has no state).

    Args:
        servers, options: as of the source; requests for the lag are not retried, and have a shorter timeout.
        clock: seconds of a monotonic clock.
    """

    def __init__(
        self, servers: tuple[str, ...], options: ClientOptions, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._servers, self._options = servers, in_passing(options)
        self._clock = clock
        self._client = NatslogClient(servers, self._options)
        self._thread: ThreadPoolExecutor | None = None
        self._under_way: Future[dict[str, StreamLag]] | None = None
        self._paused_until_s = self._logged_until_s = float("-inf")

    def __reduce__(self) -> tuple[Any, ...]:
        return LagReport, (self._servers, self._options, self._clock)

    def added_to(self, latest: OffsetsJson, end: OffsetsJson) -> dict[str, Any]:
        """`latest` with the lag of a reader at `end` in each stream; both as in the checkpoint."""
        starts = {name: _position(name, at, end) for name, at in latest.items()}
        rows = {name: max(0, int(at["offset"]) - starts[name]) for name, at in latest.items()}
        lags = self._ask({name: starts[name] for name, behind in rows.items() if behind})
        return {name: dict(at) | _behind(rows[name], lags.get(name)) for name, at in latest.items()}

    def _ask(self, positions: dict[str, int]) -> dict[str, StreamLag]:
        """Makes the request in a thread, so that the query does not wait for a slow one."""
        if not positions or self._clock() < self._paused_until_s or self._is_busy():
            return {}
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="lag")
        self._under_way = self._thread.submit(self._asked, positions)
        try:
            return self._under_way.result(_WAIT_S)
        except TimeoutError:
            self._pause(f"no answer within {_WAIT_S * 1000:.0f} ms")
        except Exception as error:  # a query must not fail because of a report
            self._pause(f"{type(error).__name__}: {error}")
        return {}

    def _asked(self, positions: dict[str, int]) -> dict[str, StreamLag]:
        """In the thread."""
        answers = self._client.lags(positions).items()
        return {
            name: StreamLag(_if_known(lag["rows"], int), _if_known(lag["bytes"], int), _if_known(lag["seconds"], float))
            for name, lag in answers
            if lag is not None
        }

    def _is_busy(self) -> bool:
        return self._under_way is not None and not self._under_way.done()

    def _pause(self, why: str) -> None:
        now_s = self._clock()
        self._paused_until_s = now_s + _PAUSE_S
        if now_s >= self._logged_until_s:
            self._logged_until_s = now_s + _LOG_EVERY_S
            logger.warning(
                f"bytes_behind and seconds_behind are unknown for {_PAUSE_S:.0f} s; the query continues: {why}"
            )

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
        self._client.close()


NOTHING_BEHIND = {"rows_behind": 0, "bytes_behind": 0, "seconds_behind": 0.0}


def _position(name: str, latest: Mapping[str, Any], end: OffsetsJson) -> int:
    """The position of the reader: 0 in a stream that it has not read yet, or that was created again."""
    at = end.get(name)
    return int(at["offset"]) if at is not None and at["id"] == latest["id"] else 0


def _if_known(value: Any, kind: Callable[[Any], Number]) -> Number | None:
    """None where it is unknown to this reader."""
    return None if value is None else kind(value)


def _behind(rows: int, lag: StreamLag | None) -> dict[str, Any]:
    if rows == 0:
        lag = StreamLag(0, 0, 0.0)
    elif lag is None:
        lag = StreamLag(rows, None, None)
    # The broker computed it a little later, and excludes what retention and damage have removed.
    rows = rows if lag.rows is None else min(rows, lag.rows)
    return {"rows_behind": rows, "bytes_behind": lag.bytes, "seconds_behind": lag.seconds}
