"""Calls of operators: members of the cluster, leaderships, upgrades and log levels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from natslog.client.asking import Asker, Facts
from natslog.client.streams import stream_path


class OperatorCalls(Asker):
    """Part of `NatslogClient`."""

    def plan(self, *, drain: int | None = None) -> dict[str, Any]:
        """The moves that would even out the loads of the brokers, or those that draining a broker would cause:
        `moves` with `stream`, `before`, `after`, `copied_bytes`; `brokers` with their loads before and after;
        `under_way`; `problem`. Nothing is changed.
        """
        return self._json("GET", "/v1/cluster/plan", Facts, query={"drain": drain})

    def add_broker(self, url: str) -> dict[str, Any]:
        """Makes the blank broker at this URL a member of the cluster; returns it as the cluster shows it."""
        return self._json("POST", "/v1/cluster/brokers", Facts, body={"url": url})

    def drain_broker(self, number: int, draining: bool = True) -> dict[str, Any]:
        """Moves its replicas and leaderships gradually to other brokers; False: the broker may hold replicas again."""
        return self._json("PATCH", f"/v1/cluster/brokers/{number}", Facts, body={"draining": draining})

    def remove_broker(self, number: int, *, force: bool = False) -> None:
        """Removes the broker from the cluster. Without `force` it must not hold any replica."""
        self._ask("DELETE", f"/v1/cluster/brokers/{number}", query={"force": "true" if force else None})

    def log_levels(self) -> list[dict[str, Any]]:
        """Of each broker `{broker, level, loggers}`, or `{broker, problem}` where it does not answer."""
        found: list[dict[str, Any]] = self._json("GET", "/v1/cluster/log-level", Facts)["brokers"]
        return found

    def set_log_level(
        self, level: str, *, logger: str | None = None, broker: int | None = None
    ) -> list[dict[str, Any]]:
        """Sets the level of one logger or all, of one broker or all, until a broker is started again.

        Args:
            level: debug, info, warning, error; default: as the broker was started.

        Returns:
            As `log_levels`; the `problem` of a broker is why its level is as it was.
        """
        body = {"level": level, "logger": logger, "broker": broker}
        found: list[dict[str, Any]] = self._json("PUT", "/v1/cluster/log-level", Facts, body=body)["brokers"]
        return found

    def finalize_upgrade(self) -> dict[str, Any]:
        """Raises the feature level permanently: `{feature_level, raised}`. Raises UpgradeBlocked."""
        return self._json("POST", "/v1/cluster/finalize-upgrade", Facts)

    def transfer_metadata(self, to: int) -> None:
        """Transfers the metadata leadership to this broker."""
        self._ask("POST", "/v1/cluster/transfer", body={"to": to})

    def transfer_stream(self, name: str, to: int) -> None:
        """Transfers the leadership of a stream to another in-sync replica."""
        self._ask("POST", stream_path(name) + "/leader", body={"to": to})

    def move_stream(self, name: str, brokers: Sequence[int]) -> None:
        """Moves a stream's replicas to these brokers, the preferred leader first; returns when the move has started."""
        self._ask("PUT", stream_path(name) + "/replicas", body={"brokers": list(brokers)})
