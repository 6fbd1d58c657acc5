"""Clients of the simulated consumer: they pull or subscribe, ack in every way or not at all, and go."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from natslog.jetstream.consumers.pulls import Status
from tests.sim.consumer_broker import Ack

if TYPE_CHECKING:
    from tests.sim.consumer_world import Scene

_MS = 1_000_000
_CLIENT, _BROKER = 1, 2
_MOST_PULLS = 4
_KINDS = ("ack",) * 8 + ("nak", "nak late", "progress", "term", "next") + ("",) * 3
_TRIES = 8
_FEW = 5


class Client:
    """All of them. `interest`: subjects to which somebody is subscribed."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.world = scene, scene.world
        self.interest: set[str] = set()
        self.kept: list[tuple[int, int]] = []  # sequence of the stream and of the consumer
        self.unanswered: dict[str, Ack] = {}
        self.former_state: tuple[int, bytes] | None = None  # of mutations
        self._number = 0
        self._waiting: list[Ack] = []
        chance = self.world.random
        self.acks_share = chance.choice((0.4, 0.9, 1.0))
        self.think_ms = chance.choice(((0.0, 5.0), (0.0, 150.0), (20.0, 800.0)))
        if scene.config.is_push:
            self.interest.add(scene.config.deliver_subject)

    # ---- pulls ----

    def act(self) -> None:
        chance, is_healed = self.world.random, self.scene.is_healed
        self.world.after(chance.uniform(1, 60), self.act)
        if self.scene.config.is_push:
            if not self.interest and (is_healed or chance.random() < 0.2):
                self.interest.add(self.scene.config.deliver_subject)
                self.scene.host.check_interest()
            return
        if len(self.interest) < (1 if is_healed else _MOST_PULLS):
            self._pull(self._request())
        elif not is_healed and chance.random() < 0.3:
            self._go(chance.choice(sorted(self.interest)))

    def _request(self) -> dict[str, object]:
        chance = self.world.random
        if self.scene.is_healed:
            return {"batch": 20, "expires": 400 * _MS}
        batch = chance.choice((1, 1, 2, 5, 20, 0))
        expires = chance.choice((0, 30, 200, 1000)) * _MS
        request: dict[str, object] = {"batch": batch, "expires": expires, "no_wait": chance.random() < 0.3}
        if chance.random() < 0.25:
            request["max_bytes"] = chance.choice((100, 700, 3000))
        if expires and chance.random() < 0.3:
            request["idle_heartbeat"] = expires // chance.choice((2, 3, 10))
        return request

    def _pull(self, request: dict[str, object]) -> None:
        reply = self._new("pull")
        self.interest.add(reply)
        payload = json.dumps(request).encode()
        self.world.after(self.world.random.uniform(0, 3), lambda: self.scene.host.pull(reply, payload))
        lost_ms = 2000.0 if self.scene.is_healed else self.world.random.uniform(100, 2000)
        self.world.after(lost_ms, lambda: self._go(reply))

    def _new(self, what: str) -> str:
        self._number += 1
        return f"{what}{self._number}"

    def _go(self, reply: str) -> None:
        self.interest.discard(reply)
        self.scene.checker.closed(reply)

    def ended(self, reply: str) -> None:
        self.interest.discard(reply)

    def leave(self) -> None:
        """The subscriber of a push consumer goes, or somebody who has pulled."""
        if self.scene.config.is_push:
            self.interest.clear()
            self.scene.host.check_interest()
        else:
            for reply in sorted(self.interest):
                self._go(reply)

    # ---- messages ----

    def receive(self, seq: int, delivered_as: int) -> None:
        chance = self.world.random
        self.world.note(f"{seq} as {delivered_as}")
        self.kept.append((seq, delivered_as))
        del self.kept[:-200]
        if self.scene.is_healed:
            self._send("ack", seq, delivered_as, is_answered=True)
        elif chance.random() < self.acks_share:
            kind = chance.choice(_KINDS)
            is_answered = chance.random() < 0.4
            if kind:
                self.world.after(
                    chance.uniform(*self.think_ms),
                    lambda: self._send(kind, seq, delivered_as, is_answered=is_answered),
                )
        if not self.scene.is_healed and chance.random() < 0.05:
            late = chance.choice(self.kept)
            self._send(chance.choice(("ack", "nak", "progress")), *late, is_answered=chance.random() < 0.5)

    def _send(self, kind: str, seq: int, delivered_as: int, *, is_answered: bool) -> None:
        delay_us = -1
        if kind == "nak late":
            kind, delay_us = "nak", self.world.random.choice((0, 20_000, 500_000))
        reply = ""
        if kind == "next":
            reply = self._new("pull")
            self.interest.add(reply)
            self.world.after(600, lambda: self._go(reply))
        elif kind in ("ack", "term") and is_answered:
            reply = self._new("ack")
            self.unanswered[reply] = (kind, seq, delivered_as, reply, delay_us)
            self._again(reply, _TRIES)
        self._enqueue((kind, seq, delivered_as, reply, delay_us))

    def ack_at_once(self) -> None:
        """What came last."""
        acks: list[Ack] = [("ack", seq, delivered_as, "", -1) for seq, delivered_as in self.kept[-_FEW:]]
        self.scene.host.acks(acks)

    def _again(self, reply: str, tries: int) -> None:
        """Until it is answered, or for a while."""

        def again() -> None:
            ack = self.unanswered.get(reply)
            if ack is not None and tries:
                self._enqueue(ack)
                self._again(reply, tries - 1)

        self.world.after(300, again)

    def _enqueue(self, ack: Ack) -> None:
        """Acks that are sent at about the same time arrive together."""
        if not self._waiting:
            self.world.after(0.5, self._flush)
        self._waiting.append(ack)

    def _flush(self) -> None:
        acks, self._waiting = self._waiting, []
        if self.world.random.random() < 0.5:
            self.world.send(_CLIENT, _BROKER, self.scene.host.acks, acks)
        else:
            for ack in acks:
                self.world.send(_CLIENT, _BROKER, self.scene.host.acks, [ack])

    def answered(self, reply: str) -> None:
        self.unanswered.pop(reply, None)

    # ---- push ----

    def asked(self, reply: str) -> None:
        """A request of flow control, behind the messages before."""
        if self.interest and (self.scene.is_healed or self.world.random.random() < 0.7):
            self.world.after(self.world.random.uniform(0, 50), lambda: self.scene.host.confirm_flow(reply))

    def heartbeat(self, one: Status) -> None:
        """It states a request of flow control that was not answered."""
        for line in one.headers.decode().splitlines():
            name, _, value = line.partition(": ")
            if name == "Nats-Consumer-Stalled":
                self.asked(value)

    # ---- the end ----

    def heal(self) -> None:
        if self.scene.config.is_push:
            self.interest.add(self.scene.config.deliver_subject)
            self.scene.host.check_interest()
