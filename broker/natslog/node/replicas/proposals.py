"""Proposals of a broker's replicas, combined: one command for many streams, at the end of the loop's turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeAlias

from natslog.cluster.commands import (
    BackgroundCommand,
    ChangeIsrs,
    DisableReplicas,
    HoldCompanions,
    HoldReplicas,
    IsrChange,
)
from natslog.model import BrokerId, StreamId

_OfStreams: TypeAlias = DisableReplicas | HoldReplicas | HoldCompanions


class Proposals:
    """Args: `submit`: sends a command to the metadata leader. It may be lost; the replica then proposes it again."""

    def __init__(self, me: BrokerId, submit: Callable[[BackgroundCommand], None]) -> None:
        self._me = me
        self._submit = submit
        self._changes: list[IsrChange] = []
        self._of_streams: dict[tuple[type[_OfStreams], str], list[StreamId]] = {}
        self._is_due = False

    def propose(self, command: BackgroundCommand) -> None:
        match command:
            case DisableReplicas() | HoldReplicas() | HoldCompanions():
                self._of_streams.setdefault((type(command), command.incarnation), []).extend(command.stream_ids)
                self._flush_soon()
            case _:
                self._submit(command)

    def propose_isr(self, change: IsrChange) -> None:
        self._changes.append(change)
        self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._is_due = False
        changes, self._changes = self._changes, []
        of_streams, self._of_streams = self._of_streams, {}
        if changes:
            self._submit(ChangeIsrs(broker=self._me, changes=tuple(changes)))
        for (kind, incarnation), stream_ids in of_streams.items():
            self._submit(kind(broker=self._me, incarnation=incarnation, stream_ids=tuple(stream_ids)))
