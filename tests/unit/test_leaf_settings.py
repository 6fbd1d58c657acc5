"""Settings of the leafnode connection, which are those of the other connections to NATS where they are not given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from natslog.config import load_config
from natslog.nats_server import NatsServer
from natslog.wire.credentials import NatsCredentials

CLIENT = {
    "nats_user": "me",
    "nats_password_file": "pw",
    "nats_tls_ca_file": "ca",
    "nats_tls_cert_file": "cert",
    "nats_tls_key_file": "key",
    "nats_tls_handshake_first": True,
}


@pytest.mark.parametrize(
    ("leaf", "different"),
    [
        ({}, {}),
        ({"token_file": "t"}, {"user": None, "password_file": None, "token_file": "t"}),
        ({"user": "leaf", "password_file": "other"}, {"user": "leaf", "password_file": "other"}),
        ({"creds_file": ""}, {"user": None, "password_file": None}),
        ({"tls_ca_file": "leaf-ca"}, {"tls_ca_file": "leaf-ca"}),
        ({"tls_ca_file": ""}, {"tls_ca_file": None}),
        ({"tls_cert_file": "both"}, {"tls_cert_file": "both", "tls_key_file": None}),
        ({"tls_handshake_first": False}, {"tls_handshake_first": False}),
        ({"tls_handshake_first": "false"}, {"tls_handshake_first": False}),
    ],
)
def test_login_of_the_leafnode_is_that_of_nats_where_it_has_none_of_its_own(
    leaf: dict[str, Any], different: dict[str, Any]
) -> None:
    given = {f"nats_leaf_{name}": value for name, value in leaf.items()}
    config = load_config(None, CLIENT | given, {})
    assert config.nats_leaf_login == config.nats_login | different
    assert config.nats_login == load_config(None, CLIENT, {}).nats_login
    NatsCredentials(**config.nats_leaf_login)


def test_variable_names_the_url_and_secrets_in_it_are_not_shown() -> None:
    assert load_config(None, {}, {}).nats_leaf_url == ""
    config = load_config(None, {}, {"NATSLOG_NATS_LEAF_URL": "nats-leaf://me:SECRET@a"})
    assert config.nats_leaf_url == "nats-leaf://me:SECRET@a"
    assert "SECRET" not in repr(config)
    assert "nats-leaf://…@a" in repr(config)


@pytest.mark.parametrize("arguments", [("-c", "x"), ("--config", "x"), ("--config=x",), ("-D", "-c=x")])
def test_server_with_a_configuration_of_its_own_has_no_leaf_url(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    assert NatsServer(0, tmp_path / "nats.log", arguments=arguments).leaf_url == ""
    assert NatsServer(0, tmp_path / "nats.log", has_leafnodes=False).leaf_url == ""
    assert NatsServer(0, tmp_path / "nats.log", arguments=("-D",)).leaf_url.startswith("nats-leaf://127.0.0.1:")
