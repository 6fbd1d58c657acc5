"""Reads options by name and type. They are checked before any job starts; none is silently ignored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from natslog.client import ClientOptions
from natslog.errors import ConfigError, InvalidRequest, did_you_mean
from natslog.times import parse_timestamp_us
from natslog.units import parse_duration_s, parse_size_bytes

CONNECTION = (
    "token", "tokenFile", "tlsCaFile", "tlsCertFile", "tlsKeyFile", "fetchTimeout", "fetchRetries", "retryInterval",
)  # fmt: skip
KAFKAS = {
    "kafka.bootstrap.servers": "use servers (HTTP) to read, and natsServers to write",
    "subscribe": "use stream",
    "subscribePattern": 'use streamPattern, a glob: "orders-*"',
    "assign": "use stream: it has no partitions",
    "topic": "use subject to write, and stream to read",
    "startingOffsetsByTimestamp": "use startingTimestamp, with JSON by stream",
    "endingOffsetsByTimestamp": "use endingTimestamp, with JSON by stream",
    "startingOffsetsByTimestampStrategy": "remove it: a time beyond the newest message is the end",
    "fetchOffset.numRetries": "use fetchRetries",
    "fetchOffset.retryIntervalMs": "use retryInterval",
    "kafkaConsumer.pollTimeoutMs": "use fetchTimeout",
    "groupIdPrefix": "remove it: brokers store no state of readers",
    "kafka.group.id": "remove it: brokers store no state of readers",
}
"""Options of Spark's Kafka connector, and what to do with them. (The jar has the same ones.)"""

_MOST_DIGITS = 18
_IN_PASSING_S = 2.0
_SPARKS_OWN = ("checkpointlocation", "queryname", "outputmode")
"""Options that Spark adds or keeps for itself."""


def refuse(options: Mapping[str, str], names: tuple[str, ...], why: str) -> None:
    """Raises ConfigError if one of these options is given; `why` completes the sentence `option x …`."""
    by_lower = {name.lower(): name for name in names}
    for name in options:
        if name.lower() in by_lower:
            raise ConfigError(f"option {by_lower[name.lower()]} {why}", option=name)


class Given:
    """Options as given, by lower-case name; those not read at the end are unknown."""

    def __init__(self, options: Mapping[str, str], known: tuple[str, ...]) -> None:
        self._values = {name.lower(): str(value).strip() for name, value in options.items()}
        by_lower = {name.lower(): name for name in known}
        for name in options:
            if name.lower() not in by_lower and name.lower() not in _SPARKS_OWN:
                raise ConfigError(f"unknown option {name!r}{_advice(name, known)}", option=name)

    def has(self, name: str) -> bool:
        return name.lower() in self._values

    def text(self, name: str, default: str | None = None) -> str | None:
        return self._values.get(name.lower(), default)

    def flag(self, name: str, default: bool) -> bool:
        text = (self.text(name) or str(default)).lower()
        if text not in ("true", "false"):
            raise ConfigError(f"option {name} {text!r} must be true or false", option=name)
        return text == "true"

    def whole(self, name: str, default: int | None, low: int = 1) -> int | None:
        text = self.text(name)
        if text is None:
            return default
        if not text.isdecimal() or len(text) > _MOST_DIGITS or int(text) < low:
            raise ConfigError(f"option {name} {text[:40]!r} must be a whole number of at least {low}", option=name)
        return int(text)

    def one_of(self, name: str, default: str, allowed: tuple[str, ...]) -> str:
        text = (self.text(name) or default).lower()
        if text not in allowed:
            expected = f"{', '.join(allowed[:-1])} or {allowed[-1]}"
            raise ConfigError(f"option {name} {text!r} must be {expected}{did_you_mean(text, allowed)}", option=name)
        return text

    def size_bytes(self, name: str, default: int | None) -> int | None:
        text = self.text(name)
        if text is None:
            return default
        with naming(name):
            size_bytes = parse_size_bytes(text, name)
        if size_bytes < 1:
            raise ConfigError(f"option {name} {text!r} must be at least one byte", option=name)
        return size_bytes

    def seconds(self, name: str, default: float) -> float:
        text = self.text(name)
        try:
            return default if text is None else parse_duration_s(text, f"option {name}")
        except InvalidRequest as error:
            raise ConfigError(error.message, option=name) from error

    def time_us(self, name: str) -> int | None:
        text = self.text(name)
        try:
            return None if text is None else parse_timestamp_us(text, f"option {name}")
        except InvalidRequest as error:
            raise ConfigError(error.message, option=name) from error


def _advice(name: str, known: tuple[str, ...]) -> str:
    kafkas = {one.lower(): advice for one, advice in KAFKAS.items()}
    if name.lower() in kafkas:
        return f", which is Kafka's: {kafkas[name.lower()]}"
    if name.lower().startswith("kafka."):
        return ", which is Kafka's: remove it; for TLS and credentials see tlsCaFile, tokenFile and natsCredsFile"
    if name.lower() == "natsurl" and "natsServers" in known:  # what the command line and the settings call it
        return ": use natsServers"
    return did_you_mean(name, known)


def client_options(given: Given) -> ClientOptions:
    """Settings of the client, from the options in `CONNECTION`."""
    timeout_s = given.seconds("fetchTimeout", 30.0)
    return ClientOptions(
        timeout_s=timeout_s,
        retries=given.whole("fetchRetries", 5, low=0) or 0,
        retry_interval_s=given.seconds("retryInterval", 0.2),
        patience_s=timeout_s,
        token=given.text("token"),
        token_file=given.text("tokenFile"),
        tls_ca_file=given.text("tlsCaFile"),
        tls_cert_file=given.text("tlsCertFile"),
        tls_key_file=given.text("tlsKeyFile"),
    )


def in_passing(options: ClientOptions) -> ClientOptions:
    """For requests that a query must not wait for: the next one comes soon."""
    return replace(options, timeout_s=min(_IN_PASSING_S, options.timeout_s), retries=0, patience_s=0.0)


@contextmanager
def naming(option: str) -> Iterator[None]:
    """Errors about a value name this option."""
    try:
        yield
    except InvalidRequest as error:
        raise ConfigError(f"option {option}: {error.message}", option=option) from error
