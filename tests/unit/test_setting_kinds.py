"""Settings are stated once: parsers, options and bodies of requests follow from the fields of the structure."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
import typer

from natslog.cli.main import application
from natslog.config import load_config
from natslog.errors import ConfigError, InvalidRequest
from natslog.http.shapes.streams import ChangedStream, NewStream
from natslog.model import SETTINGS, StreamSettings
from natslog.setting_kinds import Choice, Duration, Flag, Name, Setting, Size, Tags, Texts, Whole
from natslog.stream_settings import SETTING_NAMES, parse_settings

DEFAULTS = StreamSettings(subject="any")


@pytest.mark.parametrize(
    ("setting", "wrong", "error"),
    [
        (Setting(""), 7, "x must be text, not a number"),
        (Duration(""), None, "x None is not a duration"),
        (Duration("", null=None), 0, "x 0 must be above zero"),
        (Size("", at_least=4096), "1KiB", "x must be at least 4KiB"),
        (Whole("", 1, 9), True, "x True must be a whole number from 1 to 9"),
        (Whole("", 1, 9, null=None), 10, "x 10 must be a whole number from 1 to 9"),
        (Choice("", Literal["a", "b", "c"]), "d", "x 'd' must be a, b or c"),
        (Flag("", null=False), "true", "x 'true' must be true or false"),
        (Name(""), "a b", "x 'a b' is not allowed"),
        (Texts(""), "a", "x must be a list of texts, not text"),
        (Tags("", 2, "tag"), ["a", "b", "c"], "x must be a list of at most 2 tags"),
        (Tags("", 2, "tag"), ["a b"], "tag 'a b' is not allowed"),
    ],
)
def test_a_value_that_is_not_valid_is_refused(setting: Setting, wrong: object, error: str) -> None:
    with pytest.raises(InvalidRequest, match=error):
        setting.parse(wrong, "x")


@pytest.mark.parametrize(
    ("setting", "text", "value"),
    [
        (Setting(""), "none", "none"),
        (Name("", null=None), "none", None),
        (Whole("", 1, 9, null=None), "none", None),
        (Whole("", 1, 9), "7", 7),
        (Choice("", Literal["none", "zstd"], null="none"), "none", "none"),
        (Choice("", Literal["old", "new"], null="old"), "none", None),
        (Flag(""), "1", True),
        (Flag(""), "False", False),
        (Texts(""), " a,b ,", ["a", "b"]),
    ],
)
def test_text_stands_for_a_value_in_json(setting: Setting, text: str, value: object) -> None:
    assert setting.from_text(text, "x") == value


@pytest.mark.parametrize("setting", [Whole("", 1, 9), Flag("")])
def test_text_that_stands_for_no_value_is_refused(setting: Setting) -> None:
    with pytest.raises(InvalidRequest, match="x 'none' must be"):
        setting.from_text("none", "x")


def test_each_field_of_a_stream_states_its_setting() -> None:
    fields = {*StreamSettings.__struct_fields__} - {"subject", "more_subjects", "jetstream"}
    assert fields == {one.field for one in SETTINGS}
    assert {*SETTING_NAMES} == {"subject", "subjects", *(one.name for one in SETTINGS)}


@pytest.mark.parametrize("stated", SETTINGS, ids=lambda one: one.name)
def test_what_is_shown_of_a_setting_is_accepted(stated: Any) -> None:
    shown = DEFAULTS.to_json()[stated.name]
    assert stated.setting.parse(shown, stated.name) == stated.default == getattr(DEFAULTS, stated.field)
    assert parse_settings({"subject": "any", stated.name: shown}) == DEFAULTS


@pytest.mark.parametrize("body", [NewStream, ChangedStream])
def test_bodies_of_requests_have_every_setting(body: type[msgspec.Struct]) -> None:
    assert {*SETTING_NAMES} <= {*body.__struct_fields__}
    shown = DEFAULTS.to_json() | ({"name": "any"} if body is NewStream else {})
    msgspec.convert(shown, body)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(shown | {"replicas": 10}, body)


@pytest.mark.parametrize("command", ["create", "edit"])
def test_commands_have_an_option_for_every_setting(command: str) -> None:
    stream = typer.main.get_command(application(["stream"])).commands["stream"]  # type: ignore[attr-defined]
    options = {option for one in stream.commands[command].params for option in one.opts}
    assert {one.setting.flag or f"--{one.name.replace('_', '-')}" for one in SETTINGS} <= options


@pytest.mark.parametrize("name", ["nats_url", "nats_leaf_url", "advertise_url"])
def test_errors_about_urls_do_not_have_their_passwords(name: str, tmp_path: Path) -> None:
    path = tmp_path / "natslog.toml"
    path.write_text(f'{name} = ["nats://user:secret@host:4222"]\nseeds = ["http://a:secret@h", 1]\n')
    with pytest.raises(ConfigError) as failed:
        load_config(path, {}, {})
    assert "secret" not in failed.value.message


def test_flags_of_a_file_may_be_numbers_as_in_0_2_0(tmp_path: Path) -> None:
    path = tmp_path / "natslog.toml"
    path.write_text("insecure = 1\nnats_tls_handshake_first = 0\n")
    config = load_config(path, {}, {})
    assert (config.insecure, config.nats_tls_handshake_first) == (True, False)
    path.write_text("insecure = 2\n")
    with pytest.raises(ConfigError, match="true or false"):
        load_config(path, {}, {})
