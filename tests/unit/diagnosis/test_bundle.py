"""What gets into an archive: allow-lists, texts without secrets, digests of names, metrics, logs, folders, the file."""

from __future__ import annotations

import base64
import json
import logging
import os
import re
import secrets
import sys
import tarfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from natslog.client import ClientOptions
from natslog.config import SETTINGS, BrokerConfig
from natslog.diagnosis.bundle import allowed
from natslog.diagnosis.bundle.allowed import kept
from natslog.diagnosis.bundle.archive import FOLDER, Part, write_archive
from natslog.diagnosis.bundle.known_secrets import known_secrets
from natslog.diagnosis.bundle.lines import folder_lines, folder_text, log_lines, metric_lines
from natslog.diagnosis.bundle.redaction import MOST_CHARS, REMOVED, Redactor
from natslog.errors import InvalidRequest
from natslog.http.shapes import cluster as of_cluster
from natslog.http.shapes.streams import Stream
from natslog.log_events import AUDIT_LOGGER, JsonLines, TextLines, event
from tests.nats_login import KeyPair

PLAIN = Redactor([], hashes_names=False)
CANARY = "cAnArY5d0c1f8e77a2"  # the same in each process: it is in the names of tests


# ---- secrets in texts ----


@pytest.mark.parametrize(
    "text",
    [
        f"cannot connect to nats://user:{CANARY}@host:4222: refused",
        f"nats://{CANARY}@host:4222",
        f"http://us er:{CANARY}/x@host/path",
        f"Authorization: Bearer {CANARY}",
        f"authorization=Basic {CANARY}==",
        f'password = "{CANARY} with blanks"',
        f"{{'nats_password': '{CANARY}'}}",
        f"AWS_SECRET_ACCESS_KEY={CANARY}",
        f"s3.secret-access-key: {CANARY}",
        f'"api_key":"{CANARY}"',
        f"token {'nlt_0123456789ab_'}{CANARY}{'x' * 25}",
        f"eyJhbGciOiJFZDI1NTE5In0.{CANARY}.{CANARY}",
        f"-----BEGIN PRIVATE KEY-----\n{CANARY}\n-----END PRIVATE KEY-----",
        f"-----BEGIN USER NKEY SEED-----\n{CANARY}",
        f"the key {base64.b64encode(CANARY.encode() * 3).decode()} was used",
    ],
)
def test_forms_of_secrets_are_removed(text: str) -> None:
    shown = PLAIN.text(text)
    assert CANARY not in shown
    assert base64.b64encode(CANARY.encode()).decode()[:12] not in shown
    assert REMOVED in shown


@pytest.mark.parametrize("prefix", [0, 1, 2])
def test_seeds_of_nkeys_are_removed(prefix: int) -> None:
    import nkeys

    kinds = (nkeys.PREFIX_BYTE_USER, nkeys.PREFIX_BYTE_ACCOUNT, nkeys.PREFIX_BYTE_OPERATOR)
    seed = KeyPair(kinds[prefix]).seed
    assert seed not in PLAIN.text(f"seed is {seed}, or so")
    assert seed not in PLAIN.text(seed)


def test_aws_key_and_cluster_secret_are_removed() -> None:
    secret = secrets.token_hex(32)
    assert PLAIN.text(f"AKIAABCDEFGHIJKLMNOP and {secret}") == f"{REMOVED} and {REMOVED}"


@pytest.mark.parametrize(
    "text",
    [
        "the data folder /var/lib/natslog is in use by a running broker (process 77)",
        "stream orders (id 0123456789abcdef0123456789abcdef): offsets 5 to 9 are damaged",
        "connected to NATS at nats://10.0.0.5:4222 within 0.25 s",
        "2026-11-27 07:00:31,525 INFO natslog.node: broker 1 of term 2",
    ],
)
def test_other_texts_stay(text: str) -> None:
    assert PLAIN.text(text) == text


@given(st.text(min_size=6, max_size=40), st.text(max_size=30), st.text(max_size=30))
def test_known_secrets_are_removed_wherever_they_are(secret: str, before: str, after: str) -> None:
    redactor = Redactor([secret], hashes_names=False)
    assert secret not in redactor.without_known(before + secret + after) or secret in REMOVED


def test_known_secrets_of_settings_files_urls_and_variables(tmp_path: Path) -> None:
    def file(name: str, *lines: str) -> str:
        (tmp_path / name).write_text("\n".join(lines))
        return str(tmp_path / name)

    config = BrokerConfig(
        nats_url="nats://me:of%20url@a,nats://only-token@b",
        nats_leaf_url="nats-leaf://me:of-leaf@a",
        nats_creds_file=file("creds", "-----BEGIN NATS USER JWT-----", "a.jwt", "------END", "the-seed"),
        cluster_secret_file=file("secret", "first secret", "second secret"),
        tls_key_file=file("key", "-----BEGIN PRIVATE KEY-----", "MIIkeyline"),
        nats_token_file=str(tmp_path / "missing"),
    )
    environ = {
        "AWS_SECRET_ACCESS_KEY": "s3cret",
        "NATS_URL": "nats://u:of-variable@h",
        "HOME": "/root",
        "OTEL_EXPORTER_OTLP_HEADERS": "x-key=of-header, authorization=Basic%20of-login",
        "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "malformed header",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "https://u:of-endpoint@h/v1?api_key=of-query&b=of%20query",
    }
    options = ClientOptions(token="of-option", token_file=file("token", "of-file"))
    found = set(known_secrets(config, options, environ))
    wanted = {"of url", "of%20url", "only-token", "of-leaf", "a.jwt", "the-seed", "first secret", "second secret"}
    assert found >= wanted | {"MIIkeyline", "s3cret", "of-variable", "of-option", "of-file"}
    assert found >= {"of-header", "Basic of-login", "Basic%20of-login", "malformed header"}
    assert found >= {"of-endpoint", "of-query", "of query", "of%20query", "api_key=of-query&b=of%20query"}
    assert not found & {"/root", "me"}


def test_texts_are_limited() -> None:
    assert len(PLAIN.text("word " * 10_000)) < MOST_CHARS + 10


# ---- names ----


def test_digests_are_the_same_everywhere_in_one_archive_and_differ_in_another() -> None:
    redactor = Redactor([], hashes_names=True)
    redactor.add_names(["orders-x.eu", "orders-x.eu.>"])
    name = redactor.name("orders-x.eu")
    assert re.fullmatch(r"h[0-9a-f]{12}\.h[0-9a-f]{12}", name)
    assert redactor.name("orders-x.eu.>") == f"{name}.>"
    assert redactor.text("stream orders-x.eu has no leader: start the brokers") == (
        f"stream {name} has no leader: start the brokers"
    )
    assert Redactor([], hashes_names=True).name("orders-x.eu") != name
    assert redactor.name("__activity") == "__activity"


def test_words_that_are_no_words_of_natslog_are_digests() -> None:
    shown = Redactor([], hashes_names=True).text("stream Zürich-7 of kunde_4711.abc failed at 2026-11-27T07:00:31.5Z")
    assert "rich" not in shown
    assert "kunde" not in shown
    assert shown.startswith("stream h")
    assert shown.endswith("failed at 2026-11-27T07:00:31.5Z")


def test_known_name_that_is_a_word_is_a_digest() -> None:
    redactor = Redactor([], hashes_names=True)
    redactor.add_names(["broker"])
    assert redactor.text("broker").startswith("h")


# ---- allow-lists ----


def test_every_setting_of_a_broker_is_decided() -> None:
    assert set(allowed.SETTINGS) == {one.field for one in SETTINGS} == set(BrokerConfig.__struct_fields__)


def test_every_field_of_answers_is_decided() -> None:
    left_out = {"allow_direct", "jetstream", "lineage", "compressed", "scrub"}
    fields = {one.encode_name for one in msgspec.structs.fields(Stream)}
    assert fields - left_out == fields & set(allowed.STREAM)
    assert {one.encode_name for one in msgspec.structs.fields(of_cluster.Cluster)} == set(allowed.CLUSTER)
    of_brokers = allowed.CLUSTER["brokers"][0]
    assert {one.encode_name for one in msgspec.structs.fields(of_cluster.Broker)} == set(of_brokers)
    stats = allowed.OVERVIEW["broker_stats"][0]
    assert {one.encode_name for one in msgspec.structs.fields(of_cluster.BrokerStats)} == set(stats)
    columns = {one.encode_name for one in msgspec.structs.fields(of_cluster.StreamTable)}
    assert columns == set(allowed.OVERVIEW["streams"])


def test_secret_settings_are_only_set_or_not() -> None:
    config = BrokerConfig(nats_url=f"nats://u:{CANARY}@a:1", nats_user=CANARY, nats_password_file=f"/{CANARY}")
    shown = kept(msgspec.to_builtins(config), allowed.SETTINGS, PLAIN)
    assert shown["nats_url"] == ["nats://a:1"]
    assert (shown["nats_user"], shown["nats_password_file"], shown["tls_key_file"]) == (True, True, None)
    assert CANARY not in repr(shown)


def test_unknown_fields_and_wrong_kinds_are_left_out() -> None:
    answer = {
        "cluster_id": f"not a word {CANARY}",
        "version": ["x", CANARY],
        CANARY: 1,
        "metadata_leader": CANARY,
        "brokers": [{"id": "../../x", "url": f"http://u:{CANARY}@h:1/{CANARY}?{CANARY}", "extra": CANARY}, CANARY],
        "streams": {"name": CANARY},
    }
    shown = kept(answer, allowed.CLUSTER, PLAIN)
    assert shown == {"brokers": [{"url": "http://h:1"}, None]}


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.just(CANARY),
        lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["brokers", "streams", "x", CANARY]), inner),
    )
)
def test_any_answer_can_be_taken(value: object) -> None:
    shown = kept(value, allowed.CLUSTER, PLAIN)
    assert CANARY not in repr(shown)


def test_columns_stay_aligned() -> None:
    columns = {"name": ["a", "b"], "state": ["", "paused"], "leader": [None, 2]}
    assert kept({"streams": columns}, allowed.OVERVIEW, PLAIN)["streams"] == columns


def test_requests_are_kept_without_path_body_and_address() -> None:
    event = {
        "event": "activity.operator.request",
        "address": "10.0.0.9",
        "after": {"method": "POST", "path": f"/v1/{CANARY}", "body": {"key": CANARY}, "query": CANARY, "status": 201},
    }
    shown = kept(event, allowed.ACTIVITY, PLAIN)
    assert shown == {"event": event["event"], "after": {"method": "POST", "status": 201}}


# ---- metrics, logs, folders ----


def test_metrics_keep_samples_of_natslog_only() -> None:
    text = (
        f'# HELP natslog_a {CANARY}\nnatslog_a{{stream="orders"}} 5.0\nother{{x="{CANARY}"}} 1\nnatslog_b 1e+06\n'
        f'natslog_c{{path="/v1/streams/{{name}}",x="{CANARY} {CANARY}"}} 2\n{CANARY}\nnatslog_d {CANARY}\n'
    )
    assert metric_lines(text, PLAIN).splitlines() == [
        'natslog_a{stream="orders"} 5.0',
        "natslog_b 1e+06",
        'natslog_c{path="/v1/streams/{name}"} 2',
    ]
    assert "orders" not in metric_lines(text, Redactor([], hashes_names=True))


def test_logs_keep_lines_of_natslog_and_the_nats_server_only() -> None:
    log = f"""2026-11-27 07:00:31,525 WARNING natslog.node: login at nats://u:{CANARY}@h failed
{CANARY}
The token of the administrator, which is shown only now:
nlt_0123456789ab_{CANARY}{CANARY}
2026-11-27 07:00:31,525 INFO    natslog.audit: {{"identity": "{CANARY}"}}
[12] 2026/11/27 07:00:28.887200 [INF] Server is ready
    Traceback (most recent call last):
      File "/home/{CANARY}/natslog/node/broker.py", line 5, in start
    raise ValueError("{CANARY}")
ValueError: {CANARY}
"""
    assert log_lines(log.encode(), PLAIN).splitlines() == [
        f"2026-11-27 07:00:31,525 WARNING natslog.node: login at nats://{REMOVED}@h failed",
        "[12] 2026/11/27 07:00:28.887200 [INF] Server is ready",
        "    Traceback (most recent call last):",
        "  natslog/node/broker.py, line 5, in start",
        "(6 lines of other forms, and of the audit log, were left out)",
    ]


def test_lines_that_a_broker_writes_are_kept_in_both_formats() -> None:
    logger = logging.getLogger("natslog.node")
    try:
        raise ValueError(CANARY)
    except ValueError:
        trace = sys.exc_info()
    fields = event("disk.full", stream="orders", path="/d", address=f"http://u:{CANARY}@h", audit={"identity": CANARY})
    arguments = (logging.ERROR, "file", 1, "login at nats://u:%s@h failed", (CANARY,), trace)
    record = logger.makeRecord(logger.name, *arguments, extra=fields)
    audit = logger.makeRecord(AUDIT_LOGGER, *arguments, extra=fields)
    for form in (TextLines(), JsonLines(1)):
        log = f"{form.format(record)}\n{form.format(audit)}\n".encode()
        shown = log_lines(log, PLAIN)
        assert CANARY not in shown
        assert f"login at nats://{REMOVED}@h failed" in shown
        assert shown.count(" failed") == 1
    line = json.loads(log_lines(JsonLines(1).format(record).encode(), PLAIN).splitlines()[0])
    assert (line["code"], line["stream"], line["broker"], line["path"]) == ("disk.full", "orders", 1, "/d")
    hashed = log_lines(JsonLines(1).format(record).encode(), Redactor([], hashes_names=True))
    assert "orders" not in hashed


def test_folder_is_listed_with_digests_of_streams(tmp_path: Path) -> None:
    stream = tmp_path / "streams" / f"orders.{'0a' * 16}"
    stream.mkdir(parents=True)
    (stream / f"{0:020}.active").write_bytes(b"x" * 7)
    (tmp_path / "odd\nname").touch()
    redactor = Redactor([], hashes_names=True)
    shown = folder_text(folder_lines(str(tmp_path)), redactor)
    assert "orders" not in shown
    assert "odd" not in shown
    assert f"streams/{redactor.name('orders')}.{'0a' * 16}/{0:020}.active" in shown
    assert f"{7:>14} -" in shown


# ---- the file ----


def test_archive_is_private_and_replaces_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"
    parts = [Part("x.json", "x", b"{}")]
    umask = os.umask(0)
    try:
        size_bytes = write_archive(path, parts, force=False)
    finally:
        os.umask(umask)
    assert (path.stat().st_mode & 0o777, path.stat().st_size) == (0o600, size_bytes)
    with pytest.raises(InvalidRequest, match="--force"):
        write_archive(path, [], force=False)
    with tarfile.open(path) as tar:
        assert [(one.name, one.mode) for one in tar] == [(f"{FOLDER}/x.json", 0o600)]
    write_archive(path, [], force=True)
    assert list(tmp_path.iterdir()) == [path]
