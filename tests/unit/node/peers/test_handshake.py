"""The handshake message by message, with an attacker who holds, changes, repeats and reflects what he likes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from natslog.errors import ClusterMismatch, natslog_version
from natslog.model import BrokerId
from natslog.node.peers.handshake import (
    PROTOCOL,
    Dialling,
    Greeted,
    Hello,
    Met,
    checked_hello,
    greeted,
)
from natslog.node.peers.keys import KeyRing
from natslog.node.peers.messages import NatsReachability, decode_frame, encode_frame

SECRET, NEWER, OTHER = b"the cluster's secret", b"the secret after that", b"of another cluster"
ONE, TWO, ATTACKER = "http://one:9292", "http://two:9292", "http://attacker:80"
RING = KeyRing([SECRET])


def hello(broker: int, **changed: Any) -> Hello:
    fields: dict[str, Any] = {
        "protocol": PROTOCOL,
        "version": natslog_version(),
        "broker": BrokerId(broker),
        "url": f"http://broker{broker}:9292",
        "directory": f"d{broker}",
        "life": 3,
        "cluster_id": "c",
        "min_level": 1,
        "max_level": 2,
        "wall_us": 1_000_000,
    }
    return Hello(**fields | changed)


def dialling(to: str = TWO, keys: KeyRing = RING, **changed: Any) -> Dialling:
    return Dialling(keys, hello(1, dialled=to, keys=keys.ids, **changed))


def accept(body: bytes, proof: str, keys: KeyRing = RING, address: str = TWO, broker: int = 2) -> Greeted:
    peer, key = checked_hello(body, proof, keys, frozenset([address]))
    return greeted(peer, body, key, hello(broker))


def shaken(dialler: KeyRing = RING, acceptor: KeyRing = RING) -> tuple[Met, Greeted]:
    dialled = dialling(keys=dialler)
    answer = accept(dialled.body, dialled.proof, acceptor)
    return dialled.met(answer.answer, answer.proof), answer


def proof_in(link: str) -> str:
    return link.partition(":")[2]


def changed(body: bytes, **fields: Any) -> bytes:
    return json.dumps(json.loads(body) | fields, separators=(",", ":")).encode()


def test_both_sides_know_each_other_and_share_a_session() -> None:
    met, answer = shaken()
    assert (met.peer.broker, answer.peer.broker) == (2, 1)
    assert met.link.startswith(answer.nonce + ":")
    session = answer.session(proof_in(met.link))
    for sealer, opener in ((met.session.sealer, session.opener), (session.sealer, met.session.opener)):
        for says in (True, False):
            frame, payload = decode_frame(
                opener.opened(sealer.seal(encode_frame(NatsReachability(says), [b"pay", b"load"])))
            )
            assert (frame, bytes(payload)) == (NatsReachability(says), b"payload")


OTHERS: dict[str, Any] = {
    "version": "9",
    "broker": 7,
    "url": "http://elsewhere",
    "directory": "other",
    "life": 4,
    "cluster_id": "other",
    "min_level": 2,
    "max_level": 9,
    "wall_us": 5,
    "nonce": "0" * 32,
    "dialled": "http://elsewhere",
    "keys": ["other"],
    "lives": ["other"],
}


def test_every_field_of_a_hello_is_among_those_that_are_changed_here() -> None:
    assert set(OTHERS) == set(Hello.__struct_fields__) - {"protocol"}


@pytest.mark.parametrize("field", OTHERS)
def test_hello_that_was_changed_on_the_way_is_refused(field: str) -> None:
    dialled = dialling()
    with pytest.raises(ClusterMismatch, match="secret"):
        accept(changed(dialled.body, **{field: OTHERS[field]}), dialled.proof)


@pytest.mark.parametrize("field", OTHERS)
def test_answer_that_was_changed_on_the_way_is_refused(field: str) -> None:
    dialled = dialling()
    answer = accept(dialled.body, dialled.proof)
    with pytest.raises(ClusterMismatch, match="did not prove"):
        dialled.met(changed(answer.answer, **{field: OTHERS[field]}), answer.proof)


def test_field_of_a_later_version_is_skipped_and_covered_by_the_proof() -> None:
    (key,) = RING.keys
    later = changed(dialling().body, lives=["d1.2", "d1.3"])
    assert accept(later, f"{key.id}:{key.proof('hello', later)}").peer.broker == 1
    with pytest.raises(ClusterMismatch, match="secret"):
        accept(changed(later, lives=[]), f"{key.id}:{key.proof('hello', later)}")


# ---- relay ----


def test_relayed_hello_is_refused_where_it_was_not_meant_to_go() -> None:
    dialled = dialling(to=ATTACKER)
    with pytest.raises(ClusterMismatch, match=f"connected to {ATTACKER}.*peer_urls"):
        accept(dialled.body, dialled.proof)


def test_relay_cannot_pretend_that_another_address_was_dialled() -> None:
    """Nor can it use a hello that was meant for the acceptor, to be answered in a dialler's name."""
    (key,) = RING.keys
    to_attacker, to_acceptor = dialling(to=ATTACKER), dialling(to=TWO)
    with pytest.raises(ClusterMismatch, match="secret"):
        accept(to_acceptor.body, to_attacker.proof)
    answer = accept(to_acceptor.body, to_acceptor.proof)
    with pytest.raises(ClusterMismatch, match="did not prove"):
        to_attacker.met(answer.answer, answer.proof)
    assert not key.proves(answer.proof.partition(":")[2], "acceptor", to_attacker.body, answer.answer)


@pytest.mark.parametrize("dialled", ["http://two:9292/", "HTTP://TWO:9292", "http://peer/"])
def test_address_is_the_same_however_it_is_written(dialled: str) -> None:
    one = dialling(to=dialled)
    checked_hello(one.body, one.proof, RING, frozenset(["http://two:9292", "http://peer"]))


@pytest.mark.parametrize("dialled", ["", "http://two", "https://two:9292", "http://two:9292/x", "two:9292"])
def test_another_address_is_refused(dialled: str) -> None:
    one = dialling(to=dialled)
    with pytest.raises(ClusterMismatch, match="peer_urls"):
        checked_hello(one.body, one.proof, RING, frozenset([TWO]))


# ---- reflection ----


def test_reflected_hello_is_no_answer() -> None:
    dialled = dialling()
    for proof in (dialled.proof, dialled.proof.replace(":", ":0")):
        with pytest.raises(ClusterMismatch, match="did not prove"):
            dialled.met(dialled.body, proof)


def test_proofs_of_one_step_are_good_for_no_other() -> None:
    dialled = dialling()
    answer = accept(dialled.body, dialled.proof)
    met = dialled.met(answer.answer, answer.proof)
    id = RING.ids[0]
    proofs = {
        "hello": dialled.proof.partition(":")[2],
        "acceptor": answer.proof.partition(":")[2],
        "dialler": proof_in(met.link),
    }
    assert len(set(proofs.values())) == 3
    for step, proof in proofs.items():
        if step != "hello":
            with pytest.raises(ClusterMismatch, match="secret"):
                accept(dialled.body, f"{id}:{proof}")
        if step != "acceptor":
            with pytest.raises(ClusterMismatch, match="did not prove"):
                dialled.met(answer.answer, f"{id}:{proof}")
        if step != "dialler":
            with pytest.raises(ClusterMismatch, match="secret"):
                answer.session(proof)


def test_frames_that_are_reflected_do_not_verify() -> None:
    met, _ = shaken()
    with pytest.raises(ClusterMismatch, match="not authentic"):
        met.session.opener.opened(met.session.sealer.seal(encode_frame(NatsReachability(True))))


# ---- replay ----


def test_replayed_hello_is_answered_and_opens_nothing() -> None:
    """The answer has another random number, so the link header of the first time is not good for it."""
    dialled = dialling()
    first = accept(dialled.body, dialled.proof)
    met = dialled.met(first.answer, first.proof)
    again = accept(dialled.body, dialled.proof)
    assert again.nonce != first.nonce
    with pytest.raises(ClusterMismatch, match="secret"):
        again.session(proof_in(met.link))


def test_frames_of_one_link_do_not_verify_on_the_next() -> None:
    (met, _), (_, answer) = shaken(), shaken()
    frame = met.session.sealer.seal(encode_frame(NatsReachability(True)))
    with pytest.raises(ClusterMismatch, match="not authentic"):
        answer.session(answer._key.proof("dialler", answer._body, answer.answer)).opener.opened(frame)


# ---- secrets ----


@pytest.mark.parametrize(
    ("dialler", "acceptor"),
    [
        ([SECRET], [SECRET, NEWER]),
        ([SECRET, NEWER], [SECRET]),
        ([NEWER, SECRET], [SECRET]),
        ([SECRET], [NEWER, SECRET]),
        ([NEWER, SECRET], [SECRET, NEWER]),
        ([NEWER], [NEWER, SECRET]),
        ([NEWER], [NEWER]),
    ],
)
def test_brokers_that_share_a_secret_meet_at_every_step_of_a_rotation(
    dialler: list[bytes], acceptor: list[bytes]
) -> None:
    met, answer = shaken(KeyRing(dialler), KeyRing(acceptor))
    session = answer.session(proof_in(met.link))
    session.opener.opened(met.session.sealer.seal(encode_frame(NatsReachability(True))))
    common = next(secret for secret in dialler if secret in acceptor)
    assert answer.proof.startswith(KeyRing([common]).ids[0] + ":"), "the dialler's first one that both have"


@pytest.mark.parametrize(("dialler", "acceptor"), [(OTHER, SECRET), (SECRET, OTHER)])
def test_another_secret_is_named(dialler: bytes, acceptor: bytes) -> None:
    with pytest.raises(ClusterMismatch, match="broker 1 at http://broker1:9292 has another cluster secret"):
        shaken(KeyRing([dialler]), KeyRing([acceptor]))


def test_acceptor_without_the_secret_is_refused() -> None:
    """It answers all the same, as an attacker would."""
    dialled = dialling()
    (key,) = KeyRing([OTHER]).keys
    for id in (key.id, RING.ids[0]):
        forged = greeted(hello(1), dialled.body, key, hello(2))
        with pytest.raises(ClusterMismatch, match="did not prove"):
            dialled.met(forged.answer, forged.proof.replace(key.id, id))


def test_key_ids_and_proofs_do_not_show_the_secret() -> None:
    (key,) = RING.keys
    assert SECRET.decode() not in repr(key)
    assert SECRET.hex()[:8] not in key.id
    assert KeyRing([SECRET]).ids != KeyRing([NEWER]).ids


# ---- other versions, and nonsense ----


def test_another_protocol_is_named_with_both_versions() -> None:
    (key,) = RING.keys
    for body in (
        changed(dialling().body, protocol=3, version="7.1"),
        b'{"protocol":3,"version":"7.1","broker":1,"url":{"of":"a later form"}}',
    ):
        with pytest.raises(ClusterMismatch) as refused:
            accept(body, f"{key.id}:{key.proof('hello', body)}")
        assert "natslog 7.1, which uses link protocol 3" in refused.value.message
        assert f"natslog {natslog_version()}, which uses link protocol 2" in refused.value.message


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[" * 100_000,
        b'{"protocol":2}',
        b'{"protocol":-1}',
        b'{"protocol":' + b"9" * 400 + b"}",
        bytes(1000),
        "\N{GREEK SMALL LETTER ALPHA}".encode(),
    ],
    ids=lambda body: repr(body[:20]),
)
def test_nonsense_is_refused(body: bytes) -> None:
    (key,) = RING.keys
    with pytest.raises(ClusterMismatch):
        accept(body, f"{key.id}:{key.proof('hello', body)}")


@pytest.mark.parametrize(
    "field",
    [
        {"broker": 0},
        {"broker": 2**64 - 1},
        {"life": -1},
        {"life": 2**53},
        {"wall_us": 2**60},
        {"max_level": 2**40},
        {"url": "http://x\nforged log line"},
        {"url": "http://" + "x" * 600},
        {"version": "x" * 65},
        {"directory": "../.."},
        {"nonce": "0"},
        {"keys": ["x"] * 17},
    ],
    ids=str,
)
def test_absurd_values_are_refused_from_a_holder_of_the_secret_too(field: dict[str, Any]) -> None:
    (key,) = RING.keys
    body = changed(dialling().body, **field)
    with pytest.raises(ClusterMismatch, match="cannot be decoded"):
        accept(body, f"{key.id}:{key.proof('hello', body)}")


def test_hello_that_is_not_utf8_is_refused() -> None:
    body = dialling().body.replace(b"broker1", b"broker\xff")
    with pytest.raises(ClusterMismatch, match="cannot be decoded"):
        accept(body, f"{RING.keys[0].id}:{RING.keys[0].proof('hello', body)}")


def test_proof_that_is_not_utf8_is_refused() -> None:
    """aiohttp decodes such bytes of a header as lone surrogates."""
    proof = RING.keys[0].id + ":" + b"\xff".decode("utf-8", "surrogateescape")
    with pytest.raises(ClusterMismatch, match="another cluster secret"):
        accept(dialling().body, proof)
