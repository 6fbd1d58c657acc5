"""Problems of connections, in words of the network."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from natslog.errors import BrokerUnavailable
from natslog.nats_server import free_port
from natslog.node.peers.problems import is_refusal, problem_of


def test_an_address_of_several_is_refused_where_each_one_refuses() -> None:
    refused = "Multiple exceptions: [Errno 111] Connect call failed ('::1', 1, 0, 0), [Errno %d] Connect call failed"
    assert is_refusal(OSError(refused % 111))
    assert not is_refusal(OSError(refused % 113))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_refused_connection_is_stated_without_objects_of_python(host: str) -> None:
    async def refused() -> BaseException:
        async with aiohttp.ClientSession() as session:
            with pytest.raises(aiohttp.ClientError) as failed:
                await session.get(f"http://{host}:{free_port()}/")
            return failed.value

    refusal = asyncio.run(refused())
    assert problem_of(refusal, 3.0) == "no connection: Connection refused"
    assert is_refusal(refusal)


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (BrokerUnavailable("it is away"), "it is away"),
        (TimeoutError(), "no answer was received within 3 s"),
        (ConnectionResetError(104, "Connection reset by peer"), "the connection failed: Connection reset by peer"),
        (aiohttp.ServerDisconnectedError(), "the connection failed: Server disconnected"),
        (aiohttp.ClientError(), "the connection failed: it was closed"),
    ],
)
def test_other_problems(error: BaseException, problem: str) -> None:
    assert problem_of(error, 3.0) == problem
    assert not is_refusal(error)
