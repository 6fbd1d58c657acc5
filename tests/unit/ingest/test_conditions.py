"""Which messages request what natslog does not have."""

from __future__ import annotations

import pytest

from natslog.ingest.conditions import are_of_fast_batches
from natslog.wire.frames import FrameParser


@pytest.mark.parametrize(
    ("reply", "is_one"),
    [
        (b"_INBOX.x.batch.10.ok.1.0.$FI ", True),
        (b"a.$FI ", True),
        (b".$FI ", True),
        (b"$FI ", False),
        (b"_INBOX.x.$FI.y ", False),
        (b"_INBOX.x.$fi ", False),
        (b"_INBOX.x$FI ", False),
        (b"FI ", False),
        (b"", False),
    ],
)
def test_a_message_of_a_fast_batch_is_known_by_the_end_of_its_reply_subject(reply: bytes, is_one: bool) -> None:
    parser = FrameParser()
    parser.receive_data(b"MSG a.$FI 1 _INBOX.other 1\r\nx\r\nMSG a.$FI 1 %b1\r\nx\r\n" % reply)
    (frames,) = parser.frames()
    assert are_of_fast_batches(frames).tolist() == [False, is_one]
