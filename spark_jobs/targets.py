"""Shared by jobs that publish to subjects: their options, and the checks of the target before Spark starts."""

from __future__ import annotations

import argparse
import os
from typing import Any

from job_credentials import add_nats_login, nats_credentials
from job_support import duration_s
from pyspark.sql import Column
from pyspark.sql import functions as f
from subject_mapping import SubjectMapping, covers, overlap

from natslog.client import NatslogClient
from natslog.client.publisher import Publisher
from natslog.config import DEFAULT_NATS_URL
from natslog.errors import ConfigError
from natslog.model import subjects_of
from natslog.units import parse_duration_s

MAPPING_HELP = (
    "subjects: in --to-subject, {1} stands for what the first * of the stream's subject (or of --subject-filter)\n"
    "covers, a last token > for what its > covers, {subject} for the whole subject"
)
_OF_TRANSPORT = ("nats-msg-id", "natslog-key")
_CONDITION = "nats-expected-"


def add_target_arguments(parser: argparse.ArgumentParser) -> None:
    """Where rows go."""
    target = parser.add_argument_group("where rows go")
    target.add_argument(
        "--to-subject", required=True, metavar="SUBJECT", help="subject to publish to: 'replay.>', 'clean.{1}'"
    )
    target.add_argument("--nats", metavar="URL", help="NATS servers (default: NATS_URL, else nats://127.0.0.1:4222)")
    target.add_argument(
        "--ack-timeout",
        type=duration_s,
        default=30.0,
        metavar="DURATION",
        help="fail after this time without an ack (30s)",
    )
    add_nats_login(parser)


def nats_url(arguments: argparse.Namespace) -> str:
    """As given, else from the environment, else the default."""
    return str(arguments.nats or os.environ.get("NATS_URL") or DEFAULT_NATS_URL)


def checked_mapping(arguments: argparse.Namespace, info: dict[str, Any]) -> SubjectMapping:
    """The mapping of the stream's subjects, if the stream does not record what is published.

    Raises:
        ConfigError: it does, or the target does not fit the stream's subject. NatsUnavailable: no NATS server answers.
    """
    recorded = subjects_of(info)
    if arguments.subject_filter is None and len(recorded) > 1:
        raise ConfigError(
            f"stream {info['name']} records several subjects ({', '.join(recorded)}): choose those to publish with "
            "--subject-filter"
        )
    mapping = SubjectMapping.parse(arguments.subject_filter or recorded[0], arguments.to_subject)
    if any(overlap(one, mapping.target_wildcard) for one in recorded):
        raise ConfigError(
            f"--to-subject {arguments.to_subject} is recorded by stream {info['name']} itself ({', '.join(recorded)}): "
            "published messages would be read again; choose other subjects"
        )
    with Publisher(nats_url(arguments), credentials=nats_credentials(arguments)):
        return mapping


def recording_streams(client: NatslogClient, mapping: SubjectMapping) -> list[dict[str, Any]]:
    """The streams that record every subject of the target.

    Raises:
        ConfigError: there is none; the message contains the command that creates one.
    """
    wildcard = mapping.target_wildcard
    found = [info for info in client.streams() if any(covers(one, wildcard) for one in subjects_of(info))]
    if not found:
        raise ConfigError(
            f"no stream records {wildcard}: run natslog stream create NAME --subject '{wildcard}' --dedupe-window 1h"
        )
    return found


def shortest_window_s(recording: list[dict[str, Any]]) -> float:
    """The shortest deduplication window among these streams; 0 where one does not deduplicate."""
    return min(parse_duration_s(info["dedupe_window"]) if info["dedupe_window"] else 0.0 for info in recording)


def kept_headers(headers: Column) -> Column:
    """Headers without those of the first publication: the sink sets id and key itself, and conditions refer to offsets
    of the original stream.
    """

    def stays(pair: Column) -> Column:
        name = f.lower(pair["key"])
        return ~(name.isin(*_OF_TRANSPORT) | name.startswith(_CONDITION))

    return f.filter(f.coalesce(headers, f.array()), stays)
