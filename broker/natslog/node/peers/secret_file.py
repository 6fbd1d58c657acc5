"""The cluster's secrets, which operators change while brokers run.

Theory of operation. The file is read every 2 s, whole: it has at most a few lines, and a file whose secrets are only
exchanged has the same size as before. If its secrets have changed, handshakes use them from then on. Links that are
open continue: their sessions have keys of their own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from natslog.errors import ConfigError
from natslog.log_events import event
from natslog.node.peers.keys import KeyRing

logger = logging.getLogger("natslog.cluster")

READ_EVERY_S = 2.0


class SecretFile:
    """Args: `read`: what the file contains now; raises ConfigError if it cannot be used."""

    def __init__(self, keys: KeyRing, read: Callable[[], Sequence[bytes]]) -> None:
        self._keys = keys
        self._read = read
        self._complaint = ""

    def refresh(self) -> bool:
        """Returns whether other secrets are in use now. If the file cannot be used, the present ones stay in use, and
        the reason is logged once.
        """
        try:
            secrets = tuple(self._read())
        except ConfigError as error:
            if error.message != self._complaint:
                self._complaint = error.message
                logger.error(
                    "the changed cluster_secret_file is not used: %s", error.message, extra=event("secret.not_used")
                )
            return False
        self._complaint = ""
        if secrets == tuple(key.secret for key in self._keys.keys):
            return False
        self._keys.use(secrets)
        logger.info(
            "cluster_secret_file was changed: new links use its %d secret(s), with the ids %s",
            len(secrets),
            ", ".join(self._keys.ids),
            extra=event("secret.changed", count=len(secrets)),
        )
        return True
