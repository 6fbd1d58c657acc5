"""Random sequences of requests to pull consumers, their acks, and changes of the stream below them.

After each change both servers are asked until they agree, so that what one of them does later (counting a message,
removing an acked one) is not a difference.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.jetstream.both import Api, Both, Publish, Step
from tests.jetstream.consuming import Ack, Agreed, Next, Pull
from tests.jetstream.test_consumers import SECOND, consumer
from tests.jetstream.test_random import some
from tests.jetstream.test_streams import create

NAMES = st.sampled_from(["C", "D", "E"])
SUBJECTS = st.sampled_from(["a.1", "a.2", "a.3", "a.1"])
SEQUENCES = st.integers(1, 16)
SETTLED: list[Step] = [
    Agreed("CONSUMER.LIST.A"),
    Agreed("STREAM.INFO.A", {"deleted_details": True, "subjects_filter": ">"}),
]

STREAMS = some(
    retention=["limits", "limits", "workqueue", "interest"],
    max_msgs=[-1, -1, 3, 8],
    max_msgs_per_subject=[-1, -1, 2],
    discard=["old", "new"],
    storage=["file", "memory"],
    first_seq=[0, 5],
    max_consumers=[-1, 2],
)
FILTERS = some(
    filter_subject=["a.1", "a.*", "none"],
    filter_subjects=[["a.1", "a.2"], ["a.3"], []],
)
CONFIGS = st.tuples(
    st.one_of(
        st.just({}),
        some(deliver_policy=["all", "last", "new"]),
        SEQUENCES.map(lambda seq: {"deliver_policy": "by_start_sequence", "opt_start_seq": seq}),
        st.just({"deliver_policy": "last_per_subject", "filter_subject": "a.*"}),
    ),
    some(
        ack_policy=["explicit", "explicit", "all", "none"],
        max_ack_pending=[-1, 1, 2, 4],
        max_deliver=[-1, 1, 2],
        max_batch=[0, 3],
        headers_only=[False, False, True],
        description=["", "text"],
    ),
).map(lambda parts: {"ack_policy": "explicit"} | parts[0] | parts[1])
PULLS = st.tuples(
    NAMES,
    st.integers(1, 6),
    st.sampled_from([{}, {}, {"max_bytes": 60}, {"max_bytes": 150}]),
).map(lambda one: Pull("A", one[0], {"batch": one[1], "no_wait": True} | one[2], one[1] + bool(one[2])))
INDEXES = st.integers(-4, 20)
PAYLOADS = st.sampled_from([b"+ACK", b"+ACK", b"+ACK", b"", b"-NAK", b"-NAK", b"+TERM", b"+WPI"])
ACKS = st.tuples(INDEXES, PAYLOADS).map(lambda one: Ack(*one, is_request=False))
STEPS = st.one_of(
    st.tuples(SUBJECTS, st.integers(0, 30)).map(lambda one: Publish(one[0], b"v" * one[1], {"K": "v"})),
    SUBJECTS.map(Publish),
    SUBJECTS.map(Publish),
    PULLS,
    PULLS,
    PULLS,
    ACKS,
    ACKS,
    ACKS,
    INDEXES.map(lambda at: Next(at, {"batch": 1, "no_wait": True})),
    st.tuples(NAMES, CONFIGS).map(lambda one: consumer(one[0], **one[1])),
    st.tuples(NAMES, CONFIGS).map(lambda one: consumer(one[0], **one[1])),
    NAMES.map(lambda name: Api(f"CONSUMER.DELETE.A.{name}")),
    SEQUENCES.map(lambda seq: Api("STREAM.MSG.DELETE.A", {"seq": seq})),
    st.just(Api("STREAM.PURGE.A")),  # with `keep`, JetStream may go on counting a message that is gone
)


def sequence(
    stream: dict[str, Any], config: dict[str, Any], filters: tuple[dict[str, Any], ...], steps: list[Step]
) -> list[Step]:
    """Each consumer keeps its filters: JetStream does not count new messages after some changes of them. None of a
    stream with the retention `interest` begins at a sequence: JetStream keeps messages before it. None begins with the
    last message of each subject where messages are removed: JetStream subtracts each one from the number that is
    pending, also an older one that it has not counted (`decStreamPending`).
    """
    limits = ("max_msgs", "max_msgs_per_subject")
    removes = any(stream.get(name, -1) > 0 for name in limits) or stream.get("retention", "limits") != "limits"
    removes |= any(isinstance(step, Api) and step.call == "STREAM.MSG.DELETE.A" for step in steps)
    by_name = dict(zip("CDE", filters, strict=True))
    first: list[Step] = [create("A", subjects=["a.*"], **stream), consumer("C", ack_wait=600 * SECOND, **config)]
    found: list[Step] = []
    for step in [*first, *steps]:
        if isinstance(step, Api) and step.call.startswith("CONSUMER.CREATE"):
            given_config = step.body["config"]
            policy = given_config.get("deliver_policy")
            if policy == "last_per_subject" and removes:
                policy = None
                given_config = {
                    key: one for key, one in given_config.items() if key not in ("deliver_policy", "filter_subject")
                }
            if policy != "last_per_subject":
                given_config = given_config | by_name[given_config["durable_name"]]
            if policy == "by_start_sequence" and stream.get("retention") == "interest":
                given_config = {
                    key: given for key, given in given_config.items() if key not in ("deliver_policy", "opt_start_seq")
                }
            step = Api(step.call, step.body | {"config": given_config})
        found += [step] if step in first else [step, *SETTLED]
    return found


@pytest.mark.parametrize("count", [5, pytest.param(100, marks=pytest.mark.long)])
@pytest.mark.timeout(900)
def test_random_sequences_get_equal_answers(both: Both, count: int) -> None:
    @settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(
        stream=STREAMS,
        config=CONFIGS,
        filters=st.tuples(FILTERS, FILTERS, FILTERS),
        steps=st.lists(STEPS, min_size=5, max_size=40),
    )
    def compared(
        stream: dict[str, Any], config: dict[str, Any], filters: tuple[dict[str, Any], ...], steps: list[Step]
    ) -> None:
        both.delete_all()
        both.compare(sequence(stream, config, filters, steps))

    compared()
