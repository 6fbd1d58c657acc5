"""Wall clocks of broker processes that a test sets; the monotonic clock of such a process goes on."""

from __future__ import annotations

from pathlib import Path


class WallClock:
    """Of every process that is started with `environment`. Args: `path`: a file that says how far it is ahead."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.set(0)

    @property
    def environment(self) -> dict[str, str]:
        import libfaketime

        library = Path(libfaketime.__file__).parent / "vendor" / "libfaketime" / "src" / "libfaketime.so.1"
        return {
            "LD_PRELOAD": str(library),
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_TIMESTAMP_FILE": str(self.path),
            "FAKETIME_CACHE_DURATION": "1",
            "FAKETIME_FORCE_MONOTONIC_FIX": "0",  # with it, threads take eight times as long to reach each other
        }

    def set(self, ahead_s: int) -> None:
        """Processes that run see it within a second."""
        beside = self.path.with_suffix(".new")
        beside.write_text(f"{ahead_s:+d}\n")
        beside.replace(self.path)
