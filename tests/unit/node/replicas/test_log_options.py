"""What the feature level of the cluster permits in the logs of a broker."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from natslog.node.replicas.services import Services


@pytest.mark.parametrize(("level", "merges"), [(2, False), (3, True)])
def test_segments_are_merged_only_where_no_broker_of_0_2_0_may_come_back(level: int, merges: bool) -> None:
    woken: list[bool] = []
    config = SimpleNamespace(segment_bytes=1, segment_age_s=1.0, min_free_bytes=0)
    data_dir = SimpleNamespace(after="", stream_folder=lambda stream_id, name: Path("s"))
    services: Any = SimpleNamespace(
        config=config,
        data_dir=data_dir,
        group=SimpleNamespace(state=SimpleNamespace(feature_level=level)),
        store=None,
        kept_counts=None,
        recent_room=None,
        broker=SimpleNamespace(upkeep_due=lambda: woken.append(True)),
    )
    options = Services.log_folder(services, SimpleNamespace(id="ab", name="s")).options  # type: ignore[arg-type]
    assert options.merges_segments == merges
    options.closed_early()
    assert woken == [True], "maintenance seals it at once"
