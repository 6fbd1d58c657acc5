"""An answer that several requests send is counted once, and kept until the last of them has sent it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from natslog.http import answers
from natslog.http.answers import Answers


@pytest.mark.parametrize("in_memory_bytes", [1 << 20, 0], ids=["in memory", "in a file"])
def test_shared_answer_is_counted_once_until_the_last_request_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_memory_bytes: int
) -> None:
    monkeypatch.setattr(answers, "IN_MEMORY_BYTES", in_memory_bytes)

    async def share() -> None:
        kept = Answers(tmp_path, min_free_bytes=0)
        body = memoryview(bytes(10_000))
        with await kept.keep(body) as answer:
            held = kept.held_bytes, kept.disk_bytes
            assert sum(held) >= 10_000
            with answer:
                assert (kept.held_bytes, kept.disk_bytes) == held
            assert (kept.held_bytes, kept.disk_bytes) == held
        assert (kept.held_bytes, kept.disk_bytes) == (0, 0)
        kept.close()

    asyncio.run(share())
