"""Files of declared streams: what they state, and errors that name the file, the key and the nearest known one."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from natslog.declared.reading import Declared, read_files
from natslog.errors import ConfigError
from natslog.stream_settings import SETTING_NAMES


def declared(folder: Path, *texts: str) -> Declared:
    paths = [folder / f"{at}.toml" for at in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    return read_files([str(path) for path in paths])


def test_defaults_are_of_their_file_and_are_overridden_by_a_stream(tmp_path: Path) -> None:
    found = declared(
        tmp_path,
        """
        [defaults]
        managed_by = "shop"
        max_age = "7d"
        [streams.orders]
        subjects = ["orders.>"]
        max_age = "none"
        [streams."orders.eu"]
        subject = "eu"
        """,
        '[streams.other]\nsubject = "other"\ngroup = "none"\ncompression = "none"\n',
    )
    assert found.streams == {
        "orders": {"managed_by": "shop", "max_age": None, "subjects": ["orders.>"]},
        "orders.eu": {"managed_by": "shop", "max_age": "7d", "subject": "eu"},
        "other": {"subject": "other", "group": None, "compression": "none"},
    }
    assert found.managed_by == {"shop"}


def test_a_file_without_streams_still_names_what_it_manages(tmp_path: Path) -> None:
    assert declared(tmp_path, '[defaults]\nmanaged_by = "shop"') == Declared({}, frozenset({"shop"}))
    assert declared(tmp_path, "") == Declared({}, frozenset())


def test_standard_input_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b'[streams.a]\nsubject = "a"')))
    assert read_files(["-"]).streams == {"a": {"subject": "a"}}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            "[streams.a]\nmax_aeg = '7d'",
            r"0.toml: streams.a.max_aeg: unknown setting 'max_aeg'; did you mean 'max_age'",
        ),
        ("[defaults]\nreplica = 3", "0.toml: defaults.replica: unknown setting 'replica'; did you mean 'replicas'"),
        ("[defaults]\nsubjects = ['a']", "0.toml: defaults.subjects: unknown setting"),
        ("[streams.a]\nname = 'b'", "0.toml: streams.a.name: unknown setting 'name'"),
        ("[streams.a]\npaused = true", "0.toml: streams.a.paused: unknown setting"),
        ("[stream.a]\nsubject = 'a'", "0.toml: unknown key 'stream'; did you mean 'streams'"),
        ("[streams.a.b]\nsubject = 'a'", r'quote the name: \[streams."….b"\]'),
        ("streams = 3", "0.toml: defaults and streams are tables"),
        ("[streams]\na = 3", r"0.toml: streams.a must be a table of settings, as in \[streams.a\]"),
        ("[streams.'a b']\nsubject = 'a'", "0.toml: streams.a b: stream name 'a b' is not allowed"),
        ("[streams.__activity]\nmax_age = '1d'", "0.toml: streams.__activity: names that begin with '__'"),
        ("[streams.a]\n\nmax_age = = 3", "0.toml is not TOML: .*line 3"),
        ("[streams.a]\n[streams.a]", "0.toml is not TOML: .*line 2"),
        ("[streams.a]\nmax_age = 'soon'", "0.toml: streams.a.max_age: max_age 'soon' is not a duration"),
        ("[streams.a]\nmax_age = nan", "0.toml: streams.a.max_age: max_age nan must be"),
        ("[streams.a]\nreplicas = 'none'", "0.toml: streams.a.replicas: replicas 'none' must be a whole number"),
        ("[streams.a]\nsubject = 'b'\nsubjects = ['a']", "0.toml: streams.a: subject 'b' is not the first"),
        ("[streams.a]\nmanaged_by = 'a b'", "0.toml: streams.a.managed_by: managed_by 'a b' is not allowed"),
        ("a = " + "[" * 5000, "0.toml is not TOML"),
    ],
)
def test_wrong_files_are_named_with_the_key(tmp_path: Path, text: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        declared(tmp_path, text)


def test_one_stream_in_two_files_and_files_that_cannot_be_read(tmp_path: Path) -> None:
    text = "[streams.a]\nsubject = 'a'"
    with pytest.raises(ConfigError, match=r"1.toml: stream 'a' is declared in .*0.toml, too"):
        declared(tmp_path, text, text)
    same = str(tmp_path / "0.toml")
    assert read_files([same, same]).streams.keys() == {"a"}
    with pytest.raises(ConfigError, match=r"cannot read .*nosuch.toml: No such file"):
        read_files([str(tmp_path / "nosuch.toml")])
    (tmp_path / "0.toml").write_bytes(b"# \xff")
    with pytest.raises(ConfigError, match=r"0.toml is not UTF-8 text"):
        read_files([same])


TOML_VALUES = st.recursive(
    st.booleans()
    | st.integers()
    | st.text("abd7.%>*none", max_size=6)
    | st.sampled_from(["none", "zstd", "7d", "1e9"]),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)


@given(st.sampled_from(SETTING_NAMES), TOML_VALUES)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=120, deadline=None)
def test_any_value_of_any_setting_is_accepted_or_a_clear_error(tmp_path: Path, name: str, value: object) -> None:
    try:
        declared(tmp_path, f"[streams.a]\n{name} = {json.dumps(value)}\n")
    except ConfigError as error:
        assert f"streams.a.{name}: " in error.message  # noqa: PT017
