"""Names, subjects, wildcards, durations, sizes, times, settings: valid ones, and errors; and the words of all texts."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from natslog.config import load_config
from natslog.errors import ConfigError, InvalidRequest, NatslogError, OffsetOutOfRange, from_json
from natslog.subjects import check_name, check_subject, wildcard_regex
from natslog.times import format_timestamp_us, parse_timestamp_us
from natslog.units import format_duration, format_exact_size, parse_duration_s, parse_size_bytes


@pytest.mark.parametrize("good", ["a", "orders", "orders-2026_v1.eu", "_x", "x" * 128])
def test_good_names(good: str) -> None:
    assert check_name(good) == good


@pytest.mark.parametrize("good", ["a", "a.b.c", "*", ">", "a.*.c.>", "$SYS.x", "grün"])
def test_good_subjects(good: str) -> None:
    assert check_subject(good, wildcards=True) == good


def test_wildcards_are_for_subscriptions_only() -> None:
    for subject in ("a.*", "a.>"):
        with pytest.raises(InvalidRequest):
            check_subject(subject, wildcards=False)


words = st.sampled_from(["a", "b", "a.b", "c"])


def covers(pattern: list[str], subject: list[str]) -> bool:
    """The dumb model of NATS wildcards."""
    if not pattern or not subject:
        return not pattern and not subject
    if pattern[0] == ">":
        return True
    return pattern[0] in ("*", subject[0]) and covers(pattern[1:], subject[1:])


@given(
    st.lists(st.sampled_from(["a", "b", "*"]), min_size=1, max_size=4),
    st.booleans(),
    st.lists(words, min_size=1, max_size=4),
)
def test_wildcard_regex_covers_what_nats_covers(tokens: list[str], tail: bool, subject: list[str]) -> None:
    pattern = ".".join([*tokens, ">"] if tail else tokens)
    text = ".".join(subject)
    assert bool(re.search(wildcard_regex(pattern), text)) == covers(pattern.split("."), text.split("."))


def test_durations_and_sizes() -> None:
    assert parse_duration_s("7d") == 604800
    assert parse_duration_s("1h30m") == 5400
    assert parse_duration_s("250ms") == 0.25
    assert parse_duration_s(3) == 3
    assert format_duration(5400) == "90m"
    assert parse_size_bytes("10GiB") == parse_size_bytes("10g") == 10 * 2**30
    assert parse_size_bytes("1MB") == 10**6
    for size_bytes, text in ((1, "1B"), (1500, "1500B"), (10 * 2**30, "10GiB"), (2**62, "4194304TiB")):
        assert (format_exact_size(size_bytes), parse_size_bytes(text)) == (text, size_bytes)
    for bad in ("", "7", "x", "-1s", "0s", "5 parsecs", "1e5s"):
        if bad != "7":
            with pytest.raises(InvalidRequest):
                parse_duration_s(bad)
    for bad in ("", "ten", "-1", "0", "1.5.5k", "1 furlong", "1i", "1ib", "1 bk"):
        with pytest.raises(InvalidRequest):
            parse_size_bytes(bad)


@given(st.integers(0, 4 * 10**15))
def test_times_survive_writing_and_reading(timestamp_us: int) -> None:
    assert parse_timestamp_us(format_timestamp_us(timestamp_us)) == timestamp_us


def test_times_with_zone_without_and_as_milliseconds() -> None:
    assert parse_timestamp_us("2026-11-20T10:00:00+02:00") == parse_timestamp_us("2026-11-20T08:00:00")
    assert parse_timestamp_us("1500") == parse_timestamp_us(1500) == 1_500_000
    assert parse_timestamp_us(format_timestamp_us(parse_timestamp_us("0999-01-02"))) == parse_timestamp_us("0999-01-02")
    for bad in ("", "noon", "2026-13-01", "9" * 30):
        with pytest.raises(InvalidRequest):
            parse_timestamp_us(bad)


def test_settings_come_from_file_then_environment_then_flags(tmp_path: Path) -> None:
    path = tmp_path / "natslog.toml"
    path.write_text('http_port = 1000\nnats_url = "nats://file:1"\nsegment_bytes = "1MiB"\n')
    config = load_config(path, {"rack": "r"}, {"NATSLOG_HTTP_PORT": "2000"})
    assert (config.http_port, config.nats_url, config.segment_bytes, config.rack) == (2000, "nats://file:1", 2**20, "r")
    assert load_config(path, {"http_port": 3000}, {"NATSLOG_HTTP_PORT": "2000"}).http_port == 3000


def test_durations_are_named_with_and_without_their_unit(tmp_path: Path) -> None:
    path = tmp_path / "natslog.toml"
    path.write_text('segment_age = "1h"\nretention_interval_s = 7\nlog_level = "debug"\n')
    config = load_config(path, {}, {"NATSLOG_TOMBSTONE_GRACE": "2m", "NATSLOG_RETENTION_INTERVAL_S": "3s"})
    assert (config.segment_age_s, config.retention_interval_s, config.tombstone_grace_s) == (3600.0, 3.0, 120.0)
    assert (config.log_level, load_config(path, {"segment_age": "5s"}, {}).segment_age_s) == ("debug", 5.0)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("log_level = 'loud'", "log_level 'loud' must be debug, info"),
        ("htp_port = 1", "did you mean 'http_port'"),
        ("http_port = 'x'", "invalid setting"),
        ("http_port = 70000", "65535"),
        ("=", "not TOML"),
    ],
)
def test_wrong_settings_are_named(tmp_path: Path, text: str, word: str) -> None:
    path = tmp_path / "natslog.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=word):
        load_config(path, {}, {})


def test_missing_configuration_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nosuch"):
        load_config(tmp_path / "nosuch.toml", {}, {})


def test_errors_survive_the_wire() -> None:
    error = OffsetOutOfRange("no", offset=5, high_watermark=3)
    again = from_json(error.to_json())
    assert type(again) is OffsetOutOfRange
    assert (again.message, again.facts) == (error.message, error.facts)
    assert type(from_json({"error": {"code": "from-the-future", "message": "x"}})) is NatslogError


def test_secret_file_holds_one_secret_a_line(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.touch(mode=0o600)
    config = load_config(None, {"cluster_secret_file": str(path)}, {})
    path.write_bytes(b"the secret of today\r\n\n  the one of yesterday  \n")
    assert config.secrets() == (b"the secret of today", b"the one of yesterday")
    for text, problem in (
        ("", "one secret per line"),
        ("\n \n", "one secret per line"),
        ("the secret of today\nshort\n", "at least 16 characters"),
        ("\n".join(f"a secret of number {at}" for at in range(9)), "at most 8"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=problem) as refused:
            config.secrets()
        assert "today" not in refused.value.message
    assert load_config(None, {}, {}).secrets() == ()


@pytest.mark.parametrize("mode", [0o644, 0o602, 0o604])
def test_secret_that_everyone_can_read_or_change_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "secret"
    path.write_text("the secret of today")
    path.chmod(mode)
    config = load_config(None, {"cluster_secret_file": str(path)}, {})
    with pytest.raises(ConfigError, match="chmod 600") as refused:
        config.secrets()
    assert "today" not in refused.value.message
    path.chmod(0o640)
    assert config.secrets() == (b"the secret of today",)


def test_addresses_of_brokers_are_checked_when_settings_are_read() -> None:
    given = {"cluster_secret_file": "x", "http_host": "127.0.0.1"}
    config = load_config(None, given, {"NATSLOG_PEER_URLS": "http://a:1, http://b:2,"})
    assert config.peer_urls == ("http://a:1", "http://b:2")
    for name in ("seeds", "peer_urls", "advertise_url"):
        for url in ("log1:9292", "http://user:password@log1", "http://log1?x"):
            with pytest.raises(ConfigError, match=f"^{name}: ") as refused:
                load_config(None, given | {name: url}, {})
            assert "password" not in refused.value.message


# Each of these makes a person of software, is an idiom, or is an older word for a standard term; see CONTRIBUTING.md.
AVOIDED = re.compile(
    r"\b("
    r"mend(s|ed|ing)?|hears?|heard|believe[sd]?|vouch(es)?|whom|whoever|nobody|somebody|newcomers?"
    r"|(is|are|falls?|fell|was|were) (silent|well)|all is well"
    r"|(died|dies)|(is|are) no more|no more of it|for good|for ever|of late|his|one's own"
    r"|begins? anew|began anew|begun anew|anew"
    r"|(stop(s|ped)?|end(s|ed)?|left|leaves?|handed over|hand(s|ing)?) in order"
    r"|hand(s|ed|ing)? (it |them |\w+ streams? |leadership )?over"
    r"|ask (again|there|it|that one|elsewhere)|its word|is told|are told|says|said|knows|learns|wants"
    r"|look at it|lets? it go|gone|come true|comes? back by itself"
    r")\b",
    re.IGNORECASE,
)
ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
SOURCES = sorted((ROOT / "broker" / "natslog").rglob("*.py"))


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def prose(page: str) -> Iterator[tuple[int, str]]:
    """Lines of a page with their numbers, without blocks of code."""
    is_code = False
    for number, line in enumerate(page.splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code and not line.startswith("    "):
            yield number, line


def shown_texts(source: str, *, is_command: bool) -> Iterator[tuple[int, str]]:
    """Strings with at least two words that users can see: no assertions, no tags of messages between brokers, and of
    docstrings only those of commands (their help).
    """
    tree = ast.parse(source)
    unseen = [node for node in ast.walk(tree) if isinstance(node, ast.Assert) or getattr(node, "arg", "") == "tag"]
    hidden = {id(inner) for node in unseen for inner in ast.walk(node)}
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) if is_command and not name.startswith("_"):
                yield node.lineno, ast.get_docstring(node) or ""
            case ast.Expr(value=ast.Constant() as docstring):
                hidden.add(id(docstring))
            case ast.JoinedStr(values=parts) if id(node) not in hidden:
                hidden |= {id(part) for part in parts}
                yield node.lineno, "".join(str(part.value) for part in parts if isinstance(part, ast.Constant))
            case ast.Constant(value=str(text)) if id(node) not in hidden and " " in text.strip():
                yield node.lineno, text


def avoided(text: str) -> str:
    """The first word of a text that is to be avoided, outside of `code`; else nothing."""
    found = AVOIDED.search(re.sub(r"`[^`]*`", "`code`", text))
    return found[0] if found else ""


@pytest.mark.parametrize("text", ["the disk is mended", "Nobody leads it", "NATS is well", "ask again", "it is gone"])
def test_avoided_words_are_found(text: str) -> None:
    assert avoided(text)
    assert not avoided(f"the word `{text}` in code")
    assert list(shown_texts(f"raise ValueError('{text}')", is_command=False)) == [(1, text)]
    assert list(prose(f"one\n```\n{text}\n```\ntwo")) == [(1, "one"), (5, "two")]


@pytest.mark.parametrize("path", SOURCES, ids=named)
def test_texts_of_the_broker_are_plain_technical_english(path: Path) -> None:
    texts = shown_texts(path.read_text(), is_command=path.parent.name == "cli")
    assert not [f"{path.name}:{line}: {avoided(text)!r} in {text!r}" for line, text in texts if avoided(text)]


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_pages_are_plain_technical_english(path: Path) -> None:
    lines = prose(path.read_text())
    assert not [f"{path.name}:{number}: {avoided(line)!r}" for number, line in lines if avoided(line)]


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_lines_of_pages_have_at_most_120_characters(path: Path) -> None:
    lines = [(number, line) for number, line in prose(path.read_text()) if not line.startswith("|")]
    assert not [f"{path.name}:{number}: {len(line)} characters" for number, line in lines if len(line) > 120]


NOT_IN_NAMES = frozenset(
    [
        "look",
        "looks",
        "settle",
        "settled",
        "told",
        "tell",
        "tells",
        "say",
        "says",
        "said",
        "gone",
        "nobody",
        "somebody",
        "hear",
        "hears",
        "heard",
        "knows",
        "whom",
        "mend",
        "bury",
        "patiently",
        "believe",
        "believes",
        "wants",
    ]
)
"""Verbs of persons, and of speech, in names of classes and functions: the field's verbs say what is done."""
STANDARD_NAMES = re.compile(r"^_*(look_up\w*|looks_like_\w+|_?wants_\w+)$")


def personal(name: str) -> bool:
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().split("_")
    return not STANDARD_NAMES.match(name) and not NOT_IN_NAMES.isdisjoint(words)


def test_names_with_verbs_of_persons_are_found() -> None:
    assert all(map(personal, ("_settle", "as_told", "look_again", "LookAgain", "wait_for_nobody")))
    assert not any(map(personal, ("look_up", "looks_like_regex", "reconcile", "transfer_leadership", "_saying")))


@pytest.mark.parametrize("package", ["broker/natslog", "connector/pyspark_natslog"])
def test_names_have_the_verbs_of_the_field(package: str) -> None:
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    found = [
        f"{path.relative_to(ROOT)}: {node.name}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, definitions) and personal(node.name)
    ]
    assert not found
