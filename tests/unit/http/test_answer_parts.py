"""A reader that leaves while its answer is planned leaves no open file behind."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from natslog.http.answer_parts import _held
from natslog.log import FileRange, ReadPlan
from natslog.log.batch_index import BatchIndex


def test_plan_that_comes_after_the_client_left_is_closed(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)

    async def leave_early() -> None:
        planning: asyncio.Future[ReadPlan] = asyncio.get_running_loop().create_future()
        handler = asyncio.create_task(_held(planning))
        await asyncio.sleep(0)
        handler.cancel()
        with pytest.raises(asyncio.CancelledError):
            await handler
        plan = ReadPlan(0)
        plan.ranges.append(FileRange(fd, tmp_path / "file", BatchIndex(), 0, 0))
        planning.set_result(plan)
        await asyncio.sleep(0)

    asyncio.run(leave_early())
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
