"""Is a history of creates and deletes of one name what some order of them would give? After Wing and Gong.

The name is a register of one bit. A create finds it absent and makes it, or finds it there; a delete finds it there,
or misses it. What ended before another began comes before it. One whose outcome is unknown took effect at some time
after it began, or never.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from tests.chaos.history import MetadataChange

_MOST_STATES = 200_000
# (what is there before, outcome) → what is there after
_STEPS = {
    (False, "made"): True,
    (True, "found"): True,
    (True, "gone"): False,
    (False, "missing"): False,
}


def by_name(changes: Iterable[MetadataChange]) -> dict[str, list[MetadataChange]]:
    found: dict[str, list[MetadataChange]] = defaultdict(list)
    for change in changes:
        found[change.name].append(change)
    return dict(found)


def is_linearizable(changes: Sequence[MetadataChange]) -> bool | None:
    """Of one name, absent at first. None where there is too much to try."""
    known = sorted((one for one in changes if one.outcome != "unknown"), key=lambda one: one.began_s)
    unknown = sorted((one for one in changes if one.outcome == "unknown"), key=lambda one: one.began_s)
    # A state: which of the known ones are done (all before `low`, and some after), which unknown ones, what is there.
    start = (0, frozenset[int](), frozenset[int](), False)
    seen, waiting = {start}, [start]
    while waiting:
        if len(seen) > _MOST_STATES:
            return None
        low, beyond, used, is_there = waiting.pop()
        left = [at for at in range(low, len(known)) if at not in beyond]
        if not left:
            return True
        must_begin_before = min(known[at].ended_s for at in left)
        options: list[tuple[int, frozenset[int], frozenset[int], bool]] = []
        for at in left:
            if known[at].began_s > must_begin_before:
                break
            after = _STEPS.get((is_there, known[at].outcome))
            if after is not None:
                done, new_low = beyond | {at}, low
                while new_low in done:
                    done -= {new_low}
                    new_low += 1
                options.append((new_low, done, used, after))
        for at, change in enumerate(unknown):
            after = change.kind == "create"
            if at not in used and change.began_s <= must_begin_before and after != is_there:
                options.append((low, beyond, used | {at}, after))
        for option in options:
            if option not in seen:
                seen.add(option)
                waiting.append(option)
    return False
