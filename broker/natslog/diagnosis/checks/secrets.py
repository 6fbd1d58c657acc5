"""Files of secrets, and the certificate of the HTTP port."""

from __future__ import annotations

from collections.abc import Iterator

from natslog.diagnosis.examined import Examined, SecretFacts
from natslog.diagnosis.outcomes import Outcome, ok, problem, warning

_DAY_S = 24 * 3600.0
_EXPIRES_SOON_DAYS = 14


def files(facts: SecretFacts, examined: Examined) -> Iterator[Outcome]:
    for name, why in facts.problems.items():
        yield problem(f"{name}: {why}", "Correct what the message names.", file=name)
    if facts.used and not facts.problems:
        yield ok(f"{facts.used} kinds of secrets: their files are readable, and private")


def certificate(facts: SecretFacts, examined: Examined) -> Iterator[Outcome]:
    if facts.certificate_expires_s is None:
        return
    days = (facts.certificate_expires_s - examined.now_s) / _DAY_S
    if days < 0:
        yield problem(
            f"the TLS certificate of this broker has expired {-days:.0f} days ago",
            "Replace the file (natslog tls init makes one); the broker loads it within 2 s.",
            days=round(days, 1),
        )
    elif days < _EXPIRES_SOON_DAYS:
        yield warning(
            f"the TLS certificate of this broker expires in {days:.1f} days",
            "Replace the file (natslog tls init makes one); the broker loads it within 2 s.",
            days=round(days, 1),
        )
    else:
        yield ok(f"it expires in {days:.0f} days", days=round(days, 1))


def administrator(facts: SecretFacts, examined: Examined) -> Iterator[Outcome]:
    config = examined.config
    if config is None or not config.security or config.tls_ca_file is None:
        return
    name = config.admin_identity
    if facts.trusts_other_ca and name == "admin":
        yield warning(
            "tls_ca_file is a CA that natslog has not made: every client with a certificate of it for the name admin "
            "is the administrator",
            "Set admin_identity to a name that this CA gives to no other client, create a token for it with "
            "--new-admin-token, and take the role from admin (natslog role rm admin admin).",
        )
    else:
        yield ok(f"a client certificate with the name {name} is the administrator's")
