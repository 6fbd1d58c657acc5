"""Bearer tokens: `nlt_<id>_<secret>`.

The id is public: it is listed, logged, and names the token that is to be revoked. The secret has 256 random bits, so a
plain SHA-256 of it is stored: it cannot be guessed, and a slow hash would only make each request slow. The prefix lets
programs that search repositories and logs for secrets recognise a token.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets

from natslog.errors import SecurityConflict, SecurityNotFound
from natslog.security.records import TokenRecord

PREFIX = "nlt_"
_SECRET_BYTES = 32
_ID_CHARS = 12
_ID = re.compile(r"[0-9a-f]{12}")
_TOKEN = re.compile(r"nlt_([0-9a-f]{12})_([A-Za-z0-9_-]{43})")
_ANYWHERE = re.compile(r"nlt_([0-9a-f]{12})_[A-Za-z0-9_-]+")


def new_secret() -> str:
    return secrets.token_urlsafe(_SECRET_BYTES)


def token_id(request_id: str) -> str:
    """The id of the token that a request creates: a repeated request names the same one."""
    return hashlib.sha256(request_id.encode()).hexdigest()[:_ID_CHARS]


def text_of(token_id: str, secret: str) -> str:
    return f"{PREFIX}{token_id}_{secret}"


def digest_of(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def lost(token_id: str) -> SecurityConflict:
    """A request that creates a token was repeated, and its secret is not known any more."""
    return SecurityConflict(
        f"an earlier attempt of this request created the token {token_id}, but its response was lost and the secret "
        f"cannot be shown again: revoke it (natslog token revoke {token_id}) and create another one",
        token=token_id,
    )


def parsed(text: str) -> tuple[str, str] | None:
    """The id and the digest of the secret; None where it is no token."""
    found = _TOKEN.fullmatch(text)
    return None if found is None else (found[1], digest_of(found[2]))


def id_in(text: str) -> str:
    """The id, also where the whole token was given."""
    parts = text.split("_")
    return parts[1] if len(parts) > 2 and text.startswith(PREFIX) else text


def checked_id(text: str) -> str:
    """The id, if it can be one: no other text is stored or logged. Raises SecurityNotFound."""
    found = id_in(text)
    if not _ID.fullmatch(found):
        raise SecurityNotFound(f"there is no such token: its id has {_ID_CHARS} hexadecimal digits (natslog token ls)")
    return found


def without_secrets(text: str) -> str:
    """The text with the ids of the tokens in it, for logs: a token may be where it does not belong, as in a path."""
    return _ANYWHERE.sub(rf"{PREFIX}\1_…", text)


def is_of(record: TokenRecord, digest: str) -> bool:
    """In a time that does not depend on the digests."""
    return hmac.compare_digest(record.digest, digest)
