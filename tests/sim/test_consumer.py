"""A consumer, and the code around it, under many seeds (`NATSLOG_SIM_SEEDS`, 400 of them unless told), the first tenth
in `make test`, the others in `make test-all`: see `consumer_world`.

To replay one: `python -m tests.sim SEED --only consumer`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest

from natslog.jetstream.consumers.config import ConsumerConfig
from natslog.jetstream.consumers.deliveries import Batch
from natslog.jetstream.consumers.machine import Consumer
from tests.sim.consumer_world import Result, run_seed

SEEDS = int(os.environ.get("NATSLOG_SIM_SEEDS", "400"))
PARTS = [
    pytest.param(range(SEEDS // 10), id="first"),
    pytest.param(range(SEEDS // 10, SEEDS), id="others", marks=pytest.mark.long),
]
CHUNK_SEEDS = 20
TAIL_LINES = 60


def outcomes(seeds: range) -> list[Result | str]:
    """The result of each seed, or how it failed."""
    return [outcome(seed) for seed in seeds]


def outcome(seed: int) -> Result | str:
    trace: list[str] = []
    try:
        return run_seed(seed, trace=trace)
    except Exception as error:
        return "\n".join([*trace[:1], *trace[-TAIL_LINES:], f"seed {seed}: {type(error).__name__}: {error}"])


@pytest.mark.parametrize("seeds", PARTS)
def test_seeds_hold_every_promise(seeds: range) -> None:
    chunks = [seeds[at : at + CHUNK_SEEDS] for at in range(0, len(seeds), CHUNK_SEEDS)]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        found = [one for chunk in pool.map(outcomes, chunks) for one in chunk]
    failures = [told for told in found if isinstance(told, str)]
    assert not failures, f"{len(failures)} of {len(seeds)} seeds failed, the first:\n{failures[0]}"
    results = [result for result in found if isinstance(result, Result)]
    for wanted, least in (
        ("lives", 5),
        ("deliveries", 100),
        ("again", 30),
        ("acks", 50),
        ("confirmations", 10),
        ("given_up", 2),
        ("pulls", 20),
    ):
        mean = sum(getattr(result, wanted) for result in results) / len(results)
        assert mean >= least, f"too little happens: {wanted} {mean:.1f} in a seed"


def test_same_seed_gives_same_world_in_any_process() -> None:
    code = "from tests.sim.consumer_world import run_seed; print(*[run_seed(seed).digest for seed in (1, 2, 3)])"
    here = [run_seed(seed).digest for seed in (1, 2, 3)]
    for hash_seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        told = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert told.stdout.split() == here


# ---- what the simulation has found ----

_PAST_WAIT_US = 10_000_000


def delivering(count: int, *, policy: str = "all", deliver_subject: str = "out") -> Consumer:
    """A push consumer that has delivered so many messages."""
    config = ConsumerConfig(
        durable_name="c",
        ack_policy=policy,  # type: ignore[arg-type]
        ack_wait=1_000_000_000,
        max_deliver=-1,
        deliver_subject=deliver_subject,
    )
    consumer = Consumer("c", config, 1, has_interest=lambda reply: True)
    consumer.begin(1, 0)
    consumer.interest(True, 1)
    deliver(consumer, range(1, count + 1), 1)
    return consumer


def deliver(consumer: Consumer, seqs: range, now_us: int, *, is_again: bool = False) -> int:
    numbers = np.array(seqs, np.int64)
    batch = Batch(numbers, np.full(len(numbers), 10), np.full(len(numbers), 1))
    return consumer.deliver(batch, is_again=is_again, now_us=now_us, num_pending=len(numbers)).count


def ack(consumer: Consumer, seq: int, delivered_as: int) -> bool:
    return bool(np.all(consumer.ack(np.array([seq]), np.array([delivered_as]), 2)))


def test_ack_of_all_before_an_undelivered_message_is_ignored() -> None:
    """Of a message that a former leader delivered, whose state was not stored (seed 4): it raised ValueError."""
    consumer = delivering(3)
    assert not ack(consumer, 7, 7)
    assert len(consumer.pending) == 3


def test_ack_of_all_before_counts_behind_one_of_a_redelivery() -> None:
    """The number of the delivery is lower than that of the redelivery (seed 10): it was answered and ignored."""
    consumer = delivering(3)
    consumer.tick(_PAST_WAIT_US)
    assert deliver(consumer, range(1, 2), _PAST_WAIT_US, is_again=True) == 1
    assert ack(consumer, 1, 4)
    assert ack(consumer, 3, 3)
    assert not len(consumer.pending)
    assert consumer.floor == (4, 3)


def test_subscriber_that_goes_while_messages_are_read_gets_none() -> None:
    """They would count as delivered, and with the ack policy none as acked (seed 190)."""
    consumer = delivering(3, policy="none")
    wanted = consumer.wanted()
    assert wanted is not None
    consumer.interest(False, 2)
    assert deliver(consumer, range(4, 6), 2) == 0
    assert consumer.delivered == (3, 3)


def test_ack_of_all_before_below_the_floor_takes_back_that_a_message_was_given_up() -> None:
    """It was answered, and the message counted as given up for ever (seed 391)."""
    consumer = delivering(3)
    consumer.exceeded[1] = 3
    consumer.floor = (2, 2)
    assert ack(consumer, 1, 1)
    assert consumer.exceeded == {}
    assert consumer.floor == (2, 2)
    assert consumer.take_acked().tolist() == [1]
