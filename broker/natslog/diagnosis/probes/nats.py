"""NATS, as the broker with these settings connects to it."""

from __future__ import annotations

import asyncio
import secrets

from natslog.config import BrokerConfig
from natslog.diagnosis.examined import NatsFacts
from natslog.wire.credentials import NatsCredentials
from natslog.wire.probing import probe_leaf, probe_server

_CONNECTED_WITHIN_S = 4.0
_API_INFO = "$JS.API.INFO"
_OF_API = ("$JS.API.>", "$JS.ACK.>", "$JS.FC.>", "_INBOX.natslog.>")


def probe_nats(config: BrokerConfig, subjects: list[str]) -> NatsFacts:
    """All servers at the same time.

    Args:
        subjects: those of the streams, which the broker subscribes to.

    Raises:
        ConfigError: the credentials cannot be used.
    """
    return asyncio.run(_probe(config, subjects))


async def _probe(config: BrokerConfig, subjects: list[str]) -> NatsFacts:
    credentials = NatsCredentials(**config.nats_login, requires_private_files=True)
    credentials.check()
    has_api = config.jetstream != "off"
    own = f"natslog-doctor.{secrets.token_hex(8)}"
    urls = [url.strip() for url in config.nats_url.split(",") if url.strip()]
    servers = asyncio.gather(
        *(
            probe_server(
                url,
                credentials,
                publishes=[f"{prefix}{own}" for prefix in config.ack_reply_prefixes],
                subscribes=[*subjects, *(_OF_API if has_api else ())],
                api_info=_API_INFO if has_api else None,
                within_s=_CONNECTED_WITHIN_S,
            )
            for url in urls
        )
    )
    leaf_urls = [url.strip() for url in config.nats_leaf_url.split(",") if url.strip()]
    begins_with_tls = bool(config.nats_leaf_login["tls_handshake_first"])
    leaves = asyncio.gather(
        *(probe_leaf(url, within_s=_CONNECTED_WITHIN_S, handshake_first=begins_with_tls) for url in leaf_urls)
    )
    return NatsFacts(servers=await servers, leaves=await leaves)
