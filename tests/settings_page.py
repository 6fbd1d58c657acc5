"""The tables of docs/SETTINGS.md, from the structures that state the settings: `python -m tests.settings_page`."""

from __future__ import annotations

from pathlib import Path

from natslog.config import SETTINGS as OF_A_BROKER
from natslog.config import variables_of
from natslog.model import SETTINGS as OF_A_STREAM
from natslog.setting_kinds import Duration, Flag, Size, Stated
from natslog.units import format_duration, format_exact_size

PAGE = Path(__file__).resolve().parents[1] / "docs" / "SETTINGS.md"
_BEGIN, _END = "<!-- {}: made by python -m tests.settings_page -->\n", "<!-- end -->\n"


def _default(one: Stated) -> str:
    value = one.default
    if value in (None, "", ()):
        return "none"
    if isinstance(one.setting, Duration):
        return f"`{format_duration(value)}`"
    if isinstance(one.setting, Size):
        return f"`{format_exact_size(value)}`"
    text = str(value).lower() if isinstance(one.setting, Flag) else value
    return f"`{', '.join(text) if isinstance(text, tuple) else text}`"


def _table(columns: list[str], rows: list[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _option(one: Stated) -> str:
    return one.setting.flag or f"--{one.name.replace('_', '-')}"


def tables() -> dict[str, str]:
    """Markdown by the name of the table."""
    streams = [
        [f"`{one.name}`", f"`{_option(one)}`", one.setting.valid, _default(one), one.setting.help]
        for one in OF_A_STREAM
    ]
    brokers = [
        [f"`{one.name}`", f"`{variables_of(one)[-1]}`", one.setting.valid, _default(one), one.setting.help]
        for one in OF_A_BROKER
    ]
    return {
        "stream": _table(["setting", "option", "valid", "default", "meaning"], streams),
        "broker": _table(["setting", "variable", "valid", "default", "meaning"], brokers),
    }


def with_tables(page: str) -> str:
    """The page with the tables as they are now."""
    for name, table in tables().items():
        before, _, rest = page.partition(_BEGIN.format(name))
        after = rest.partition(_END)[2]
        page = f"{before}{_BEGIN.format(name)}{table}{_END}{after}"
    return page


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
