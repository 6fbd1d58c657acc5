"""A bounded number of places for those who have not proved who they are: few of one address, and the oldest loses."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

Kept = TypeVar("Kept")


class Places(Generic[Kept]):
    """What is kept, by address, the oldest first."""

    def __init__(self, most: int, most_of_one: int) -> None:
        self._most, self._most_of_one = most, most_of_one
        self._kept: dict[Hashable, tuple[str, Kept]] = {}
        self._of_address: dict[str, dict[Hashable, None]] = {}

    def put(self, name: Hashable, address: str, kept: Kept) -> Kept | None:
        """Returns what lost its place: the oldest of this address, or of all."""
        self._kept[name] = (address, kept)
        own = self._of_address.setdefault(address, {})
        own[name] = None
        if len(own) > self._most_of_one:
            return self.take(next(iter(own)))
        return self.take_oldest() if len(self._kept) > self._most else None

    def take(self, name: Hashable) -> Kept | None:
        found = self._kept.pop(name, None)
        if found is None:
            return None
        address, kept = found
        own = self._of_address[address]
        del own[name]
        if not own:
            del self._of_address[address]
        return kept

    def take_oldest(self) -> Kept | None:
        name = next(iter(self._kept), None)
        return None if name is None else self.take(name)

    def __contains__(self, name: Hashable) -> bool:
        return name in self._kept

    def __len__(self) -> int:
        return len(self._kept)
