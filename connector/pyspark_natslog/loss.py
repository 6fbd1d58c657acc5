"""The one place that decides what missing data means."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from natslog.errors import DataLoss
from pyspark_natslog.source_options import SourceOptions

logger = logging.getLogger("pyspark_natslog")


@dataclass(frozen=True, slots=True)
class Loss:
    """Offsets `[start, end)` of a stream that can no longer be read; `end` None where nobody knows."""

    stream: str
    start: int
    end: int | None
    why: str

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
        "a longer retention (natslog stream edit --max-age) prevents the next one",
        stream=loss.stream,
        start=loss.start,
        end=loss.end,
    )
