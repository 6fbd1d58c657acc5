"""Credentials of the jobs: from options or variables, to the client, the source and the sink; names of files only."""

from __future__ import annotations

import os
from typing import Any

import pytest

from pyspark_natslog.sink.options import SinkOptions
from pyspark_natslog.source.options import SOURCE_OPTIONS
from tests.spark.jobs_as_modules import enrich_stream, job_credentials, job_support, replay_range

BROKERS = {"token-file": "t", "tls-ca": "ca", "tls-cert": "c", "tls-key": "k"}
TLS = {"nats-tls-ca-file": "a", "nats-tls-cert-file": "tc", "nats-tls-key-file": "tk"}
LOGINS = [
    {"nats-creds-file": "file"},
    {"nats-nkey-file": "file", "nats-token-file": "token"},
    {"nats-user": "name", "nats-password-file": "file"},
    {"nats-user-file": "name", "nats-password-file": "file"},
]
ENRICH = ["--stream", "s", "--fields", "a int", "--to-subject", "x.>", "--checkpoint", "c"]
REPLAY = ["--stream", "s", "--to-subject", "x.>"]


@pytest.mark.parametrize("login", LOGINS, ids=" ".join)
@pytest.mark.parametrize("are_variables", [False, True])
@pytest.mark.parametrize(("job", "required"), [(enrich_stream, ENRICH), (replay_range, REPLAY)])
def test_credentials_reach_client_source_and_sink(
    monkeypatch: pytest.MonkeyPatch, job: Any, required: list[str], are_variables: bool, login: dict[str, str]
) -> None:
    given, values = list(required), BROKERS | TLS | login
    if are_variables:
        for name, value in values.items():
            monkeypatch.setenv(f"NATSLOG_{name.upper().replace('-', '_')}", value)
        monkeypatch.setenv("NATSLOG_NATS_TLS_HANDSHAKE_FIRST", "true")
    else:
        given += [text for name, value in values.items() for text in (f"--{name}", value)]
        given.append("--nats-tls-handshake-first")
    arguments = job.parser().parse_args(given)

    client = job_credentials.client_options(arguments)
    assert (client.token, client.token_file) == (None, "t")
    assert (client.tls_ca_file, client.tls_cert_file, client.tls_key_file) == ("ca", "c", "k")
    source = {"tokenFile": "t", "tlsCaFile": "ca", "tlsCertFile": "c", "tlsKeyFile": "k"}
    assert source.items() <= job_support.source_options(arguments, "value").items()
    assert set(source) <= set(SOURCE_OPTIONS)

    nats = job_credentials.nats_credentials(arguments)
    expected = {name.removeprefix("nats-").replace("-", "_"): value for name, value in (TLS | login).items()}
    assert {name: getattr(nats, name) for name in expected} == expected
    assert nats.tls_handshake_first
    assert SinkOptions.parse(job_credentials.nats_login(arguments)).credentials == nats


def test_without_credentials_no_option_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("NATSLOG_")]:
        monkeypatch.delenv(name)
    arguments = replay_range.parser().parse_args(REPLAY)
    assert job_credentials.broker_login(arguments) == {}
    assert job_credentials.nats_login(arguments) == {}
