"""Why a connection to NATS fails: the text names what to correct."""

from __future__ import annotations

import pytest

from natslog.wire.credentials import NatsCredentials
from natslog.wire.nats_client import problem_of


@pytest.mark.parametrize(
    ("error", "said", "is_login"),
    [
        (AttributeError("'NoneType' object has no attribute '_over_ssl'"), "client certificate", False),
        (OSError("nats: 'Authorization Violation'"), "Authorization Violation", True),
        (ConnectionRefusedError(111, "Connection refused"), "Connection refused", False),
        (AttributeError("'x' object has no attribute 'y'"), "no attribute 'y'", False),
    ],
)
def test_the_reason_names_what_to_correct(error: Exception, said: str, *, is_login: bool) -> None:
    problem = problem_of(error, NatsCredentials())
    assert said in problem.shown
    assert problem.is_login == is_login
