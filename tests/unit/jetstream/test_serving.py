"""When the consumers of a stream begin to be served: again, where something could not be read or attached."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from natslog.errors import CorruptLog, FileUnavailable, NatslogError
from natslog.jetstream.consumers import serving as serving_module
from natslog.jetstream.consumers.serving import ConsumerServing


@pytest.mark.parametrize(
    ("errors", "begun"),
    [
        ([], 1),
        ([FileUnavailable("too many open files"), FileUnavailable("too many open files")], 3),
        ([CorruptLog("damaged")], 1),
    ],
)
def test_consumers_that_cannot_be_begun_now_are_tried_again(
    monkeypatch: pytest.MonkeyPatch, errors: list[NatslogError], begun: int
) -> None:
    monkeypatch.setattr(serving_module, "_BEGIN_AGAIN_S", 0.001)
    left, calls = list(errors), 0

    class Led:
        has_begun = False

        async def begin(self) -> None:
            nonlocal calls
            calls += 1
            if left:
                raise left.pop(0)
            self.has_begun = True

    async def run() -> None:
        stream: Any = SimpleNamespace(name="orders", has_companion_records=True)
        led: Any = Led()
        serving: Any = object.__new__(ConsumerServing)
        serving._turn = asyncio.Lock()
        serving._led = SimpleNamespace(get=lambda one: led if one is stream else None)
        async with asyncio.timeout(30):
            await serving._begin(stream, led)
        assert led.has_begun == (not any(not error.retriable for error in errors))

    asyncio.run(run())
    assert calls == begun
