"""Maps subjects by NATS wildcards, as one Spark expression over a column.

    SubjectMapping.parse("orders.*.>", "replay.{1}.>")      orders.eu.new.7  →  replay.eu.new.7
    SubjectMapping.parse("orders.>", "audit.{subject}")     orders.eu.new    →  audit.orders.eu.new
    SubjectMapping.parse("orders.>", "enriched")            orders.eu.new    →  enriched

In a target `{1}`, `{2}`, … stand for what the first, second, … `*` of the source covers, a last token `>` for what the
source's `>` covers, `{subject}` for the whole subject.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pyspark.sql import Column
from pyspark.sql import functions as f

from natslog.errors import ConfigError
from natslog.subjects import check_subject

_PLACE = re.compile(r"\{(\d+|subject)\}")


@dataclass(frozen=True, slots=True)
class SubjectMapping:
    """A mapping; create it with `parse`."""

    source: str
    target: str

    @classmethod
    def parse(cls, source: str, target: str, what: str = "--to-subject") -> SubjectMapping:
        """A checked mapping.

        Args:
            source: the wildcard that covers all subjects to be mapped. `what`: the option that `target` came from.

        Raises:
            ConfigError: the source lacks a wildcard that the target refers to. InvalidRequest: it is not a subject.
        """
        stars = source.split(".").count("*")
        for place in _PLACE.findall(target):
            if place != "subject" and not 1 <= int(place) <= stars:
                raise ConfigError(f"{what} {target!r}: {source!r} has no * that {{{place}}} could stand for")
        mapping = cls(source, target)
        check_subject(mapping.target_wildcard, wildcards=True, what=what)
        if "*" in _PLACE.sub("x", target).split("."):
            raise ConfigError(f"{what} {target!r}: write {{1}} for what the first * of {source!r} covers")
        if target.split(".")[-1] == ">" and source.split(".")[-1] != ">":
            raise ConfigError(f"{what} {target!r}: > stands for what a > of the source covers, and {source!r} has no >")
        return mapping

    @property
    def target_wildcard(self) -> str:
        """A NATS wildcard that covers every subject this maps to."""
        tokens: list[str] = []
        for token in self.target.split("."):
            if "{subject}" in token:
                return ".".join([*tokens, ">"])
            tokens.append("*" if _PLACE.search(token) else token)
        return ".".join(tokens)

    def column(self, subject: Column) -> Column:
        """The mapped subjects of a column; a subject that the source does not cover fails the job."""
        whole, rest = self._source_regex()
        parts, at = [], 0
        for place in _PLACE.finditer(self.target):
            parts.append(f.lit(self.target[at : place.start()]))
            name, at = place.group(1), place.end()
            parts.append(subject if name == "subject" else f.regexp_extract(subject, whole, int(name)))
        end = self.target[at:]
        has_rest = self.target.split(".")[-1] == ">"
        parts.append(f.lit(end[:-1] if has_rest else end))
        if has_rest:
            parts.append(f.regexp_extract(subject, whole, rest))
        strange = f.raise_error(f.concat(f.lit(f"{self.source} does not cover the subject "), subject))
        return f.when(subject.rlike(whole), f.concat(*parts)).otherwise(strange)

    def _source_regex(self) -> tuple[str, int]:
        """For all of a subject, a group for each wildcard in order; and the number of the last group."""
        groups = {"*": r"([^.]+)", ">": r"([^.]+(?:\.[^.]+)*)"}
        tokens = self.source.split(".")
        number = sum(token in groups for token in tokens)
        return "^" + r"\.".join(groups.get(token) or re.escape(token) for token in tokens) + "$", number


def covers(wide: str, narrow: str) -> bool:
    """Whether a wildcard covers every subject that another one covers."""
    first, second = wide.split("."), narrow.split(".")
    for at, token in enumerate(first):
        if at == len(second):
            return False
        if token == ">":
            return True
        if second[at] == ">" or token not in ("*", second[at]):
            return False
    return len(first) == len(second)


def overlap(one: str, other: str) -> bool:
    """Whether some subject is covered by both wildcards."""
    first, second = one.split("."), other.split(".")
    for left, right in zip(first, second, strict=False):
        if ">" in (left, right):
            return True
        if "*" not in (left, right) and left != right:
            return False
    return len(first) == len(second)
