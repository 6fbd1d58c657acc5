"""Feature levels: what all brokers support, and who is in the way."""

from __future__ import annotations

import pytest

from natslog.cluster.features import FIRST_LEVEL, LATEST_LEVEL, blocking, require_supported, supported_by_all
from natslog.errors import UpgradeRequired


def test_the_latest_level_that_all_support() -> None:
    assert supported_by_all({1: (1, 3), 2: (1, 2)}, 1) == 2
    assert supported_by_all({1: (1, 3), 2: (2, 3)}, 2) == 3
    assert supported_by_all({1: (1, 3), 2: None}, 2) == 2, "a broker that is not connected may be an old one"
    assert supported_by_all({1: (1, 1)}, 2) == 2, "it is never lower than the level"


def test_brokers_that_are_missing_too_old_or_too_new_are_in_the_way() -> None:
    levels = {1: (1, 2), 2: (1, 1), 3: None, 4: (3, 4)}
    assert blocking(levels, 2) == [2, 3, 4]
    assert blocking({1: (1, 2)}, 2) == []


def test_levels_that_this_version_does_not_support_are_refused() -> None:
    require_supported(FIRST_LEVEL, "it")
    require_supported(LATEST_LEVEL, "it")
    with pytest.raises(UpgradeRequired, match=f"it is at feature level {LATEST_LEVEL + 1}.*upgrade this broker"):
        require_supported(LATEST_LEVEL + 1, "it")
    with pytest.raises(UpgradeRequired, match=r"it is at feature level 1.*natslog 0\.2\.0.*finalize-upgrade"):
        require_supported(1, "it")
