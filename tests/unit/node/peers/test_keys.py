"""The seal on frames: what an attacker between two brokers changes, repeats, drops or cuts does not verify."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import pytest

from natslog.errors import ClusterMismatch, ConfigError
from natslog.node.peers.keys import SEAL_BYTES, Key, KeyRing, Opener, Sealer
from natslog.node.peers.secret_file import SecretFile

KEY = bytes(range(32))


def sealed(*frames: bytes) -> list[bytes]:
    sealer = Sealer(KEY)
    return [bytes(sealer.seal([frame])) for frame in frames]


def test_frames_in_order_verify_whatever_their_size() -> None:
    sealer, opener = Sealer(KEY), Opener(KEY)
    for size in (0, 1, 15, 16, 17, 65536, 4 * 1024 * 1024):
        parts = [os.urandom(size // 3), b"", os.urandom(size - size // 3)]
        frame = sealer.seal(parts)
        assert len(frame) == size + SEAL_BYTES
        assert bytes(opener.opened(bytes(frame))) == b"".join(parts)


ATTACKS: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "first bit": lambda frames: [bytes([frames[0][0] ^ 1]) + frames[0][1:]],
    "last bit of the payload": lambda frames: [
        frames[0][: -SEAL_BYTES - 1] + bytes([frames[0][-SEAL_BYTES - 1] ^ 128]) + frames[0][-SEAL_BYTES:]
    ],
    "bit of the seal": lambda frames: [frames[0][:-1] + bytes([frames[0][-1] ^ 1])],
    "cut": lambda frames: [frames[0][:-1]],
    "cut in the middle": lambda frames: [frames[0][:2] + frames[0][-SEAL_BYTES:]],
    "longer": lambda frames: [frames[0] + b"\0"],
    "only a seal": lambda frames: [frames[0][-SEAL_BYTES:]],
    "nothing": lambda frames: [b""],
    "repeated": lambda frames: [frames[0], frames[0]],
    "dropped at the beginning": lambda frames: [frames[1]],
    "dropped later": lambda frames: [frames[0], frames[2]],
    "an earlier one later": lambda frames: [*frames[:2], frames[0]],
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_frames_that_were_not_sent_so_do_not_verify(attack: str) -> None:
    opener = Opener(KEY)
    frames = ATTACKS[attack](sealed(b"first frame", b"second frame", b"third frame"))
    for frame in frames[:-1]:
        opener.opened(frame)
    with pytest.raises(ClusterMismatch, match="not authentic"):
        opener.opened(frames[-1])


def test_transcripts_are_unambiguous() -> None:
    key = Key(b"sixteen characters")
    assert key.proof("hello", b"ab", b"c") != key.proof("hello", b"a", b"bc")
    assert key.proof("hello", b"ab", b"c") != key.proof("hello", b"abc")


# ---- rotation ----


def test_key_ring_uses_a_changed_file_and_keeps_its_keys_where_the_file_is_invalid(
    caplog: pytest.LogCaptureFixture,
) -> None:
    old, new = b"the secret of yesterday", b"the secret of today"
    content: list[tuple[bytes, ...] | ConfigError] = [(old,)]

    def read() -> tuple[bytes, ...]:
        if isinstance(content[0], ConfigError):
            raise content[0]
        return content[0]

    keys = KeyRing([old])
    file = SecretFile(keys, read)
    with caplog.at_level(logging.INFO):
        assert not file.refresh()
        assert not caplog.records
        kept = keys.keys
        content[0] = (old, new)
        assert file.refresh()
        assert keys.ids == KeyRing([old, new]).ids
        assert keys.keys[0] is kept[0]
        content[0] = (new, old)  # as many bytes as before
        assert file.refresh()
        assert keys.ids == KeyRing([new, old]).ids
        for complaint in ("cannot read it", "cannot read it", "it is empty"):
            content[0] = ConfigError(complaint)
            assert not file.refresh()
            assert keys.ids == KeyRing([new, old]).ids
        content[0] = (new,)
        assert file.refresh()
        assert keys.find(KeyRing([old]).ids[0]) is None
        content[0] = ConfigError("it is empty")
        assert not file.refresh()
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 3, "each one once, and again after a valid file"
    assert "secret of" not in caplog.text
