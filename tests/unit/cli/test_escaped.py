"""Text of others on a terminal."""

from __future__ import annotations

import json

import pytest

from natslog.cli.output import escaped


@pytest.mark.parametrize(
    ("text", "shown", "as_json"),
    [
        ("a\tb\n", "a\tb\n", '"a\tb\n"'),
        ("\x1b[2J", "\\x1b[2J", "\\u001b[2J"),
        ("abc\u202egnp.exe", "abc\\u202egnp.exe", "abc\\u202egnp.exe"),
        ("\u2066\u200b\ufeff", "\\u2066\\u200b\\ufeff", "\\u2066\\u200b\\ufeff"),
        ("\U000e0041", "\\U000e0041", "\\udb40\\udc41"),
        ("grün 日本", "grün 日本", "grün 日本"),
    ],
)
def test_no_text_controls_the_terminal_or_hides_a_part_of_itself(text: str, shown: str, as_json: str) -> None:
    assert escaped(text) == shown
    if "\t" not in text:
        assert escaped(text, as_json=True) == as_json
        assert json.loads(f'"{as_json}"') == text, "JSON remains what it was"
