"""The size of a message against the bytes that nats-server would count."""

from __future__ import annotations

import pyarrow as pa
import pytest

from natslog.arrow.schema import HEADERS_TYPE
from natslog.ingest.message_sizes import first_larger, split_by_size
from natslog.wire.frames import FrameParser


def test_frames_count_with_header_block_and_payload() -> None:
    block = b"NATS/1.0\r\nA: b\r\n\r\n"
    parser = FrameParser()
    parser.receive_data(
        b"MSG o 1 10\r\n0123456789\r\n"
        b"MSG o 1 11\r\n0123456789X\r\n" + b"HMSG o 1 %d %d\r\n%s123\r\n" % (len(block), len(block) + 3, block)
    )
    (frames,) = parser.frames()
    for limit, kept in ((10, 1), (11, 2), (len(block) + 2, 2), (len(block) + 3, 3)):
        fitting, large = split_by_size(frames, limit)
        assert (len(fitting.rows), len(large.rows)) == (kept, 3 - kept), limit
    assert split_by_size(frames, 1000)[0] is frames


ROWS = pa.RecordBatch.from_pydict(
    {
        "value": pa.array([b"12345", b"", b"1", b"123"], pa.binary()),
        "key": pa.array([None, b"kk", None, b""], pa.binary()),
        "headers": pa.array(
            [None, [{"key": "A", "value": "bc"}, {"key": "D", "value": ""}], [], [{"key": "é", "value": "x"}]],
            HEADERS_TYPE,
        ),
    }
)
BLOCKS = [
    b"",
    b"NATS/1.0\r\nNatslog-Key: kk\r\nA: bc\r\nD: \r\n\r\n",
    b"NATS/1.0\r\n\r\n",
    "NATS/1.0\r\nNatslog-Key: \r\né: x\r\n\r\n".encode(),
]


@pytest.mark.parametrize("at", range(4))
def test_rows_count_as_the_messages_that_they_would_be(at: int) -> None:
    size = len(BLOCKS[at]) + len(ROWS.column("value")[at].as_py())
    row = ROWS.slice(at, 1)
    assert first_larger(row, size) is None
    assert first_larger(row, size - 1) == (0, size)


def test_the_first_larger_row_is_named() -> None:
    assert first_larger(ROWS, 20) == (1, len(BLOCKS[1]))
    assert first_larger(ROWS, 1000) is None
    assert first_larger(ROWS.slice(0, 0), 1) is None
    assert first_larger(ROWS.select(["value"]), 4) == (0, 5)
