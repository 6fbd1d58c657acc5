"""The settings of a natslog stream that continues one of JetStream."""

from __future__ import annotations

from typing import Any

import pytest

from natslog.errors import InvalidRequest
from natslog.migration.importing import _combined
from natslog.migration.settings import settings_from
from natslog.model import JetStreamSettings
from natslog.stream_settings import parse_settings

CONFIG: dict[str, Any] = {
    "name": "S",
    "subjects": ["a.>", "b"],
    "retention": "workqueue",
    "max_msgs": 10,
    "max_age": 1_234_567_000,
    "duplicate_window": 1_234_567_000,
    "num_replicas": 3,
    "metadata": {"owner": "x", "_nats.ver": "2.15.1"},
    "allow_direct": True,
}


def test_settings_are_those_of_the_configuration() -> None:
    body, jetstream = settings_from(CONFIG, name="T")
    settings = parse_settings(body)
    assert (settings.subjects, settings.max_messages, settings.acks) == (("a.>", "b"), 10, "any")
    assert (settings.ttl_s, settings.dedupe_window_s) == (1.234567, 1.234567)
    assert (settings.replicas, settings.min_isr) == (3, 2)
    kept = JetStreamSettings(**jetstream)
    assert (kept.retention, kept.allow_direct, kept.metadata["owner"]) == ("workqueue", True, "x")
    assert "_nats.ver" not in kept.metadata


def test_replicas_may_be_others() -> None:
    settings = parse_settings(settings_from(CONFIG, name="T", replicas=1)[0])
    assert (settings.replicas, settings.min_isr) == (1, 1)


@pytest.mark.parametrize(
    ("field", "value"),
    [("mirror", {"name": "x"}), ("sources", [{"name": "x"}]), ("republish", {"src": ">", "dest": "x.>"})],
)
def test_field_that_is_not_supported_is_named_and_can_be_left_out(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"--ignore {field}"):
        settings_from(CONFIG | {field: value}, name="T")
    assert settings_from(CONFIG | {field: value}, name="T", ignored=[field]) == settings_from(CONFIG, name="T")


def test_field_that_does_not_exist_cannot_be_left_out() -> None:
    with pytest.raises(InvalidRequest, match="no such field"):
        settings_from(CONFIG, name="T", ignored=["mirrors"])


def test_placement_in_a_cluster_names_the_option_that_leaves_it_out() -> None:
    with pytest.raises(InvalidRequest, match="--ignore placement leaves it out"):
        settings_from(CONFIG | {"placement": {"cluster": "c1"}}, name="T")


def test_many_former_subjects_are_combined() -> None:
    assert _combined(["a", "b.c"]) == ["a", "b.c"]
    assert _combined([f"a.{at}" for at in range(100)]) == ["a", "a.>"]
    assert _combined([f"{at}.x" for at in range(100)]) == [">"]
