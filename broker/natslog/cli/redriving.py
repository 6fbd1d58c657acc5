"""`natslog redrive STREAM`: dead letters are published again, to the subjects that they were meant for."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from natslog.cli.common import JsonFlag, global_of, position_of
from natslog.cli.output import err, is_terminal, out, print_json, print_table
from natslog.errors import InvalidRequest

if TYPE_CHECKING:
    from natslog.client import NatslogClient
    from natslog.client.searching import FoundMessage

_AT_ONCE = 100  # in one request, which is answered when all of them are acked
_NO_REASON = "(no reason stated)"
_SHOWN_PROBLEMS = 10


@dataclass
class _Done:
    """What became of the letters. `problems`: how many have which; `first`: the offset of the first one of each."""

    sent: int = 0
    duplicates: int = 0
    problems: Counter[str] = field(default_factory=Counter)
    first: dict[str, int] = field(default_factory=dict)
    reasons: Counter[tuple[str, str]] = field(default_factory=Counter)

    def take(self, message: dict[str, Any], *, is_sent: bool) -> None:
        if message["problem"] is not None:
            self.problems[message["problem"]] += 1
            self.first.setdefault(message["problem"], message["offset"])
        elif is_sent:
            self.sent += 1
            self.duplicates += message["duplicate"]


def redrive(
    context: typer.Context,
    stream: Annotated[str, typer.Argument(metavar="STREAM", help="The stream of dead letters.")],
    start: Annotated[
        str, typer.Option("--from", metavar="OFFSET|TIME", help="The first letter: an offset, earliest, or a time.")
    ] = "earliest",
    end: Annotated[
        int | None, typer.Option("--to", metavar="OFFSET", help="Exclusive; by default the present end of the stream.")
    ] = None,
    reason: Annotated[
        str | None, typer.Option("--reason", metavar="TEXT", help="Only letters whose reason contains this text.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option("--rate", metavar="N", help="At most so many messages a second. Default: no limit.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="State what would be sent, and send nothing.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Publish the dead letters of a stream again, each to the subject in its header Natslog-Subject.

    The broker publishes them and waits until the stream that records the subject has stored them. Each has a message id
    made of STREAM and its offset: a second run is stored once by streams that deduplicate, within their deduplication
    window. The letters stay in STREAM. Exit code 1 if a letter could not be sent.
    """
    if rate is not None and not rate > 0:
        raise InvalidRequest(f"--rate {rate} must be more than 0")
    client = global_of(context).client(patience_s=30.0)

    done, begun_s, asked = _Done(), time.monotonic(), 0
    letters = _letters(client, stream, position_of(client, stream, start), end, reason, done)
    at_once = _AT_ONCE if rate is None else max(1, min(_AT_ONCE, int(rate)))
    while offsets := [one.offset for one in islice(letters, at_once)]:
        asked += len(offsets)
        while offsets:
            answer = client.redrive(stream, offsets, dry_run=dry_run)
            for message in answer["messages"]:
                done.take(message, is_sent=not dry_run)
            offsets = answer["left"]
        if not as_json and is_terminal(err.file):
            err.print(f"{asked:,} letters", end="\r")
        if rate is not None and not dry_run:
            time.sleep(max(0.0, begun_s + asked / rate - time.monotonic()))
    _show(done, asked, dry_run=dry_run, as_json=as_json)
    if done.problems:
        raise typer.Exit(1)


def _letters(
    client: NatslogClient, stream: str, at: int, end: int | None, reason: str | None, done: _Done
) -> Iterator[FoundMessage]:
    """The dead letters of the range, in order; their reasons are counted in `done`."""
    end = int(client.position(stream)["high_watermark"]) if end is None else end
    while at < end:
        page = client.search_page(
            stream, start=at, end=end, grep="natslog-subject", ignore_case=True, columns=["headers"], value_bytes=0
        )
        for letter in page.messages:
            headers = {header.key.lower(): header.value for header in letter.headers}
            if "natslog-subject" not in headers:
                continue
            stated = headers.get("natslog-error", _NO_REASON)
            if reason is None or reason.lower() in stated.lower():
                done.reasons[stated, headers["natslog-subject"]] += 1
                yield letter
        at = page.next_offset


def _show(done: _Done, asked: int, *, dry_run: bool, as_json: bool) -> None:
    reasons = [
        {"reason": reason, "subject": subject, "letters": count}
        for (reason, subject), count in done.reasons.most_common()
    ]
    problems = [
        {"problem": problem, "letters": count, "first_offset": done.first[problem]}
        for problem, count in done.problems.most_common()
    ]
    failed = done.problems.total()
    if as_json:
        shown = {"letters": asked, "sent": done.sent, "duplicates": done.duplicates, "failed": failed}
        print_json(shown | {"dry_run": dry_run, "reasons": reasons, "problems": problems})
        return
    if reasons:
        print_table(
            ["letters", "meant for", "reason"], [[one["letters"], one["subject"], one["reason"]] for one in reasons]
        )
    for one in problems[:_SHOWN_PROBLEMS]:
        out.print(f"not sent: {one['letters']:,} letters, the first at offset {one['first_offset']}: {one['problem']}")
    if dry_run:
        out.print(f"{asked:,} letters; {asked - failed:,} would be sent, {failed:,} cannot be sent")
    else:
        sent, before = done.sent, done.duplicates
        out.print(f"{asked:,} letters; {sent:,} sent, of which {before:,} were stored before; {failed:,} not sent")
