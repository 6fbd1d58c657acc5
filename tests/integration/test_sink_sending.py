"""How a task of the Spark sink sends rows whose option `ack` is not given."""

from __future__ import annotations

import pyarrow as pa
import pytest

from natslog.client import NatslogClient
from natslog.client.publisher import Publisher, Rows
from natslog.errors import ConfigError, PublishFailed
from pyspark_natslog.sink.options import SinkOptions
from pyspark_natslog.sink.sending import Sender
from tests.harness import BrokerProcess, all_values


def rows(subjects: list[str | None]) -> Rows:
    values = pa.array([b"%d" % number for number in range(len(subjects))])
    return Rows(pa.array(subjects, pa.string()), values)


@pytest.mark.long
def test_that_no_stream_acks_subjects_is_stated_once(
    broker: BrokerProcess, client: NatslogClient, nats_url: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    client.create_stream(name, f"{name}.a")
    client.create_stream(f"{name}-b", f"{name}.b", acks="header")
    client.create_stream(f"{name}-c", f"{name}.c", acks="never")
    options = SinkOptions.parse({"natsServers": nats_url, "servers": broker.url})
    with Publisher(nats_url, ack_timeout_s=5) as publisher:
        sender = Sender(options, publisher)
        for letters in ("abcdabcd", "abcdabcde"):
            sender.send(rows([f"{name}.{letter}" for letter in letters]))
        sender.wait_for_acks()
        assert publisher.acked == 8
        limits = [sender.max_payload_bytes(pa.array([f"{name}.{letter}"])) for letter in "ab"]
        assert limits == [publisher.max_payload_bytes, publisher.max_payload_bytes - publisher.ack_header_bytes]
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(f"no stream acks the subjects '{name}.c', '{name}.d': their rows are sent at most once")
    assert all_values(client, name) == [b"0", b"4", b"0", b"4"]
    assert all_values(client, f"{name}-b") == [b"1", b"5", b"1", b"5"]


@pytest.mark.parametrize("ack", [{}, {"ack": "stored"}])
def test_streams_that_ack_in_a_header_are_found(
    broker: BrokerProcess, client: NatslogClient, nats_url: str, name: str, ack: dict[str, str]
) -> None:
    client.create_stream(name, name, acks="header")
    options = SinkOptions.parse({"natsServers": nats_url, "servers": broker.url} | ack)
    with Publisher(nats_url, ack_timeout_s=5) as publisher:
        sender = Sender(options, publisher)
        sender.send(rows([name] * 10))
        sender.wait_for_acks()
        assert publisher.acked == 10


def test_rows_that_cannot_be_sent_are_named_by_their_numbers_and_none_is_sent(
    broker: BrokerProcess, client: NatslogClient, nats_url: str, name: str
) -> None:
    client.create_stream(name, f"{name}.a")
    options = SinkOptions.parse({"natsServers": nats_url, "servers": broker.url})
    with Publisher(nats_url) as publisher:
        sender = Sender(options, publisher)
        bad = rows([f"{name}.a", f"{name}.unrecorded", f"{name}.unrecorded", "a..b"])
        with pytest.raises(PublishFailed, match="row 103 .subject 'a..b'.") as failed:
            sender.send(bad, first_row=100)
        assert failed.value.facts["rows"] == [103]
        sender.wait_for_acks()
    assert all_values(client, name) == []


def test_named_stream_that_does_not_record_or_ack_the_subject_is_an_error(
    broker: BrokerProcess, client: NatslogClient, nats_url: str, name: str
) -> None:
    client.create_stream(name, f"{name}.>")
    client.create_stream(f"{name}-never", f"{name}.never", acks="never")
    for subject, stream, words in (
        (f"{name}.a", "other", f"stream 'other' does not record the subject '{name}.a'; streams that do: {name}"),
        (f"{name}.never", f"{name}-never", f"stream '{name}-never' does not ack the subject '{name}.never'"),
    ):
        options = SinkOptions.parse({"natsServers": nats_url, "servers": broker.url, "ackStreams": stream})
        with Publisher(nats_url, streams=options.ack_streams) as publisher:
            with pytest.raises(ConfigError, match=words):
                Sender(options, publisher).send(rows([subject]))


def test_stream_that_was_created_a_moment_ago_is_found(
    broker: BrokerProcess, client: NatslogClient, nats_url: str, name: str
) -> None:
    options = SinkOptions.parse({"natsServers": nats_url, "servers": broker.url})
    for acked in (0, 4):
        with Publisher(nats_url, ack_timeout_s=5) as publisher, Sender(options, publisher) as sender:
            sender.send(rows([name] * 4))
            sender.wait_for_acks()
            assert publisher.acked == acked
        if not acked:
            client.create_stream(name, name)


def test_settings_that_changed_are_found_after_a_failure(
    broker: BrokerProcess, client: NatslogClient, nats_url: str, name: str
) -> None:
    client.create_stream(name, name)
    options = SinkOptions.parse({"natsServers": nats_url, "servers": broker.url})

    def send() -> None:
        with Publisher(nats_url, ack_timeout_s=1) as publisher, Sender(options, publisher) as sender:
            sender.send(rows([name] * 4))
            sender.wait_for_acks()

    send()
    client.edit_stream(name, acks="header")
    with pytest.raises(PublishFailed):
        send()
    send()
