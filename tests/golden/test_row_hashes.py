"""The ids of rows never change: a batch that an older natslog has sent, or the sink in the JVM, is stored once."""

from __future__ import annotations

import json

from tests.conftest import GOLDEN
from tests.golden.make_row_hashes import vectors


def test_ids_and_digest_of_rows_are_the_golden_ones() -> None:
    assert json.loads(json.dumps(vectors())) == json.loads((GOLDEN / "row-hashes-v1.json").read_text())
