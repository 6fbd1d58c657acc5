"""A JetStream server whose answers those of natslog are compared with."""

from __future__ import annotations

import json
from typing import Any

import pytest

from natslog.nats_server import NatsServer

Script = list[tuple[str, dict[str, str]]]
"""Subjects and headers of messages."""


@pytest.fixture(scope="module")
def jetstream(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("js")
    server = NatsServer(0, folder / "js.log", arguments=("--jetstream", "--store_dir", str(folder))).start()
    yield server
    server.stop()


def shown(answer: dict[str, Any]) -> tuple[Any, ...]:
    """What JetStream's clients read of an answer."""
    if (error := answer.get("error")) is not None:
        return error["code"], error["err_code"], error["description"]
    return answer["seq"], answer.get("duplicate", False)


async def created(nats: Any, name: str, **settings: Any) -> None:
    """A JetStream stream of this name."""
    config = {"name": name, "subjects": [f"{name}.>"]} | settings
    made = await nats.request(f"$JS.API.STREAM.CREATE.{name}", json.dumps(config).encode())
    assert "error" not in json.loads(made.data), made.data


async def played(nats: Any, prefix: str, stream: str, script: Script, value_bytes: int = 1) -> list[Any]:
    """The answers to these messages, sent one after the other."""
    answers, value = [], b"x" * value_bytes
    for subject, headers in script:
        given = {name: value.format(stream=stream) for name, value in headers.items()}
        answer = await nats.request(f"{prefix}.{subject}", value, timeout=30, headers=given or None)
        answers.append(shown(json.loads(answer.data)))
    return answers
