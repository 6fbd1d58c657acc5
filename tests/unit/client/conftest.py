"""Tests of clients share a process, and so the epochs that it has heard of."""

from __future__ import annotations

import pytest

from natslog.client import leader_epochs


@pytest.fixture(autouse=True)
def no_epochs_are_known() -> None:
    leader_epochs._seen.clear()
