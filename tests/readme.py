"""README as a newcomer reads it: blocks of commands with the output that it promises, and files to save.

README states the convention:
- In a block of `console`, a line that begins with `$ ` is a command. The lines up to the next command are its output.
- In that output, `…` stands for any text within a line, and a line that is only `…` for any number of lines.
- "Save this as `NAME`:" before a block makes the block a file.
- "In a second terminal" before a block leaves its command running.
Blocks of other languages are only read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
ANY = "…"


@dataclass(slots=True)
class Command:
    text: str
    output: list[str] = field(default_factory=list)

    def is_answered_by(self, output: str) -> bool:
        return _pattern(self.output).fullmatch(_as_lines(output)) is not None


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block.

    Attributes:
        before: the paragraph that precedes it, in one line.
        heading: the nearest one above it, as written in Markdown.
        line: the number of its first line in the page, from 1.
        object: what has it in its docstring, where the page is made of docstrings.
    """

    language: str
    lines: tuple[str, ...]
    before: str
    heading: str
    line: int
    object: str = ""

    @property
    def text(self) -> str:
        return "\n".join(self.lines) + "\n"

    @property
    def file_name(self) -> str | None:
        found = re.search(r"Save this as `([^`]+)`:$", self.before)
        return found and found[1]

    @property
    def is_left_running(self) -> bool:
        return "in a second terminal" in self.before.lower()

    @property
    def shell_lines(self) -> list[str]:
        """The commands of an `sh` block, in one line each, with their comments."""
        lines = self.text.replace("\\\n", "").splitlines()
        return [line for line in lines if line and not line.startswith("#")]

    @property
    def commands(self) -> list[Command]:
        """Of a `console` block. Raises ValueError where output stands before the first command."""
        found: list[Command] = []
        for line in self.lines:
            if line.startswith("$ "):
                found.append(Command(line[2:]))
            elif found:
                found[-1].output.append(line)
            else:
                raise ValueError(f"output without a command: {line!r}")
        return found


def blocks(markdown: str) -> list[Block]:
    found: list[Block] = []
    paragraph: list[str] = []
    is_ended = False
    heading = ""
    lines = enumerate(markdown.splitlines(), 1)
    for number, line in lines:
        if line.startswith("```"):
            text = tuple(row for _, row in takewhile(lambda numbered: numbered[1] != "```", lines))
            found.append(Block(line[3:], text, " ".join(paragraph), heading, number + 1))
            paragraph = []
        elif not line:
            is_ended = True
        else:
            heading = line.lstrip("#").strip() if line.startswith("#") else heading
            paragraph = [line] if is_ended else [*paragraph, line]
            is_ended = False
    return found


def _pattern(expected: Sequence[str]) -> re.Pattern[str]:
    rows = [
        r"(?:.*\n)*?" if line == ANY else ".*".join(map(re.escape, line.rstrip().split(ANY))) + "\n"
        for line in expected
    ]
    return re.compile("".join(rows))


def _as_lines(output: str) -> str:
    """Without what a reader does not see: spaces at the end of lines, and empty lines around the output."""
    lines = "\n".join(line.rstrip() for line in output.splitlines()).strip("\n")
    return lines + "\n" if lines else ""
