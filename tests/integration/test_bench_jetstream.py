"""The load of `make bench ARGS="--only jetstream"` against a real NATS server with JetStream, with few messages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.bench.jetstream.bucket_load import BUCKET_STREAM, bucket_config
from tests.bench.jetstream.buckets import answering
from tests.bench.jetstream.connection import Api
from tests.bench.jetstream.sides import Side, fill, jetstream_server, load
from tests.bench.sides import STREAM

_MESSAGES = 3000


@pytest.fixture(scope="module")
def running() -> Iterator[Side]:
    with jetstream_server() as side:
        yield side


@pytest.fixture
def side(running: Side) -> Iterator[Side]:
    """Without streams."""
    yield running
    api = Api(running.server.port)
    for name in api.request("STREAM.NAMES")["streams"]:
        api.request(f"STREAM.DELETE.{name}")


@pytest.mark.long
def test_pull_acks_each_message(side: Side) -> None:
    fill(side, _MESSAGES)
    assert load(side, "pull", messages=_MESSAGES, batch=500)["rate"] > 0
    info = Api(side.server.port).request(f"CONSUMER.INFO.{STREAM}.bench")
    assert (info["ack_floor"]["stream_seq"], info["num_ack_pending"], info["num_pending"]) == (_MESSAGES, 0, 0)


@pytest.mark.long
def test_members_of_a_work_queue_share_its_messages_and_empty_it(side: Side) -> None:
    fill(side, _MESSAGES, retention="workqueue")
    assert load(side, "queue", messages=_MESSAGES, batch=100, members=4)["rate"] > 0
    assert Api(side.server.port).request(f"STREAM.INFO.{STREAM}")["state"]["messages"] == 0


@pytest.mark.long
def test_push_receives_each_message(side: Side) -> None:
    fill(side, _MESSAGES)
    assert load(side, "push", messages=_MESSAGES)["rate"] > 0


@pytest.mark.long
def test_bucket_is_measured_with_many_requests_in_flight_and_one_at_a_time(side: Side) -> None:
    Api(side.server.port).request(f"STREAM.CREATE.{BUCKET_STREAM}", bucket_config())
    found = load(side, "bucket", messages=_MESSAGES, window=1000, singles=50)
    assert {"put", "get", "put_cpu_us", "get_cpu_us", "get_p50_us", "get_p99_us", "put_p50_us"} <= set(found)


@pytest.mark.long
def test_subscriber_answers_one_request_after_another() -> None:
    with answering() as subscriber:
        found = load(subscriber, "single", singles=50)
    assert 0 < found["at_once_p50_us"] <= found["at_once_p99_us"]


@pytest.mark.long
def test_failure_of_the_load_is_reported(side: Side) -> None:
    fill(side, _MESSAGES)
    with pytest.raises(AssertionError, match=r"a put failed: .*503"):
        load(side, "bucket", messages=100)
