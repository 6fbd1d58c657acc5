"""The load of each line. A process of its own, so that only what the server side does is in its processor time.

    python -m tests.bench.jetstream.load pull PORT PID,PID --messages 400000 --batch 500
    python -m tests.bench.jetstream.load queue PORT PID,PID --messages 400000 --batch 100 --members 4
    python -m tests.bench.jetstream.load push PORT PID,PID --messages 400000
    python -m tests.bench.jetstream.load bucket PORT PID,PID --messages 200000 --window 1000 --singles 2000
    python -m tests.bench.jetstream.load single PORT PID,PID --singles 2000

The processes are those whose time is measured. Prints one line of JSON. Streams exist and are full; consumers are
created here. Every run verifies what it received, and fails where that is not what was published.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence

from natslog.wire.frames import FrameParser
from tests.bench.jetstream import bucket_load
from tests.bench.jetstream.connection import acks_of
from tests.bench.jetstream.consumer_load import pull, push
from tests.bench.processor_time import processor_seconds

Figures = dict[str, float]


def figures(name: str, pids: Sequence[int], run: Callable[[], int]) -> Figures:
    """Rate, processor time of the server side for a row in µs, and what share of a core this process used itself.

    Args:
        run: returns how many rows it had.
    """
    before, started, own = processor_seconds(pids), time.perf_counter(), time.process_time()
    rows = run()
    taken, own = time.perf_counter() - started, time.process_time() - own
    used = processor_seconds(pids) - before
    return {name: rows / taken, f"{name}_cpu_us": used / rows * 1e6, f"{name}_load_core_share": own / taken}


def warm_up() -> None:
    """Loads the kernels."""
    parser = FrameParser()
    parser.receive_data(b"MSG a 1 b 1\r\nx\r\n")
    assert [acks_of(frames).tobytes() for frames in parser.frames()] == [b"PUB b 4\r\n+ACK\r\n"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("how", choices=["pull", "queue", "push", "bucket", "single"])
    parser.add_argument("port", type=int)
    parser.add_argument("pids", type=lambda text: [int(pid) for pid in text.split(",")])
    parser.add_argument("--messages", type=int, default=400_000)
    parser.add_argument("--batch", type=int, default=500)
    parser.add_argument("--members", type=int, default=1)
    parser.add_argument("--window", type=int, default=1000)
    parser.add_argument("--singles", type=int, default=2000)
    given = parser.parse_args()
    warm_up()
    found: Figures = {}
    match given.how:
        case "pull" | "queue":
            run = pull(given.port, given.messages, given.batch, given.members)
            found = figures("rate", given.pids, run)
        case "push":
            found = figures("rate", given.pids, push(given.port, given.messages))
        case "bucket":
            bucket = bucket_load.Bucket(given.port)
            bucket.put(bucket_load.KEYS, given.window)
            found |= figures("put", given.pids, lambda: bucket.put(given.messages, given.window))
            bucket.verify()
            found |= figures("get", given.pids, lambda: bucket.get(given.messages, given.window))
            singles = {"get": bucket_load.get_requests, "put": bucket_load.put_requests}
            found |= bucket_load.single_latencies(given.port, singles, given.singles)
        case "single":
            singles = {"at_once": bucket_load.requests_to_subscriber}
            found = bucket_load.single_latencies(given.port, singles, given.singles)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
