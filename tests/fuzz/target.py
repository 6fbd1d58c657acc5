"""What is fuzzed: the table of targets, and the limits that hold for all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

CORPUS = Path(__file__).parent / "corpus"
MOST_BYTES = 64 * 1024
"""Of an input."""
MOST_S = 5.0
"""CPU time for one input."""
MOST_ARROW_BYTES = 256 * 1024 * 1024
"""Of Arrow's memory, for one input. libFuzzer limits the memory of the process, `engine.MOST_RSS_MIB`."""

TARGETS: dict[str, Target] = {}


@dataclass(frozen=True, slots=True)
class Target:
    """One parser, or several that must agree.

    Attributes:
        invariant: the first sentences of the docstring of `check`. `tokens`: words of the format.
        most_arrow_bytes: its limit instead of `MOST_ARROW_BYTES`.
    """

    name: str
    invariant: str
    check: Callable[[bytes], None]
    seeds: Callable[[], Iterable[bytes]]
    tokens: tuple[bytes, ...]
    most_arrow_bytes: int

    def run(self, data: bytes) -> None:
        """Raises what `check` raises; AssertionError: the input takes too much time or memory."""
        started_s = time.process_time()
        self.check(data)
        took_s = time.process_time() - started_s
        assert took_s < MOST_S, f"{len(data)} bytes took {took_s:.1f} s of CPU time"
        peak_bytes = pa.default_memory_pool().max_memory() or 0
        assert peak_bytes < self.most_arrow_bytes, f"{len(data)} bytes took {peak_bytes} bytes of Arrow's memory"

    def corpus(self) -> list[Path]:
        return sorted(path for path in (CORPUS / self.name).glob("*") if path.is_file())


def target(
    name: str,
    seeds: Callable[[], Iterable[bytes]],
    tokens: Iterable[bytes] = (),
    most_arrow_bytes: int = MOST_ARROW_BYTES,
) -> Callable[[Callable[[bytes], None]], Callable[[bytes], None]]:
    """Registers a function `check(data)` with its docstring as the invariant."""

    def register(check: Callable[[bytes], None]) -> Callable[[bytes], None]:
        assert name not in TARGETS, f"two targets are named {name}"
        invariant = " ".join((check.__doc__ or "").split())
        assert invariant, f"the target {name} states no invariant"
        TARGETS[name] = Target(name, invariant, check, seeds, tuple(tokens), most_arrow_bytes)
        return check

    return register
