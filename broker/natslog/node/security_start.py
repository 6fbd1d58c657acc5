"""Enabling security at the start of a broker, and the token of its first administrator."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from natslog.cluster.security_commands import CreateToken, EnableSecurity
from natslog.errors import ConfigError
from natslog.log_events import event
from natslog.node.cluster_node import ClusterNode
from natslog.security import tokens
from natslog.security.records import ADMIN_ROLE, TokenRecord

logger = logging.getLogger("natslog.security")


async def enable_security(
    cluster: ClusterNode,
    *,
    is_wanted: bool,
    new_admin_token: bool,
    token_file: Path | None = None,
    admin_identity: str = "admin",
) -> str | None:
    """Enables security in the cluster, if it is wanted and not enabled yet.

    Args:
        new_admin_token: whether to create another token for the administrator, because no valid one is left.
        token_file: where to write it; None: nowhere.
        admin_identity: of the token; a client certificate with this name is the administrator's, too.

    Returns:
        The token of the administrator, if this broker has created it. It is not stored anywhere else.

    Raises:
        ConfigError: it cannot be enabled, with the remedy. MetadataUnavailable.
    """
    await cluster.barrier()
    state = cluster.state
    if state.security is None and not is_wanted:
        if new_admin_token:
            raise ConfigError("--new-admin-token needs security = true")
        return None
    if not is_wanted:
        logger.warning(
            "security is enabled in this cluster, so it applies at this broker, too: set security = true in its "
            "configuration",
            extra=event("security.applies"),
        )
    if state.security is not None and not new_admin_token:
        return None
    secret = tokens.new_secret()
    record = TokenRecord(
        id=tokens.token_id(secrets.token_hex(16)),
        identity=admin_identity,
        digest=tokens.digest_of(secret),
        created_us=cluster.clock.latest_us(),
        note="of the first start" if state.security is None else "of --new-admin-token",
    )
    token = tokens.text_of(record.id, secret)
    with _beside(token_file, token) as beside:
        if state.security is None:
            await cluster.group.propose(EnableSecurity(token=record))
        else:
            await cluster.group.propose(CreateToken(token=record, roles=(ADMIN_ROLE,)))
        security = cluster.state.security
        if security is None or record.id not in security.tokens:
            return None  # another broker has enabled it, and has the token
        if beside is not None:
            os.replace(beside, str(token_file))
    where = "printed once" if token_file is None else f"in {token_file}"
    logger.info(
        "security is enabled; the token %s of the administrator is %s",
        record.id,
        where,
        extra=event("security.enabled"),
    )
    return token


@contextmanager
def _beside(token_file: Path | None, token: str) -> Iterator[Path | None]:
    """The token in a file that only its owner can read, beside its place, so that a token which cannot be written is
    not created. Raises ConfigError.
    """
    if token_file is None:
        yield None
        return
    beside = token_file.with_name(token_file.name + ".new")
    try:
        beside.unlink(missing_ok=True)
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(token + "\n")
    except OSError as error:
        raise ConfigError(
            f"cannot write the token of the administrator to admin_token_file {token_file} ({error.strerror}): correct "
            "the path; no token was created"
        ) from error
    try:
        yield beside
    finally:
        beside.unlink(missing_ok=True)
