"""Applies a plan: each change on the condition that the stream is still as it was when the plan was made.

Creations and edits are sent first, several at once; the failure of one does not affect the others. Streams are deleted
only after all of them have succeeded. When no broker responds any more, or the user interrupts, the rest is not tried.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, assert_never

from natslog.client import NatslogClient
from natslog.declared.plan import Planned
from natslog.errors import BrokerUnavailable, NatslogError

AT_ONCE = 8
"""Requests; a client has as many connections."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one planned change. `error`: why it failed or was skipped."""

    stream: str
    action: str
    outcome: Literal["done", "failed", "skipped"]
    error: NatslogError | None = None

    def to_json(self) -> dict[str, Any]:
        body = {"stream": self.stream, "action": self.action, "outcome": self.outcome}
        return body if self.error is None else body | self.error.to_json()


def apply_plan(client: NatslogClient, steps: Sequence[Planned]) -> list[Outcome]:
    """The outcome of each step that changes something, or is refused."""
    run = _Run(client)
    refused = [_refusal(step) for step in steps if step.action in ("refused", "protected")]
    with ThreadPoolExecutor(AT_ONCE) as workers:
        try:
            changed = list(workers.map(run.perform, [one for one in steps if one.action in ("create", "change")]))
            deletions = [step for step in steps if step.action == "delete"]
            is_as_declared = all(step.action != "refused" for step in steps)
            if is_as_declared and all(one.outcome == "done" for one in changed):
                deleted = list(workers.map(run.perform, deletions))
            else:
                why = NatslogError("other changes failed: streams are deleted after all other changes have succeeded")
                deleted = [Outcome(step.stream, step.action, "skipped", why) for step in deletions]
        except BaseException:
            run.has_ended.set()  # the workers have the rest in their queue
            raise
    return sorted([*refused, *changed, *deleted], key=lambda one: one.stream)


def _refusal(step: Planned) -> Outcome:
    return Outcome(step.stream, step.action, "failed", NatslogError(step.reason))


class _Run:
    def __init__(self, client: NatslogClient) -> None:
        self._client = client
        self.has_ended = threading.Event()

    def perform(self, step: Planned) -> Outcome:
        if self.has_ended.is_set():
            return Outcome(
                step.stream, step.action, "skipped", BrokerUnavailable("a request before it was not answered")
            )
        try:
            self._send(step)
        except NatslogError as error:
            if isinstance(error, BrokerUnavailable):
                self.has_ended.set()
            return Outcome(step.stream, step.action, "failed", error)
        return Outcome(step.stream, step.action, "done")

    def _send(self, step: Planned) -> None:
        version = step.settings_version
        match step.action:
            case "create":
                (body,) = step.requests
                settings = {name: value for name, value in body.items() if name not in ("subject", "subjects")}
                subjects = body["subjects"] if "subjects" in body else body["subject"]
                self._client.create_stream(step.stream, subjects, **settings)
            case "change":
                for edit in step.requests:
                    condition = {"id": step.id} | ({} if version is None else {"if_version": version})
                    version = self._client.edit_stream(step.stream, **edit, **condition).get("settings_version")
            case "delete":
                self._client.delete_stream(step.stream, id=step.id, if_version=version)
            case "unchanged" | "unlisted" | "refused" | "protected":
                raise AssertionError(f"there is nothing to send for {step.action}")
            case _:
                assert_never(step.action)
