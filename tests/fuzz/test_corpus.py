"""Every target over its seeds and its fixed corpus: what fuzzing found once is found again at once."""

from __future__ import annotations

import pytest

from tests.fuzz.target import CORPUS, MOST_BYTES
from tests.fuzz.targets import TARGETS


@pytest.mark.parametrize("name", TARGETS)
def test_invariant_holds_for_seeds_and_corpus(name: str) -> None:
    target = TARGETS[name]
    for data in target.seeds():  # the first one may compile kernels, which has no limit of time
        target.check(data)
    for data in [b"", *(path.read_bytes() for path in target.corpus())]:
        assert len(data) <= MOST_BYTES
        target.run(data)


def test_corpus_is_small_and_belongs_to_targets() -> None:
    files = [path for path in CORPUS.rglob("*") if path.is_file()]
    assert {path.parent.name for path in files} <= set(TARGETS)
    assert sum(path.stat().st_size for path in files) < 1 << 20
