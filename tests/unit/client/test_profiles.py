"""Profiles: what is read, and errors that name the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from natslog.client.profiles import Profile, load_profile
from natslog.errors import ConfigError

TEXT = """
default = "prod"
[profiles.prod]
servers = ["https://a:9292", "https://b:9292"]
token_file = "prod.token"
tls_ca_file = "/etc/ca.pem"
[profiles.local]
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "config.toml"
    monkeypatch.setenv("NATSLOG_CONFIG", str(path))
    return path


def test_the_default_profile_is_used_and_paths_are_relative_to_the_file(file: Path) -> None:
    file.write_text(TEXT)
    found = load_profile(None)
    assert found.servers == ("https://a:9292", "https://b:9292")
    assert found.token_file == str(file.parent / "prod.token")
    assert found.tls_ca_file == "/etc/ca.pem"
    assert load_profile("local") == Profile()


def test_without_a_file_or_a_default_nothing_is_set(file: Path) -> None:
    assert load_profile(None) == Profile()
    file.write_text("[profiles.x]\n")
    assert load_profile(None) == Profile()


@pytest.mark.parametrize(
    ("text", "name", "said"),
    [
        (None, "prod", "there is no file"),
        (TEXT, "prot", "did you mean 'prod'"),
        ("[profiles]\n", "prod", "there is no profile 'prod'"),
        ("default = 'gone'\n", None, "there is no profile 'gone'"),
        ("profiles = 7\n", None, "does not contain profiles"),
        ("[profiles.x]\ntoken = 'secret-itself'\n", "x", "unknown field `token`"),
        ("[profiles.x]\nservers = 'http://a'\n", "x", "does not contain profiles"),
        ("[profiles.x\n", "x", "does not contain profiles"),
    ],
)
def test_a_wrong_profile_is_an_error_that_says_what_is_wrong(
    file: Path, text: str | None, name: str | None, said: str
) -> None:
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=said) as wrong:
        load_profile(name)
    assert "secret-itself" not in wrong.value.message


def test_a_file_that_is_no_text_or_a_folder(file: Path) -> None:
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError):
        load_profile(None)
    file.unlink()
    file.mkdir()
    with pytest.raises(ConfigError, match="cannot read"):
        load_profile(None)
