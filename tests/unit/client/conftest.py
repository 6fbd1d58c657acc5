"""Tests of clients share a process, and so the leader epochs that it knows."""

from __future__ import annotations

import pytest

from natslog.client import leader_epochs


@pytest.fixture(autouse=True)
def no_epochs_are_known() -> None:
    leader_epochs._seen.clear()
