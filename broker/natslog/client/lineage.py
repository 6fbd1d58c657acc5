"""The lineage of a stream, as brokers show it: of which other streams positions are valid in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def lineage_in(shown: Mapping[str, Any]) -> dict[str, int]:
    """Id of a stream → the offset up to which its positions are valid in this one, restored from an export."""
    listed = shown.get("lineage")
    forks = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    return {
        str(fork["id"]): fork["offset"]
        for fork in forks
        if isinstance(fork.get("id"), str) and type(fork.get("offset")) is int
    }
