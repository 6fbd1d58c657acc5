"""The `natslog` command as a user types it: formats, tables and JSON, errors and exit codes."""

from __future__ import annotations

import asyncio
import io
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest

from natslog.client import NatslogClient
from natslog.nats_server import NatsServer, free_port, is_listening
from tests.harness import (
    BrokerProcess,
    all_values,
    eventually,
    flushed,
    natslog,
    on_terminal,
    publish_acked,
    running,
    with_nats,
)
from tests.pages import runs
from tests.readme import Block


@pytest.fixture
def stream(client: NatslogClient, name: str) -> str:
    client.create_stream(name, f"{name}.>")
    return name


@pytest.mark.long
def test_stream_commands_from_create_to_rm(broker: BrokerProcess, name: str) -> None:
    create = ("stream", "create", name, "--subject", f"{name}.>", "--max-age", "7d", "--max-bytes", "1GiB")
    assert f"stream {name} records {name}.>" in natslog(*create, url=broker.url).stdout
    natslog(*create, url=broker.url)  # idempotent
    other = natslog("stream", "create", name, "--subject", "other", url=broker.url, check=False)
    assert other.returncode == 1
    assert "exists with other settings: subject is" in other.stderr
    listed = json.loads(natslog("stream", "ls", "--json", url=broker.url).stdout)
    assert name in [body["name"] for body in listed]
    assert name in natslog("stream", "ls", url=broker.url).stdout
    natslog("stream", "edit", name, "--max-age", "none", "--max-messages", "1000", url=broker.url)
    body = json.loads(natslog("stream", "info", name, "--json", url=broker.url).stdout)
    assert (body["max_age"], body["max_messages"], body["max_bytes"]) == (None, 1000, 2**30)
    natslog("stream", "pause", name, url=broker.url)
    assert json.loads(natslog("stream", "info", name, "--json", url=broker.url).stdout)["paused"]
    natslog("stream", "resume", name, url=broker.url)
    paused = json.loads(natslog("stream", "pause", name, "--json", url=broker.url).stdout)["paused"]
    resumed = json.loads(natslog("stream", "resume", name, "--json", url=broker.url).stdout)["paused"]
    assert (paused, resumed) == (True, False)
    assert json.loads(natslog("stream", "rm", name, "--force", "--json", url=broker.url).stdout)["deleted"] == name
    gone = natslog("stream", "info", name, url=broker.url, check=False)
    said = f"error: there is no stream '{name}'\n"
    assert (gone.returncode, gone.stderr) == (1, said)


@pytest.mark.long
@pytest.mark.parametrize("said", ["", *(pytest.param(one, marks=pytest.mark.long) for one in ("y\n", "n\n"))])
def test_rm_without_a_terminal_deletes_only_with_yes(broker: BrokerProcess, stream: str, said: str) -> None:
    refused = natslog("stream", "rm", stream, url=broker.url, input=said, check=False)
    assert refused.returncode == 1
    assert refused.stderr == (
        f"error: stream {stream} with 0 messages was not deleted: confirmation is required and standard input is not "
        "a terminal; pass --yes\n"
    )
    natslog("stream", "info", stream, url=broker.url)
    natslog("stream", "rm", stream, "--yes", url=broker.url, input=said)
    assert natslog("stream", "info", stream, url=broker.url, check=False).returncode == 1


@pytest.mark.parametrize("answer", ["y", "n"])
@pytest.mark.long
def test_rm_asks_on_a_terminal(broker: BrokerProcess, stream: str, answer: str) -> None:
    code, shown = on_terminal("stream", "rm", stream, url=broker.url, types=answer + "\n")
    assert f"Delete stream {stream} with 0 messages? [y/N]" in shown
    is_there = natslog("stream", "info", stream, url=broker.url, check=False).returncode == 0
    assert (code, is_there) == ((0, False) if answer == "y" else (1, True))
    if answer == "n":
        assert f"stream {stream} with 0 messages was not deleted\n" in shown


@pytest.mark.long
def test_global_options_may_stand_behind_the_command(broker: BrokerProcess, stream: str) -> None:
    def names(*arguments: str) -> list[str]:
        found = json.loads(natslog(*arguments, url="http://127.0.0.1:1").stdout)
        return [body["name"] for body in (found if isinstance(found, list) else [found])]

    assert stream in names("stream", "ls", "--json", "--server", broker.url)
    assert names("stream", "info", f"--server={broker.url}", stream, "--json", "--token", "t") == [stream]
    wrong = natslog("stream", "ls", "--tls-ca", "/missing.pem", url=broker.url, check=False)
    assert (wrong.returncode, wrong.stderr) == (1, "error: cannot read the TLS ca file /missing.pem\n")


LINES = 'plain\n{"a": 1, "to": "x"}\n'
CSV = 'to,n,text\nx,1,"a, b"\ny,2,"say ""hi"""\nx,3,grün\n'


@pytest.mark.parametrize(
    ("form", "content", "subject", "options", "expected"),
    [
        ("lines", LINES, "all", [], [("all", None, "plain"), ("all", None, '{"a": 1, "to": "x"}')]),
        (
            "ndjson",
            '{"a": 1, "to": "x"}\n\n{"a":2,"to":"y"}\n',
            "{to}.new",
            ["--key", "a"],
            [("x.new", b"1", '{"a": 1, "to": "x"}'), ("y.new", b"2", '{"a":2,"to":"y"}')],
        ),
        (
            "csv",
            CSV,
            "{to}",
            ["--key", "n"],
            [
                ("x", b"1", '{"to":"x","n":1,"text":"a, b"}'),
                ("y", b"2", '{"to":"y","n":2,"text":"say \\"hi\\""}'),
                ("x", b"3", '{"to":"x","n":3,"text":"grün"}'),
            ],
        ),
    ],
)
@pytest.mark.long
def test_pub_of_files_keeps_subject_key_and_payload(
    client: NatslogClient, nats_url: str, stream: str, tmp_path: Path,
    form: str, content: str, subject: str, options: list[str], expected: list[tuple[str, bytes | None, str]],
) -> None:  # fmt: skip
    path = tmp_path / "input"
    path.write_text(content)
    command = ["pub", f"{stream}.{subject}", "--format", form, "--ack", "--nats-url", nats_url, *options]
    natslog(*command, "--file", str(path))
    done = natslog(*command, "--file", "-", "--json", input=content)
    counts = json.loads(done.stdout)
    assert (counts["sent"], counts["acked"]) == (len(expected), len(expected))
    rows = [row for batch in client.read(stream) for row in batch.to_pylist()]
    found = [(row["subject"].removeprefix(f"{stream}."), row["key"], row["value"].decode()) for row in rows]
    assert found == [*expected, *expected]


def test_pub_of_one_message(client: NatslogClient, nats_url: str, stream: str) -> None:
    done = natslog("pub", f"{stream}.x", "hello", "--ack", "--nats-url", nats_url)
    assert done.stdout.startswith("sent 1, acked 1")
    assert all_values(client, stream) == [b"hello"]


@pytest.mark.long
def test_pub_of_one_json_object_takes_its_fields(client: NatslogClient, nats_url: str, stream: str) -> None:
    natslog("pub", f"{stream}.{{to}}", '{"to": "x", "n": 7}', "--key", "n", "--ack", "--nats-url", nats_url)
    (row,) = (row for batch in client.read(stream) for row in batch.to_pylist())
    assert (row["subject"], row["key"], row["value"]) == (f"{stream}.x", b"7", b'{"to": "x", "n": 7}')


@pytest.mark.long
def test_pub_without_payload_takes_standard_input_as_one_message(
    client: NatslogClient, nats_url: str, stream: str
) -> None:
    natslog("pub", f"{stream}.x", "--ack", "--nats-url", nats_url, input="two\nlines\n")
    assert all_values(client, stream) == [b"two\nlines\n"]


@pytest.mark.parametrize(
    ("arguments", "content", "words"),
    [
        (["x"], None, "give a PAYLOAD, --file, or data on standard input"),
        (["x.{a}", "plain"], None, "line 1 is not JSON"),
        (["x.{a}", '{"b": 1}'], None, "line 1 has no field 'a'; it has b"),
        (["x", "y", "--file", "FILE"], "", "either a PAYLOAD or --file"),
        (["x", "y", "--format", "csv"], "", "--format csv is for rows: give --file FILE"),
        (["x", "--file", "/nosuch"], None, "cannot read /nosuch"),
        (["{a}", "--file", "FILE"], "x\n", "lines have no fields"),
        (["{a}", "--file", "FILE", "--format", "csv"], "b\n1\n", "line 2 has no field 'a'; it has b"),
        (["x", "--file", "FILE", "--format", "csv"], "a,b\n1\n", "line 2 has 1 fields, the header 2"),
        (["x", "--file", "FILE", "--format", "csv"], "", "the file is empty"),
        (["x", "--file", "FILE", "--format", "ndjson"], "{}\nnope\n", "line 2 is not JSON"),
        (["x", "--file", "FILE", "--format", "ndjson"], "[1]\n", "line 1 is not a JSON object"),
        (
            ["x.{a}", "--file", "FILE", "--format", "ndjson"],
            '{"a": "b c"}\n',
            "line 1: field 'a' is 'b c', which cannot be one level",
        ),
        (["a..b", "hello"], None, "not one plain NATS subject"),
    ],
)
@pytest.mark.long
def test_pub_of_bad_input_names_it(
    nats_url: str, tmp_path: Path, arguments: list[str], content: str | None, words: str
) -> None:
    path = tmp_path / "input"
    if content is not None:
        path.write_text(content)
    named = [str(path) if argument == "FILE" else argument for argument in arguments]
    done = natslog("pub", *named, "--nats-url", nats_url, check=False, input="")
    assert done.returncode == 1
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_pub_of_csv_states_the_types_of_columns(
    client: NatslogClient, nats_url: str, stream: str, tmp_path: Path
) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("id,zip,price,at,ok\n1,01234,9.50,2024-01-01T10:00:00Z,TRUE\n2,,,,\n")
    command = ["pub", f"{stream}.x", "--format", "csv", "--ack", "--nats-url", nats_url, "--file"]
    done = natslog(*command, str(path))
    assert done.stderr.startswith("types: id BIGINT, zip STRING, price DOUBLE, at TIMESTAMP, ok BOOLEAN\n")
    shown = json.loads(natslog(*command, str(path), "--strings", "--types", "id BIGINT", "--json").stdout)
    assert shown["types"] == "id BIGINT, zip STRING, price STRING, at STRING, ok STRING"
    natslog(*command, "-", input=path.read_text())
    values = [row["value"].decode() for batch in client.read(stream) for row in batch.to_pylist()]
    typed = [
        '{"id":1,"zip":"01234","price":9.50,"at":"2024-01-01T10:00:00Z","ok":true}',
        '{"id":2,"zip":"","price":null,"at":null,"ok":null}',
    ]
    text = [
        '{"id":1,"zip":"01234","price":"9.50","at":"2024-01-01T10:00:00Z","ok":"TRUE"}',
        '{"id":2,"zip":"","price":"","at":"","ok":""}',
    ]
    assert values == [*typed, *text, *typed]


def test_pub_states_what_was_sent_before_an_error(nats_url: str, stream: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.ndjson"
    path.write_text('{"a":1}\n' * 4500 + "oops\n")
    command = ("pub", f"{stream}.x", "--format", "ndjson", "--ack", "--nats-url", nats_url, "--file", str(path))
    done = natslog(*command, check=False)
    assert (done.returncode, "error: line 4501 is not JSON" in done.stderr) == (1, True)
    assert "stopped: 4000 messages were sent before the error, acked 4000\n" in done.stderr


def test_similar_names_are_named(broker: BrokerProcess, client: NatslogClient) -> None:
    client.create_stream("measurements", "measurements.>")
    done = natslog("cat", "mesurements", url=broker.url, check=False)
    assert (done.returncode, done.stderr) == (
        1,
        "error: there is no stream 'mesurements'. Did you mean measurements?\n",
    )
    other = natslog("cat", "entirely-different", url=broker.url, check=False)
    assert other.stderr == "error: there is no stream 'entirely-different'\n"


@pytest.mark.parametrize("value", ["10.0.0.1", "a b", "*", ">", ""])
@pytest.mark.long
def test_pub_refuses_a_field_that_is_no_level_of_a_subject(nats_url: str, tmp_path: Path, value: str) -> None:
    path = tmp_path / "input"
    path.write_text("ip\nx\n" + f'"{value}"\n')
    command = ("pub", "visits.{ip}", "--format", "csv", "--file", str(path), "--nats-url", nats_url)
    done = natslog(*command, check=False)
    assert done.returncode == 1
    assert f"error: line 3: field 'ip' is {value!r}, which cannot be one level of a subject" in done.stderr
    assert ("use --in-subject escape or --in-subject split" in done.stderr) == bool(value)


@pytest.mark.long
@pytest.mark.parametrize(("option", "expected"), [("escape", "10%2E0%2E0%2E1"), ("split", "10.0.0.1")])
def test_pub_escapes_or_splits_a_field_on_request(
    client: NatslogClient, nats_url: str, stream: str, option: str, expected: str
) -> None:
    command = ("pub", f"{stream}.{{ip}}", '{"ip": "10.0.0.1"}', "--in-subject", option, "--ack", "--nats-url", nats_url)
    natslog(*command)
    (row,) = (row for batch in client.read(stream) for row in batch.to_pylist())
    assert row["subject"] == f"{stream}.{expected}"


def _peak_kib(*arguments: str) -> tuple[int, str, int]:
    """Exit code, standard error and largest resident memory of the command."""
    command = [sys.executable, "-m", "natslog", *arguments]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = process.stderr.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, said, usage.ru_maxrss


@pytest.mark.long
def test_pub_sends_headers(broker: BrokerProcess, client: NatslogClient, nats_url: str, name: str) -> None:
    client.create_stream(name, name, allow_ttl=True)
    url = ["--nats-url", nats_url, "--ack"]
    natslog("pub", name, "one", "--header", "Nats-TTL:1h", "--header", "X: a b", *url, url=broker.url)
    natslog("pub", name, "two", "--header", "Nats-Msg-Id: m1", *url, url=broker.url)
    natslog("pub", name, "two", "--header", "Nats-Msg-Id: m1", *url, url=broker.url)
    first, second = (row["headers"] for batch in client.read(name) for row in batch.to_pylist())
    assert {"key": "X", "value": "a b"} in first
    assert {"key": "Nats-TTL", "value": "1h"} in first
    assert second == [{"key": "Nats-Msg-Id", "value": "m1"}]
    for text, why in (("X", "must be NAME:VALUE"), (": b", "must be NAME:VALUE"), ("X: a\nb", "not allowed")):
        refused = natslog("pub", name, "x", "--header", text, *url, url=broker.url, check=False)
        assert refused.returncode != 0
        assert why in refused.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    ("form", "first"),
    [
        ("lines", "x\n"),
        *(pytest.param(*one, marks=pytest.mark.long) for one in [("ndjson", "{}\n"), ("csv", "a\n1\n")]),
    ],
)
def test_pub_of_a_line_beyond_the_servers_limit_names_it_in_bounded_memory(
    nats_url: str, tmp_path: Path, form: str, first: str
) -> None:
    small, large = tmp_path / "small", tmp_path / "large"
    small.write_text(first)
    large.write_text(first)
    with open(large, "r+b") as file:
        file.truncate(300 * 1024 * 1024)  # a hole: one line of zeros
    command = ["pub", "x", "--format", form, "--nats-url", nats_url, "--file"]
    code, _, usual_kib = _peak_kib(*command, str(small))
    assert code == 0
    code, said, peak_kib = _peak_kib(*command, str(large))
    number = first.count("\n") + 1
    assert code == 1
    assert f"error: line {number} is larger than the 1048576 bytes that the NATS server accepts in a message" in said
    assert peak_kib < usual_kib + 32 * 1024, f"{peak_kib} KiB instead of {usual_kib} KiB"


@pytest.mark.long
def test_pub_of_standard_input_without_end_is_refused_in_bounded_memory(nats_url: str) -> None:
    with open("/dev/zero", "rb") as endless:
        done = natslog("pub", "x", "--nats-url", nats_url, check=False, stdin=endless)
    assert done.returncode == 1
    assert "standard input is larger than the 1048576 bytes that the NATS server accepts in a message" in done.stderr


@pytest.mark.long
def test_pub_without_nats_says_so() -> None:
    done = natslog("pub", "x", "y", "--nats-url", "nats://127.0.0.1:1", check=False)
    assert done.returncode == 1
    assert "no NATS server responds at nats://127.0.0.1:1" in done.stderr


_FOREVER = ("--ack", "--ack-timeout", "100000", "--nats-url")


@pytest.mark.parametrize("is_received", [False, True], ids=["not received", "received by a plain subscriber"])
@pytest.mark.long
def test_pub_to_a_subject_that_no_stream_records_says_so_long_before_its_timeout(
    broker: BrokerProcess, nats_url: str, name: str, is_received: bool
) -> None:
    async def publish(connection: Any) -> subprocess.CompletedProcess[str]:
        if is_received:
            await connection.subscribe(f"{name}.new")
            await flushed(connection)
        command = ("pub", f"{name}.new", "x", *_FOREVER, nats_url)
        return await asyncio.to_thread(natslog, *command, url=broker.url, check=False)

    done = with_nats(nats_url, publish)
    assert done.returncode == 1
    assert f"No stream records '{name}.new'. Create one: natslog stream create" in done.stderr


@pytest.mark.long
def test_pub_with_ack_to_a_stream_that_never_acks_says_so_long_before_its_timeout(
    broker: BrokerProcess, nats_url: str, name: str
) -> None:
    natslog("stream", "create", name, "--subject", name, "--acks", "never", url=broker.url)
    done = natslog("pub", name, "x", *_FOREVER, nats_url, url=broker.url, check=False)
    assert done.returncode == 1
    assert f"Stream {name} records '{name}' with the setting acks=never" in done.stderr


@pytest.mark.long
def test_pub_with_ack_to_a_sealed_stream_says_so_long_before_its_timeout(
    broker: BrokerProcess, nats_url: str, stream: str
) -> None:
    natslog("stream", "seal", stream, "--yes", url=broker.url)
    done = natslog("pub", f"{stream}.a", "x", *_FOREVER, nats_url, url=broker.url, check=False)
    assert done.returncode == 1
    assert f"Stream {stream} on '{stream}.a' is sealed" in done.stderr


@pytest.mark.long
def test_pub_with_ack_waits_for_a_stream_that_is_paused(broker: BrokerProcess, nats_url: str, stream: str) -> None:
    natslog("stream", "pause", stream, url=broker.url)
    server = ["--server", broker.url]
    command = [sys.executable, "-m", "natslog", *server, "pub", f"{stream}.a", "x", *_FOREVER, nats_url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as waiting:
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(5)
        natslog("stream", "resume", stream, url=broker.url)
        assert waiting.wait(30) == 0


@pytest.mark.long
def test_cat_from_count_json_arrow_and_follow(broker: BrokerProcess, nats_url: str, stream: str) -> None:
    publish_acked(nats_url, f"{stream}.a", [b"%d" % at for at in range(10)])
    assert natslog("cat", stream, url=broker.url).stdout == "".join(f"{at}\n" for at in range(10))
    assert natslog("cat", stream, "--from", "7", url=broker.url).stdout == "7\n8\n9\n"
    assert natslog("cat", stream, "--from", "2", "--count", "3", url=broker.url).stdout == "2\n3\n4\n"
    assert natslog("cat", stream, "--from", "latest", url=broker.url).stdout == ""
    assert natslog("cat", stream, "--from", "2000-01-01", "--count", "1", url=broker.url).stdout == "0\n"
    (line,) = natslog("cat", stream, "--from", "9", "--json", url=broker.url).stdout.splitlines()
    assert json.loads(line)["value"] == "9"
    command = [sys.executable, "-m", "natslog", "--server", broker.url, "cat", stream, "--arrow"]
    arrow = subprocess.run(command, capture_output=True, check=True).stdout
    assert pa.ipc.open_stream(io.BytesIO(arrow)).read_all().column("offset").to_pylist() == list(range(10))
    beyond = natslog("cat", stream, "--from", "99", url=broker.url, check=False)
    assert (beyond.returncode, "has offsets 0 to 9" in beyond.stderr) == (1, True)
    follow = [*command[:-1], "--from", "latest", "--follow", "--count", "1"]
    with subprocess.Popen(follow, stdout=subprocess.PIPE) as following:
        assert following.stdout is not None
        for _ in range(40):  # it may not be listening yet; what it prints is the first message after it began
            publish_acked(nats_url, f"{stream}.a", [b"new"])
            if following.poll() is not None:
                break
            try:
                following.wait(0.5)
            except subprocess.TimeoutExpired:
                continue
        assert following.stdout.read() == b"new\n"


_STEERING = "\x1b]0;title\x07\u009b31mred\ttab\r\x7f".encode() + b"\xff"


@pytest.mark.parametrize("options", [(), ("--json",)])
@pytest.mark.long
def test_cat_escapes_control_characters_on_a_terminal_only(
    broker: BrokerProcess, nats_url: str, stream: str, options: tuple[str, ...]
) -> None:
    publish_acked(nats_url, f"{stream}.a", [_STEERING, "grün".encode(), "\u009b2J".encode()])
    code, shown = on_terminal("cat", stream, *options, url=broker.url)
    assert code == 0
    assert not set(shown) & set(map(chr, [*range(9), *range(11, 32), *range(0x7F, 0xA0)])), repr(shown)
    assert "grün" in shown
    if options:
        assert [json.loads(line).get("value") for line in shown.splitlines()] == [None, "grün", "\u009b2J"]
        return
    assert r"\x1b]0;title\x07\x9b31mred" in shown
    command = [sys.executable, "-m", "natslog", "--server", broker.url, "cat", stream]
    piped = subprocess.run(command, capture_output=True, check=True).stdout
    assert piped == _STEERING + b"\n" + "grün\n\u009b2J\n".encode()


@pytest.mark.long
def test_lists_and_errors_escape_control_characters_on_a_terminal_only(broker: BrokerProcess, stream: str) -> None:
    """Whoever may create a stream chooses its subject, which may have the control characters from U+0080 to U+009F."""
    subject = f"{stream}-other.\u009b31mred"
    natslog("stream", "create", f"{stream}-other", "--subject", subject, url=broker.url)
    for arguments in (
        ("stream", "ls"),
        ("stream", "info", f"{stream}-other"),
        ("stream", "create", f"{stream}-other", "--subject", "x"),
    ):
        _, shown = on_terminal(*arguments, url=broker.url)
        assert r"\x9b" in shown, shown
        assert "\u009b" not in shown
    assert subject in natslog("stream", "ls", url=broker.url).stdout


def test_cat_of_arrow_to_a_terminal_is_refused(broker: BrokerProcess, stream: str) -> None:
    code, shown = on_terminal("cat", stream, "--arrow", url=broker.url)
    assert (code, "redirect it to a file or a pipe" in shown) == (1, True)


@pytest.mark.long
@pytest.mark.parametrize("arguments", [("cat", "STREAM"), ("cat", "STREAM", "--arrow"), ("stream", "ls"), ("--help",)])
def test_closed_pipe_ends_a_command_quietly(
    broker: BrokerProcess, nats_url: str, stream: str, arguments: tuple[str, ...]
) -> None:
    publish_acked(nats_url, f"{stream}.a", [b"x" * 1000] * 300)
    named = [stream if argument == "STREAM" else argument for argument in arguments]
    ours, theirs = os.pipe()
    os.close(ours)
    command = [sys.executable, "-m", "natslog", "--server", broker.url, *named]
    done = subprocess.run(command, stdout=theirs, stderr=subprocess.PIPE, check=False)
    os.close(theirs)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.long
@pytest.mark.parametrize("arguments", [("cat", "STREAM"), ("cat", "STREAM", "--arrow"), ("stream", "ls"), ("--help",)])
def test_full_disk_behind_standard_output_is_one_sentence(
    broker: BrokerProcess, nats_url: str, stream: str, arguments: tuple[str, ...]
) -> None:
    publish_acked(nats_url, f"{stream}.a", [b"x"])
    named = [stream if argument == "STREAM" else argument for argument in arguments]
    command = [sys.executable, "-m", "natslog", "--server", broker.url, *named]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False)
    said = b"error: cannot write to standard output: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, said)


@pytest.mark.long
def test_verify_finds_damage_and_says_where(own: Path) -> None:
    with running(own, segment_bytes="8KiB", retention_interval="200ms") as (server, broker):
        client = broker.client()
        client.create_stream("orders", "orders")
        for _ in range(20):
            publish_acked(server.url, "orders", [b"x" * 1000])
        eventually(lambda: list(broker.folder.rglob("*.arrow")))
        broker.terminate()
    good = natslog("verify", str(broker.folder), "--json")
    assert json.loads(good.stdout)["damaged"] == 0
    victim = sorted(broker.folder.rglob("*.arrow"))[0]
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 4
    victim.write_bytes(data)
    bad = natslog("verify", str(broker.folder), check=False)
    assert bad.returncode == 1
    assert "1 damaged" in bad.stdout
    report = json.loads(natslog("verify", str(broker.folder), "--json", check=False).stdout)
    (damaged,) = [file for file in report["files"] if file["problems"]]
    assert damaged["file"] == str(victim)
    assert "offsets" in damaged["problems"][0]


def test_dev_starts_all_says_ready_and_stops_cleanly_on_interrupt(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "natslog", "dev", "--data-dir", str(tmp_path / "d"), "--nats-port", "0"]
    with subprocess.Popen([*command, "--http-port", "0"], stdout=subprocess.PIPE, text=True) as dev:
        assert dev.stdout is not None
        lines = [dev.stdout.readline().split() for _ in range(4)]
        assert [line[0] for line in lines] == ["NATS", "HTTP", "data", "ready"]
        nats_port = int(lines[0][1].rsplit(":", 1)[1])
        natslog("stream", "create", "orders", "--subject", "orders.>", url=lines[1][1])
        natslog("pub", "orders.a", "kept", "--ack", "--nats-url", lines[0][1])
        eventually(lambda: NatslogClient(lines[1][1]).cluster()["nats_leaf"] == "up", what="the leafnode connection")
        dev.send_signal(signal.SIGINT)
        assert dev.wait(10) == 0
    assert not is_listening(nats_port)
    with subprocess.Popen([*command, "--http-port", "0"], stdout=subprocess.PIPE, text=True) as dev:
        assert dev.stdout is not None
        lines = [dev.stdout.readline().split() for _ in range(4)]
        assert natslog("cat", "orders", url=lines[1][1]).stdout == "kept\n"
        dev.terminate()
        assert dev.wait(10) == 0


@pytest.mark.long
@runs("README.md", block="Three brokers")
def test_dev_with_three_brokers_gives_them_the_leafnode_listener(tmp_path: Path, block: Block) -> None:
    start, create, wait = (shlex.split(line)[1:] for line in block.shell_lines)
    own = ["--data-dir", str(tmp_path / "d"), "--http-port", "0", "--nats-port", "0"]
    command, errors = [sys.executable, "-m", "natslog", *start, *own], tmp_path / "errors"
    with errors.open("w") as file, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True) as dev:
        assert dev.stdout is not None
        urls = [dev.stdout.readline().split()[1] for _ in range(4)][1:]
        for url in urls:
            eventually(lambda url=url: NatslogClient(url).cluster()["nats_leaf"] == "up", what="the connection")
        natslog(*create, url=urls[0])
        assert "healthy: 3 of 3 brokers" in natslog(*wait, url=urls[0]).stdout
        children = psutil.Process(dev.pid).children(recursive=True)
        next(one for one in children if "broker-2" in " ".join(one.cmdline())).kill()
        eventually(lambda: "broker 2 was killed by signal 9" in errors.read_text(), what="it is stated")
        assert natslog("cluster", "status", "--json", url=urls[0], check=False).returncode in (0, 1)
        assert dev.poll() is None, "the others continue"
        dev.terminate()
        assert dev.wait(30) == 0
    alone = natslog("dev", "--data-dir", str(tmp_path / "e"), "--nats-leaf-url", "nats-leaf://a", check=False)
    assert (alone.returncode, "--nats-leaf-url belongs to --nats-url" in alone.stderr) == (1, True)


@pytest.mark.long
def test_dev_gives_its_brokers_a_password_that_other_users_cannot_see(tmp_path: Path) -> None:
    config = tmp_path / "nats.conf"
    leaf = f"127.0.0.1:{free_port()}"
    config.write_text(f"authorization {{ user: user, password: SECRET }}, leafnodes {{ listen: {leaf} }}")
    nats = NatsServer(0, tmp_path / "nats.log", arguments=("--config", str(config))).start()
    url = f"nats://user:SECRET@127.0.0.1:{nats.port}"
    command = [sys.executable, "-m", "natslog", "dev", "--brokers", "3", "--data-dir", str(tmp_path / "d")]
    command += ["--nats-leaf-url", f"nats-leaf://user:SECRET@{leaf}"]
    try:
        with subprocess.Popen([*command, "--http-port", "0", "--nats-url", url], stdout=subprocess.PIPE) as dev:
            assert dev.stdout is not None
            lines = [dev.stdout.readline().decode().split() for _ in range(5)]
            assert lines[-1] == ["ready"]
            brokers = psutil.Process(dev.pid).children(recursive=True)
            assert len(brokers) == 3
            for broker in brokers:
                assert "SECRET" not in Path(f"/proc/{broker.pid}/cmdline").read_text()
            natslog("stream", "create", "orders", "--subject", "orders", url=lines[1][1])
            natslog("pub", "orders", "x", "--ack", "--nats-url", url)
            eventually(lambda: NatslogClient(lines[1][1]).cluster()["nats_leaf"] == "up", what="the connection")
            dev.terminate()
            assert dev.wait(30) == 0
    finally:
        nats.stop()


@pytest.mark.long
def test_taken_ports_and_folders_are_one_sentence_with_the_remedy(
    broker: BrokerProcess, nats_url: str, tmp_path: Path
) -> None:
    nats_port = nats_url.rsplit(":", 1)[1]
    taken = natslog("dev", "--data-dir", str(tmp_path / "a"), "--nats-port", nats_port, check=False)
    assert (taken.returncode, "choose another port with --nats-port" in taken.stderr) == (1, True)
    http = ["server", "--nats-url", nats_url, "--http-port"]
    taken = natslog(*http, str(broker.http_port), "--data-dir", str(tmp_path / "b"), check=False)
    assert (taken.returncode, "choose another port with --http-port" in taken.stderr) == (1, True)
    taken = natslog(*http, str(free_port()), "--data-dir", str(broker.folder), check=False)
    assert taken.returncode == 1
    assert f"in use by a running broker (process {broker.pid})" in taken.stderr
    assert "Traceback" not in taken.stderr


@pytest.mark.long
def test_wrong_usage_is_exit_code_2_and_no_broker_is_1() -> None:
    assert natslog("stream", "create", "x", check=False).returncode == 2
    assert natslog("nosuch", check=False).returncode == 2
    assert natslog("--help").returncode == 0
    done = natslog("stream", "ls", url="http://127.0.0.1:1", check=False)
    assert done.returncode == 1
    assert "natslog dev" in done.stderr


def test_files_of_a_broker_can_be_read_by_its_user_only(broker: BrokerProcess, filled: str) -> None:
    paths = [broker.folder, *broker.folder.rglob("*")]
    assert any(path.name.endswith(".active") for path in paths)
    assert [path for path in paths if path.lstat().st_mode & 0o077] == []
