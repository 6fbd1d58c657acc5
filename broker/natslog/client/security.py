"""The client's calls about identities: who it is, tokens, access rules, roles and quotas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from natslog.client.asking import Asker, Facts, in_path
from natslog.security.tokens import id_in


class SecurityCalls(Asker):
    """A part of `NatslogClient`. All but `whoami` and `check_access` of oneself need the action `admin`.

    Raises:
        Unauthorized, Forbidden. InvalidRequest: security is not enabled in the cluster.
    """

    def whoami(self) -> dict[str, Any]:
        """`{identity, security, token, expires, roles, rules, quota, cluster_id}` of this client's credentials."""
        return self._json("GET", "/v1/whoami", Facts)

    # ---- tokens ----

    def tokens(self) -> list[dict[str, Any]]:
        """`{id, identity, created, expires, expired, note, roles}` of each; never the token itself."""
        return self._json("GET", "/v1/tokens", list[Facts])

    def create_token(
        self, identity: str, *, roles: Sequence[str] = (), expires: str | None = None, note: str = ""
    ) -> dict[str, Any]:
        """The new token is the field `token`. It is not stored, and cannot be shown again.

        Args:
            roles: the identity gets them, too. `expires`: a duration such as `90d`, or `never`; by default `365d`.
        """
        body: dict[str, Any] = {"identity": identity, "roles": list(roles), "note": note}
        return self._json("POST", "/v1/tokens", Facts, body=body | ({} if expires is None else {"expires": expires}))

    def revoke_token(self, token_id: str) -> None:
        """Requests with it are refused from now on, and those in progress end. Raises SecurityNotFound.

        Args:
            token_id: or the whole token, of which only the id is sent: URLs are logged.
        """
        self._ask("DELETE", f"/v1/tokens/{in_path(id_in(token_id))}")

    # ---- rules ----

    def rules(self) -> list[dict[str, Any]]:
        """`{id, who, action, stream, subject}` of each, oldest first."""
        return self._json("GET", "/v1/acl", list[Facts])

    def add_rule(self, who: str, action: str, stream: str = "*", subject: str = ">") -> dict[str, Any]:
        """Permits `action` to an identity, to `role:NAME`, or to every identity (`*`). Returns the rule."""
        body = {"who": who, "action": action, "stream": stream, "subject": subject}
        return self._json("POST", "/v1/acl", Facts, body=body)

    def remove_rule(self, rule_id: str) -> None:
        """Raises SecurityNotFound. SecurityConflict: no identity could administer the cluster any more."""
        self._ask("DELETE", f"/v1/acl/{in_path(rule_id)}")

    def check_access(
        self, action: str, stream: str, *, subject: str | None = None, identity: str | None = None
    ) -> dict[str, Any]:
        """`{allowed, allowed_subjects, rule, …}`: whether an identity (by default this client's) may do something, and
        the rule that decides.
        """
        query = {"action": action, "stream": stream, "subject": subject, "identity": identity}
        return self._json("GET", "/v1/acl/check", Facts, query=query)

    # ---- roles and quotas ----

    def roles(self) -> dict[str, list[str]]:
        """The roles of each identity that has any."""
        return self._json("GET", "/v1/roles", dict[str, list[str]])

    def assign_role(self, role: str, identity: str) -> None:
        self._ask("PUT", f"/v1/roles/{in_path(role)}", query={"identity": identity})

    def unassign_role(self, role: str, identity: str) -> None:
        """Raises SecurityNotFound, SecurityConflict."""
        self._ask("DELETE", f"/v1/roles/{in_path(role)}", query={"identity": identity})

    def quotas(self) -> dict[str, Any]:
        """`{default, quotas}`, the latter by identity; `*`: of identities without one of their own."""
        return self._json("GET", "/v1/quotas", Facts)

    def set_quota(self, identity: str, limits: Mapping[str, int | None]) -> dict[str, Any]:
        """Replaces the quota of an identity (or of `*`); a limit that is not given has its default."""
        return self._json("PUT", "/v1/quotas", Facts, query={"identity": identity}, body=dict(limits))

    def remove_quota(self, identity: str) -> None:
        """Raises SecurityNotFound."""
        self._ask("DELETE", "/v1/quotas", query={"identity": identity})
