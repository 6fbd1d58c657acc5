"""Settings of a stream that both APIs edit."""

from __future__ import annotations

import msgspec
import pytest

from natslog.jetstream.stream_config import (
    StreamConfigRequest,
    are_equal,
    checked,
    config_of,
    settings_of,
    updated_settings,
)
from natslog.model import Epoch, StreamId, StreamRecord, StreamSettings

S = 1_000_000_000
H = 3600 * S


def record_of(settings: StreamSettings) -> StreamRecord:
    return StreamRecord(
        name="A",
        id=StreamId("a" * 32),
        settings=settings,
        created_us=0,
        leader=None,
        leader_epoch=Epoch(1),
        replicas=(),
        isr=(),
    )


def shown_age(settings: StreamSettings) -> int:
    return config_of(record_of(settings)).max_age


@pytest.mark.parametrize("max_age", [0, 100_000_000, 60 * S, 2 * H, 8760 * H])
@pytest.mark.parametrize("was", [(None, None), (7200.0, None), (None, 3600.0), (5.0, 10.0), (7200.0, 3600.0)])
def test_age_that_the_api_shows_is_the_one_that_removes_messages(
    was: tuple[float | None, float | None], max_age: int
) -> None:
    """Also where natslog's own `max_age` was set in between."""
    before = StreamSettings(subject="A", ttl_s=was[0], max_age_s=was[1])
    config = checked(StreamConfigRequest(name="A", max_age=max_age, duplicate_window=100_000_000))
    after = updated_settings(before, config)
    assert shown_age(after) == max_age
    ages = [age for age in (after.ttl_s, after.max_age_s) if age is not None]
    assert min(ages, default=0) * S == max_age


def test_update_that_changes_nothing_keeps_what_only_natslog_has() -> None:
    was = StreamSettings(
        subject="A", compact=True, compression="zstd", max_age_s=3600.0, acks="reply", replicas=3, min_isr=3, group="g"
    )
    after = updated_settings(was, config_of(record_of(was)))
    assert msgspec.structs.replace(after, jetstream=None) == was


def test_configuration_survives_its_way_through_settings() -> None:
    config = checked(
        StreamConfigRequest(
            name="A",
            subjects=("a.>", "b"),
            description="text",
            max_msgs=5,
            max_bytes=1000,
            max_age=H,
            max_msgs_per_subject=2,
            max_msg_size=100,
            discard="new",
            discard_new_per_subject=True,
            storage="memory",
            num_replicas=3,
            compression="s2",
            first_seq=7,
            allow_direct=True,
            deny_delete=True,
            allow_rollup_hdrs=True,
            allow_msg_ttl=True,
            max_consumers=4,
            metadata={"k": "v"},
        )
    )
    assert are_equal(config_of(record_of(settings_of(config))), config)
