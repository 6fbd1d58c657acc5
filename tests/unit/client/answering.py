"""Brokers of a test's own: each answers the same to each call, as a leader of some epoch would."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pyarrow as pa

from natslog.arrow.schema import MESSAGE_SCHEMA
from natslog.errors import NotFound, OffsetOutOfRange

ID = "ab" * 16


class Answers:
    """What a broker of the test answers: status, body, headers; by the call, the last part of the path."""

    def __init__(self, **calls: tuple[int, Any, dict[str, str]]) -> None:
        self.calls, self.asked = calls, 0
        self.seen: list[tuple[str, dict[str, str]]] = []

    def authorizations(self, call: str) -> list[str | None]:
        """What was sent with each such call, None where nothing was."""
        return [headers.get("authorization") for path, headers in self.seen if path == call]


@contextmanager
def serving() -> Iterator[Callable[[Answers], str]]:
    """Starts a broker that answers so; returns its URL."""
    with ExitStack() as stack:

        def start(answers: Answers) -> str:
            class Handler(BaseHTTPRequestHandler):
                def do_GET(self) -> None:
                    answers.asked += 1
                    call = self.path.split("?")[0].split("/")[-1]
                    answers.seen.append((call, {name.lower(): value for name, value in self.headers.items()}))
                    self.rfile.read(int(self.headers.get("Content-Length", 0)))
                    status, body, headers = answers.calls.get(call, (404, NotFound("no such path").to_json(), {}))
                    self.send_response(status)
                    for name, value in headers.items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(body if isinstance(body, bytes) else json.dumps(body).encode())

                do_POST = do_PUT = do_PATCH = do_DELETE = do_GET

                def log_message(self, *_: Any) -> None:
                    """Not into the tests' output."""

            server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
            Thread(target=server.serve_forever, daemon=True).start()
            stack.callback(server.server_close)
            stack.callback(server.shutdown)
            return f"http://127.0.0.1:{server.server_port}"

        yield start


def leader(epoch: int, high_watermark: int) -> Answers:
    """Everything that a leader of this epoch says."""
    headers = {"Natslog-Leader-Epoch": str(epoch), "Natslog-Stream-Id": ID}
    shown = {"name": "orders", "id": ID, "leader_epoch": epoch, "log_start_offset": 0, "high_watermark": high_watermark}
    beyond = OffsetOutOfRange("not in the log", id=ID, leader_epoch=epoch, high_watermark=high_watermark)
    ended = {"Natslog-Next-Offset": str(high_watermark), "Natslog-High-Watermark": str(high_watermark)}
    ended |= {"Natslog-Log-Start-Offset": "0", "Natslog-Batches": "exact"}
    return Answers(
        orders=(200, shown, headers),
        streams=(200, [shown], {"Natslog-Current": "true"}),
        positions=(200, [shown], {"Natslog-Current": "true"}),
        splits=(416, beyond.to_json(), {}),
        offsets=(200, {"offset": high_watermark, "timestamp": None}, headers),
        messages=(200, empty_table(), headers | ended),
    )


def empty_table() -> bytes:
    sink = pa.BufferOutputStream()
    pa.ipc.new_stream(sink, MESSAGE_SCHEMA).close()
    return bytes(sink.getvalue())
