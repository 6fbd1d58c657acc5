"""natslog: durable, replayable streams for people who run NATS, and Spark on top of them.

`natslog.__version__` is the version of the installed package (`unknown` in a checkout that was never installed).
"""

from __future__ import annotations

__version__: str
__all__ = ["__version__"]


def __getattr__(name: str) -> str:
    """The version is read on first access: reading the package's metadata takes longer than this import."""
    if name == "__version__":
        from natslog.errors import natslog_version

        return natslog_version()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
