"""How much a query has lost: each range once."""

from __future__ import annotations

import pickle

from pyspark_natslog.source.losses import Losses


def test_ranges_count_once_and_an_unknown_end_stays_unknown() -> None:
    losses = Losses()
    assert losses.rows_of("a") == 0
    for start, end in ((0, 40), (0, 40), (50, 60), (0, 45)):
        losses.add("a", start, end)
    assert losses.rows_of("a") == 55
    losses.add("b", 4, None)
    losses.add("b", 4, 9)
    assert losses.rows_of("b") is None
    assert losses.rows_of("c") == 0
    assert pickle.loads(pickle.dumps(losses)).rows_of("a") == 0, "a task counts nothing for the query"
