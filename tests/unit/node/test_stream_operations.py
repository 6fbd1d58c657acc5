"""What an operator may set depends on what all brokers of the cluster can read."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from natslog.cluster.features import STANDBY_LEVEL
from natslog.config import BrokerConfig
from natslog.errors import InvalidRequest
from natslog.model import StreamSettings
from natslog.node.stream_operations import StreamOperations
from tests.unit.cluster.test_roles import record_of


def operations(level: int) -> StreamOperations:
    """Of a cluster at this feature level, which nothing may be proposed to."""
    cluster: Any = SimpleNamespace(state=SimpleNamespace(feature_level=level))
    none: Any = None
    return StreamOperations(BrokerConfig(), cluster, none, none, none)


@pytest.mark.parametrize(
    "change",
    [
        lambda found: found.create("s", StreamSettings(subject="s", standby=True)),
        lambda found: found.edit(record_of(), {"standby": True}),
        lambda found: found.replace_settings(record_of(), StreamSettings(subject="s", standby=True)),
    ],
)
def test_standby_needs_a_feature_level_that_all_brokers_support(change: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"feature level {STANDBY_LEVEL}.*at level 2.*finalize-upgrade"):
        asyncio.run(change(operations(STANDBY_LEVEL - 1)))
