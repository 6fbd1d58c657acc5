"""The one place that decides what missing data means."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial

from natslog.client import NatslogClient
from natslog.errors import CorruptLog, DataLoss, NatslogError
from pyspark_natslog.source.confirming import confirmed, newest
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
    remedy: str = "a longer retention (natslog stream edit --max-age) prevents the next one"

    def __str__(self) -> str:
        upto = "on" if self.end is None else f"to {self.end}"
        return f"stream {self.stream!r}: offsets {self.start} {upto} are lost: {self.why}"


def report_loss(options: SourceOptions, loss: Loss) -> None:
    """Fails, or says so and goes on, as `failOnDataLoss` wants it.

    Raises:
        DataLoss: with the range and the remedy.
    """
    if not options.fail_on_data_loss:
        logger.warning("%s; going on, as failOnDataLoss is false", loss)
        return
    raise DataLoss(
        f'{loss}. Read them from a copy, or accept the loss: .option("failOnDataLoss", "false") goes on behind it; '
        f"{loss.remedy}",
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
    """What can still be read of `[start, end)`, after what happened between planning and reading was reported as loss.
    All of it, where nothing is lost: the answer was outdated, and the range is to be asked for again.

    Raises:
        DataLoss: with `failOnDataLoss`. The error itself, where it is damage that the facts do not explain.
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
        report_loss(options, recreated(stream, start, end, was=stream_id, is_now=state.id))
        return end, end
    if start < state.log_start_offset:
        lost_to = min(state.log_start_offset, end)
        report_loss(options, Loss(stream, start, lost_to, "retention removed these messages"))
        return lost_to, end
    if end > state.high_watermark:
        upto = max(start, state.high_watermark)
        report_loss(options, shorter(stream, upto, end, state.high_watermark))
        return start, upto
    if isinstance(error, CorruptLog):
        return _behind_damage(options, stream, start, end, error), end
    return start, end


def _behind_damage(options: SourceOptions, stream: str, start: int, end: int, error: CorruptLog) -> int:
    """Damage on a broker's disk that no in-sync replica has whole."""
    damaged_from, damaged_to = (error.facts.get(name) for name in ("start", "end"))
    if "file" not in error.facts or not isinstance(damaged_from, int) or not damaged_from <= start:
        raise error
    lost_to = end if not isinstance(damaged_to, int) else min(damaged_to, end)
    if lost_to <= start:
        raise error
    remedy = "restore the file from a replica or a copy (`natslog verify` checks it); replicas repair it by themselves"
    report_loss(options, Loss(stream, start, lost_to, f"quarantined by the broker: {error.message}", remedy))
    return lost_to


def recreated(stream: str, start: int, end: int | None, *, was: str, is_now: str) -> Loss:
    """Offsets of a stream that is gone; another one has its name."""
    why = f"the stream was deleted and created again (id {is_now}, not {was})"
    return Loss(stream, start, end, why, "give a stream with other messages another name")


def shorter(stream: str, start: int, end: int, high_watermark: int) -> Loss:
    """Offsets that were once read, or known, and that the log does not have any more."""
    why = f"the log ends at {high_watermark}: it is shorter than it was"
    return Loss(
        stream, start, end, why, "a broker's disk was put back, or its log was cut by `natslog cluster recover`"
    )
