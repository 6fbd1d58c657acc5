"""The audit log: lines that no text can imitate, and refusals at a bounded rate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from natslog.errors import ConfigError
from natslog.security.audit import AuditLog

HOSTILE = 'a\n{"event": "change"}\r\x1b[2J\x00\u2028\u202e"}'


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_bytes().decode("ascii").splitlines()]


def test_texts_of_clients_cannot_imitate_a_line(tmp_path: Path) -> None:
    log = AuditLog(7, str(tmp_path / "audit"))
    log.changed(identity="alice", path=HOSTILE, status=200)
    log.refused(identity="bob", path="x" * 100_000, status=403)
    log.close()
    change, refusal = lines(tmp_path / "audit")
    assert (change["event"], change["path"], change["broker"]) == ("change", HOSTILE, 7)
    assert refusal["event"] == "refused"
    assert len(str(refusal["path"])) == 512


def test_refusals_are_limited_and_counted_and_changes_are_not(tmp_path: Path) -> None:
    log = AuditLog(1, str(tmp_path / "audit"))
    for number in range(500):
        log.refused(status=401, number=number)
    for _ in range(200):
        log.changed(status=200)
    log._at_s -= 1  # a second later
    log.refused(status=401, number=500)
    log.close()
    found = lines(tmp_path / "audit")
    refusals = [one for one in found if one["event"] == "refused"]
    assert sum(one["event"] == "change" for one in found) == 200
    assert 100 <= len(refusals) < 150
    left_out = refusals[-1]["refusals_left_out"]
    assert isinstance(left_out, int)
    assert left_out + len(refusals) == 501


def test_clients_without_an_identity_are_a_line_an_address_and_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [1000.0]
    monkeypatch.setattr("natslog.security.audit.time.monotonic", lambda: now_s[0])
    log = AuditLog(1, str(tmp_path / "audit"))
    for number in range(2_000):
        log.unauthenticated("192.0.2.1", status=401, route=f"/{number}")
    log.unauthenticated("192.0.2.2", status=401, route="/other")
    now_s[0] += 59
    log.flush()
    assert [(one["event"], one["from"]) for one in lines(tmp_path / "audit")] == [
        ("refused", "192.0.2.1"),
        ("refused", "192.0.2.2"),
    ]
    now_s[0] += 1
    log.flush()
    (summed,) = lines(tmp_path / "audit")[2:]
    assert (summed["event"], summed["from"], summed["count"], summed["route"]) == (
        "unauthenticated",
        "192.0.2.1",
        1_999,
        "/1999",
    )
    for number in range(5_000):
        log.unauthenticated(f"address {number}", status=401)
        log.unauthenticated(f"address {number}", status=401)
    log.close()
    found = lines(tmp_path / "audit")[3:]
    assert len(found) <= 2 * 1_001, "however many addresses there are"
    assert sum(int(str(one.get("count", 1))) for one in found) == 10_000


def test_a_file_that_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="audit_file"):
        AuditLog(1, str(tmp_path / "missing" / "audit"))


def test_a_file_that_cannot_be_written_ends_no_request_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    log = AuditLog(1, str(folder / "audit"))
    log.changed(status=200)
    (folder / "audit").unlink()
    folder.rmdir()
    for _ in range(20):
        log.changed(status=200)
        log.refused(status=401)
    folder.mkdir()
    log.changed(status=201)
    log.close()
    assert [one["status"] for one in lines(folder / "audit")] == [201]
    errors = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 1
    assert "audit" in errors[0]
