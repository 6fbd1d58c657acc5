"""Made the golden files of metadata with imported streams: `python -m tests.golden.make_metadata FOLDER`.

Add files for a new version; never edit old ones.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from natslog.cluster.commands import (
    BeginImport,
    BrokerRecord,
    Command,
    CreateStream,
    FinalizeUpgrade,
    FinishImport,
    PauseStream,
    Proposal,
    RegisterBroker,
)
from natslog.cluster.metadata import Metadata
from natslog.model import Fork, StreamSettings

LINEAGE = (Fork(id="aa", offset=60), Fork(id="bb", offset=100))
MORE = (Fork(id="aa", offset=60), Fork(id="bb", offset=150))


def created(name: str, stream_id: str) -> CreateStream:
    return CreateStream(
        name=name,
        id=stream_id,
        settings=StreamSettings(subject=name),
        created_us=1,
        placement=(1,),
        is_import=True,
        first_offset=40,
        lineage=LINEAGE,
        former_subjects=("old.>",),
    )


COMMANDS: list[Command] = [
    RegisterBroker(broker=BrokerRecord(id=1, url="http://a:9292", directory="d", life=1, nonce="n")),
    FinalizeUpgrade(level=2),
    created("importing", "c1"),
    created("imported", "c2"),
    FinishImport(name="imported", id="c2", lineage=LINEAGE, resumes=False),
    BeginImport(name="imported", id="c2", subjects=("more.>",)),
    FinishImport(name="imported", id="c2", lineage=MORE, resumes=False),
    created("resumed", "c3"),
    FinishImport(name="resumed", id="c3", lineage=LINEAGE, resumes=False),
    PauseStream(name="resumed", paused=False),
    FinishImport(name="importing", id="c2", lineage=LINEAGE, resumes=True),  # refused: another id
]


def main(folder: Path) -> None:
    state = Metadata(cluster_id="c1")
    proposals = [Proposal(id=f"p{at}", command=command) for at, command in enumerate(COMMANDS)]
    for proposal in proposals:
        state.decide(proposal)
    (folder / "metadata-imports-proposals-v2.msgpack").write_bytes(msgspec.msgpack.encode(proposals))
    (folder / "metadata-imports-state-v2.msgpack").write_bytes(msgspec.msgpack.encode(state))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
