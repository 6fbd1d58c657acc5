"""Hooks of MkDocs: README is the first page, and links to files outside of docs/ become plain text. And how docstrings
become Markdown: the sections `Args` and `Attributes` as lists, the others as paragraphs.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    files.append(File.generated(config, "index.md", content=readme()))
    decisions = ROOT / "docs" / "adr"
    rows = [
        f"- [{path.read_text().splitlines()[0].lstrip('# ')}]({path.name})" for path in sorted(decisions.glob("*.md"))
    ]
    files.append(File.generated(config, "adr/index.md", content="# Decisions\n\n" + "\n".join(rows) + "\n"))
    return files


def readme() -> str:
    """README as a page of docs/: its links to docs/ lose the folder."""
    return re.sub(r"\]\(docs/", "](", (ROOT / "README.md").read_text())


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    folder = Path(config["docs_dir"], page.file.src_uri).parent

    def shown(found: re.Match[str]) -> str:
        text, target, _ = found.groups()
        place = (folder / target).resolve()
        is_page = place.is_relative_to(Path(config["docs_dir"]).resolve()) and place.is_file()
        return found.group(0) if is_page or target == "adr/index.md" else text

    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)  # code stays as it is
    return "".join(part if part.startswith("```") else _LINK.sub(shown, part) for part in parts)


_SECTION = re.compile(r"^(Args|Attributes|Returns|Raises):(.*)$")
_ENTRY = re.compile(r"^ {4}([`\w*][^:]*): (.*)$")


class Docstrings(griffe.Extension):
    """Docstrings of this project have entries for several names at once, which parsers of sections do not know."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(docstring: str) -> str:
    lines, section = list[str](), ""
    for line in docstring.splitlines():
        if (found := _SECTION.match(line)) is not None:
            section = found[1]
            lines += ["", f"**{section}**{':' if found[2] else ''}{found[2]}", ""]
        elif section and line and not line.startswith(" "):
            section = ""
            lines.append(line)
        elif section in ("Args", "Attributes") and (entry := _ENTRY.match(line)) is not None:
            lines.append(f"- `{entry[1].replace('`', '')}`: {entry[2]}")
        elif section in ("Args", "Attributes"):
            lines.append(f"  {line.strip()}" if line.strip() else "")
        else:
            lines.append(line.strip() if section else line)
    return "\n".join(lines)
