"""Messages as publishers send them, and the answers that they receive."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any


def frame(subject: str, headers: dict[str, str], at: int, payload: bytes = b"x") -> bytes:
    """As the NATS server delivers a message that awaits an ack."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = f"NATS/1.0\r\n{lines}\r\n".encode() if headers else b""
    sizes = f"{len(head)} {len(head) + len(payload)}" if head else f"{len(payload)}"
    return f"{'HMSG' if head else 'MSG'} {subject} 1 _INBOX.{at} {sizes}\r\n".encode() + head + payload + b"\r\n"


class Answers:
    """Of an ingest: by the number of the message its sequence, or why it is refused."""

    def __init__(self) -> None:
        self.by_number: dict[int, Any] = {}

    def send_now(self, protocol: bytes | memoryview) -> bool:
        for at, body in re.findall(rb"PUB _INBOX\.(\d+) \d+\r\n({[^\r]*})", bytes(protocol)):
            answer = json.loads(body)
            self.by_number[int(at)] = answer["error"]["description"] if "error" in answer else answer["seq"]
        return True

    async def wait_for(self, count: int) -> None:
        async with asyncio.timeout(60):
            while len(self.by_number) < count:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
