"""What missing data means: every loss is reported here."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial

from natslog.client import NatslogClient
from natslog.client.confirming import confirmed
from natslog.errors import CorruptLog, DataLoss, NatslogError, StreamRecreated
from pyspark_natslog.source.confirming import newest
from pyspark_natslog.source.options import SourceOptions
from pyspark_natslog.source.selection import StreamState

logger = logging.getLogger("pyspark_natslog")


@dataclass(frozen=True, slots=True)
class Loss:
    """Offsets `[start, end)` of a stream that can no longer be read; `end` None where it is not known."""

    stream: str
    start: int
    end: int | None
    why: str
    remedy: str = "a longer retention (natslog stream edit --max-age) prevents further losses"

    def __str__(self) -> str:
        upto = "and later" if self.end is None else f"to {self.end - 1}"
        return f"stream {self.stream!r}: offsets {self.start} {upto} are lost: {self.why}"


def report_loss(options: SourceOptions, loss: Loss) -> None:
    """Raises the loss, or logs it and adds it to the `losses` of the options, by `failOnDataLoss`.

    Raises:
        DataLoss: with the range and the remedy.
    """
    if not options.fail_on_data_loss:
        logger.warning("%s; the query continues, because failOnDataLoss is false", loss)
        options.losses.add(loss.stream, loss.start, loss.end)
        return
    raise DataLoss(
        f'{loss}. Read them from a copy, or accept the loss: with .option("failOnDataLoss", "false") the query '
        f"continues after it; {loss.remedy}",
        stream=loss.stream,
        start=loss.start,
        end=loss.end,
    )


def left_of(
    client: NatslogClient,
    options: SourceOptions,
    stream: str,
    stream_id: str,
    start: int,
    end: int,
    error: NatslogError,
) -> tuple[int, int]:
    """The part of `[start, end)` that can still be read; the rest, lost between planning and reading, is reported as
    loss. The whole range if nothing is lost: the answer was outdated, and the range must be requested again.

    Raises:
        DataLoss: with `failOnDataLoss`. The error itself, if it is damage that its facts do not explain.
    """

    def lacks_some(state: StreamState | None) -> bool:
        if state is None or state.id != stream_id:
            return True
        return start < state.log_start_offset or end > state.high_watermark

    state = confirmed(partial(newest, client, stream), lacks_some)
    if state is None:
        report_loss(options, Loss(stream, start, end, "the stream was deleted"))
        return end, end
    if state.id != stream_id:
        if end <= (state.valid_to(stream_id) or 0):
            raise StreamRecreated(
                f"stream {stream!r} was restored from an export while the query was reading it: start the query again; "
                "it continues where it is",
                stream=stream,
            ) from error
        report_loss(options, recreated(stream, start, end, was=stream_id, is_now=state.id))
        return end, end
    if start < state.log_start_offset:
        lost_to = min(state.log_start_offset, end)
        report_loss(options, Loss(stream, start, lost_to, "retention or a purge removed these messages"))
        return lost_to, end
    if end > state.high_watermark:
        upto = max(start, state.high_watermark)
        report_loss(options, shorter(stream, upto, end, state.high_watermark))
        return start, upto
    if isinstance(error, CorruptLog):
        return _behind_damage(options, stream, start, end, error), end
    return start, end


def _behind_damage(options: SourceOptions, stream: str, start: int, end: int, error: CorruptLog) -> int:
    """Where reading continues after a damaged range that no in-sync replica has undamaged."""
    damaged_from, damaged_to = (error.facts.get(name) for name in ("start", "end"))
    if "file" not in error.facts or not isinstance(damaged_from, int) or not damaged_from <= start:
        raise error
    lost_to = end if not isinstance(damaged_to, int) else min(damaged_to, end)
    if lost_to <= start:
        raise error
    remedy = "restore the file from a copy (`natslog verify` checks it); replicas of a stream repair it automatically"
    report_loss(options, Loss(stream, start, lost_to, f"the broker has quarantined them: {error.message}", remedy))
    return lost_to


def recreated(stream: str, start: int, end: int | None, *, was: str, is_now: str) -> Loss:
    """Offsets of a deleted stream; another one has its name."""
    why = f"the stream was deleted and created again (id {is_now}, not {was})"
    return Loss(stream, start, end, why, "use another name for a stream with other messages")


def beyond_fork(stream: str, position: int, fork: int, *, was: str, is_now: str) -> Loss:
    """The stream was restored from an export that ends before the position of the query."""
    why = (
        f"the stream was restored from an export that ends at offset {fork} (its id is {is_now}, not {was}), and the "
        f"query has read the original up to {position}. From {fork} on the restored stream has other messages"
    )
    remedy = f"restore a newer export, or begin a new checkpoint at offset {fork} (startingOffsets)"
    return Loss(stream, fork, position, why, remedy)


def shorter(stream: str, start: int, end: int, high_watermark: int) -> Loss:
    """Offsets that were read or planned earlier and that the log no longer has."""
    why = f"the log ends at {high_watermark} and is shorter than before"
    return Loss(
        stream,
        start,
        end,
        why,
        "the cause is an older copy of a broker's disk, or a log that `natslog cluster recover` truncated",
    )
