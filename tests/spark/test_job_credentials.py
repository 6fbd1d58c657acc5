"""Credentials of the jobs: from options or variables, to the client, the source and the sink; names of files only."""

from __future__ import annotations

import pytest

from pyspark_natslog.sink.options import SINK_OPTIONS
from pyspark_natslog.source.options import SOURCE_OPTIONS
from tests.spark.jobs_as_modules import enrich_stream, job_credentials, job_support, replay_range

OPTIONS = {
    "--token-file": "t", "--tls-ca": "ca", "--tls-cert": "c", "--tls-key": "k", "--nats-creds-file": "nc",
    "--nats-user": "nu", "--nats-password-file": "np", "--nats-token-file": "nt", "--nats-tls-ca-file": "nca",
    "--nats-tls-cert-file": "ncc", "--nats-tls-key-file": "nck",
}  # fmt: skip
VARIABLES = {
    "NATSLOG_TOKEN_FILE": "t", "NATSLOG_TLS_CA": "ca", "NATSLOG_TLS_CERT": "c", "NATSLOG_TLS_KEY": "k",
    "NATSLOG_NATS_CREDS_FILE": "nc", "NATSLOG_NATS_USER": "nu", "NATSLOG_NATS_PASSWORD_FILE": "np",
    "NATSLOG_NATS_TOKEN_FILE": "nt", "NATSLOG_NATS_TLS_CA_FILE": "nca", "NATSLOG_NATS_TLS_CERT_FILE": "ncc",
    "NATSLOG_NATS_TLS_KEY_FILE": "nck",
}  # fmt: skip
ENRICH = ["--stream", "s", "--fields", "a int", "--to-subject", "x.>", "--checkpoint", "c"]
REPLAY = ["--stream", "s", "--to-subject", "x.>"]


@pytest.mark.parametrize("are_variables", [False, True])
@pytest.mark.parametrize(("job", "required"), [(enrich_stream, ENRICH), (replay_range, REPLAY)])
def test_credentials_reach_client_source_and_sink(
    monkeypatch: pytest.MonkeyPatch, job: object, required: list[str], are_variables: bool
) -> None:
    given = [] if are_variables else [text for pair in OPTIONS.items() for text in pair]
    for name, value in VARIABLES.items() if are_variables else ():
        monkeypatch.setenv(name, value)
    arguments = job.parser().parse_args([*required, *given])  # type: ignore[attr-defined]

    client = job_credentials.client_options(arguments)
    assert (client.token, client.token_file) == (None, "t")
    assert (client.tls_ca_file, client.tls_cert_file, client.tls_key_file) == ("ca", "c", "k")
    source = {"tokenFile": "t", "tlsCaFile": "ca", "tlsCertFile": "c", "tlsKeyFile": "k"}
    assert source.items() <= job_support.source_options(arguments, "value").items()
    assert set(source) <= set(SOURCE_OPTIONS)

    nats = job_credentials.nats_credentials(arguments)
    assert (nats.creds_file, nats.user, nats.password_file, nats.token_file) == ("nc", "nu", "np", "nt")
    assert (nats.tls_ca_file, nats.tls_cert_file, nats.tls_key_file) == ("nca", "ncc", "nck")
    sink = job_credentials.nats_login(arguments)
    assert sink == {
        "natsCredsFile": "nc", "natsUser": "nu", "natsPasswordFile": "np", "natsTokenFile": "nt",
        "natsTlsCaFile": "nca", "natsTlsCertFile": "ncc", "natsTlsKeyFile": "nck",
    }  # fmt: skip
    assert set(sink) <= set(SINK_OPTIONS)


def test_without_credentials_no_option_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    arguments = replay_range.parser().parse_args(REPLAY)
    assert job_credentials.broker_login(arguments) == {}
    assert job_credentials.nats_login(arguments) == {}
