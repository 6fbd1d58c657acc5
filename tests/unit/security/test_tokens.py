"""Texts in which a whole token is where its id was expected, or where it does not belong at all."""

from __future__ import annotations

import pytest

from natslog.errors import SecurityNotFound
from natslog.security import tokens

ID, SECRET = "0123456789ab", "S_E-C" * 8 + "RET"
TOKEN = f"nlt_{ID}_{SECRET}"


def test_the_id_of_a_token_is_found_in_it() -> None:
    assert tokens.parsed(TOKEN) is not None
    assert tokens.id_in(TOKEN) == tokens.id_in(ID) == tokens.checked_id(TOKEN) == tokens.checked_id(ID) == ID


@pytest.mark.parametrize("text", ["", "x" + TOKEN, SECRET, ID + "0", ID.upper(), f"nlt_{SECRET}_{SECRET}"])
def test_a_text_that_is_no_id_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(SecurityNotFound) as refused:
        tokens.checked_id(text)
    assert "RET" not in refused.value.message
    assert "RET" not in str(refused.value.facts)


@pytest.mark.parametrize("text", [TOKEN, f"/v1/tokens/{TOKEN}", f"x{TOKEN}", TOKEN + TOKEN, TOKEN[:-3], f"{TOKEN}abc"])
def test_logs_contain_ids_instead_of_tokens(text: str) -> None:
    shown = tokens.without_secrets(text)
    assert f"nlt_{ID}_…" in shown
    assert "S_E-C" not in shown
    assert tokens.without_secrets("no token: nlt_ and nlt_0123") == "no token: nlt_ and nlt_0123"
