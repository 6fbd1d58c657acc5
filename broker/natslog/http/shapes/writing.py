"""What is written by requests: messages that are published, dead letters, direct appends."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from natslog.errors import InvalidRequest
from natslog.http.shapes.common import BrokerNumber, Count, Name, NameText, Offset, Subject
from natslog.http.shapes.reading import Header
from natslog.model import OnConflict, PartReceipt
from natslog.subjects import check_name, check_subject

_MAX_MESSAGE_CHARS, _MAX_MESSAGE_HEADERS = 12 * 1024 * 1024, 100
_MAX_REDRIVEN = 1_000
_CONTENT = re.compile(r"[0-9a-f]{32}")

MessageText = Annotated[str, Meta(max_length=_MAX_MESSAGE_CHARS)]


class NewMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A message to be published to NATS. `subject`: may be left out where the stream records only one plain subject.
    Either `value`, sent as UTF-8, or `value_base64`. `key`: sent as the header Natslog-Key; `message_id`: as
    Nats-Msg-Id.
    """

    subject: Subject | UnsetType = UNSET
    value: MessageText | UnsetType = UNSET
    value_base64: MessageText | UnsetType = UNSET
    key: MessageText | UnsetType = UNSET
    headers: Annotated[list[Header], Meta(max_length=_MAX_MESSAGE_HEADERS)] = []
    message_id: MessageText | UnsetType = UNSET


class Published(msgspec.Struct):
    """A message that the stream has stored. `duplicate`: it was there already, by its message id."""

    name: Name
    subject: str
    offset: Offset
    duplicate: bool


class Redrive(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Offsets of dead letters, to be published to the subjects that they were meant for. `dry_run`: state only what
    would be done.
    """

    offsets: Annotated[list[Offset], Meta(min_length=1, max_length=_MAX_REDRIVEN)]
    dry_run: bool = False


class RedrivenMessage(msgspec.Struct):
    """A dead letter. `subject`: where it is sent; `stream`: the one that records this. `stored_at`: its offset there,
    null if it was not sent; `duplicate`: it was there already. `problem`: why it was not sent, or not acked.
    """

    offset: Offset
    subject: str
    stream: str | None
    stored_at: Offset | None
    duplicate: bool
    problem: str | None


class Redriven(msgspec.Struct):
    """What became of each dead letter. `missing`: offsets without a message. `left`: offsets for a further request,
    because the values of this one would be too large together.
    """

    messages: list[RedrivenMessage]
    missing: list[Offset]
    left: list[Offset]


class StagedPart(msgspec.Struct):
    """The receipt of a part, by which the commit names it; `bytes`: as a log stores its rows."""

    part: Name
    attempt: Count
    rows: Count
    digest: str
    content: str | None
    broker: BrokerNumber | None
    bytes: Count


class Commit(msgspec.Struct, forbid_unknown_fields=True):
    """Receipts of the parts. `on_conflict`: if the batch is not the next one of its producer."""

    EXPECTED: ClassVar = (
        'the body must be {"parts": [{"part", "attempt", "rows", "digest", "content"}, …], "on_conflict": "fail", '
        '"skip" or "append"}'
    )

    parts: list[PartReceipt]
    on_conflict: OnConflict = "fail"

    def __post_init__(self) -> None:
        named = [receipt.part for receipt in self.parts]
        if len(set(named)) < len(named):
            raise InvalidRequest("a part is named twice: name one attempt of each part")
        if not all(receipt.content is None or _CONTENT.fullmatch(receipt.content) for receipt in self.parts):
            raise InvalidRequest("content must be 32 hexadecimal digits, as the upload of the part returned it")


class LastBatches(msgspec.Struct):
    """The batches that producers committed last, by producer."""

    batches: dict[Name, Count]


class LastBatch(msgspec.Struct):
    """The batch that a producer committed last, or nulls. `urls`: where its uploads should go."""

    producer: Name
    urls: tuple[str, ...]
    batch: Count | None = None
    start: Offset | None = None
    end: Offset | None = None
    digest: str | None = None


# ---- parameters ----


class ProducersQuery(msgspec.Struct, frozen=True):
    """Which producers of direct appends."""

    prefix: Annotated[NameText, Meta(description="how their names begin")]


class ProducerPath(msgspec.Struct, frozen=True):
    """A producer of direct appends."""

    producer: NameText

    def __post_init__(self) -> None:
        check_name(self.producer, "producer")


class BatchPath(ProducerPath, frozen=True):
    """A batch of a producer, which counts its batches upwards."""

    batch: Offset


class RowsPath(BatchPath, frozen=True):
    """A batch that follows another one of its producer."""

    after: Annotated[Offset, Meta(description="the batch before it; 0 for the first batch of a producer")]
    subject: Annotated[Subject | None, Meta(description="subject of the rows if they have no column subject")] = None

    def __post_init__(self) -> None:
        check_name(self.producer, "producer")
        if self.after >= self.batch:
            raise InvalidRequest(f"batch {self.batch} cannot follow batch {self.after}: batches are counted upwards")
        if self.subject is not None:
            check_subject(self.subject, wildcards=False)


class PartPath(BatchPath, frozen=True):
    """A part of a batch, and how its rows are staged."""

    part: NameText
    attempt: Annotated[Offset, Meta(description="attempts do not replace each other")] = 0
    subject: Annotated[Subject | None, Meta(description="subject of the rows if they have no column subject")] = None

    def __post_init__(self) -> None:
        check_name(self.producer, "producer")
        check_name(self.part, "part")
        if self.subject is not None:
            check_subject(self.subject, wildcards=False)
