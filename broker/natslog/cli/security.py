"""`natslog whoami`, `token`, `acl`, `role` and `quota`: identities and what they may do."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from natslog.cli.common import JsonFlag, confirm, global_of
from natslog.cli.output import out, print_json, print_table
from natslog.errors import ConfigError
from natslog.units import parse_size_bytes

token_app = typer.Typer(help="Create, list and revoke bearer tokens.", no_args_is_help=True)
acl_app = typer.Typer(help="Access rules: what identities and roles may do.", no_args_is_help=True)
role_app = typer.Typer(help="Roles of identities.", no_args_is_help=True)
quota_app = typer.Typer(help="Limits of identities.", no_args_is_help=True)

Identity = Annotated[str, typer.Argument(metavar="IDENTITY", help="Name of the user or program.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]


def whoami(context: typer.Context, as_json: JsonFlag = False) -> None:
    """Show the identity behind this client's credentials, and what it may do."""
    body = global_of(context).client().whoami()
    if as_json:
        print_json(body)
        return
    if not body["security"]:
        out.print(f"{body['identity']}: security is not enabled in this cluster, so every request is permitted")
        return
    token = f"token {body['token']}, " if body["token"] else ""
    out.print(f"{body['identity']} ({token}expires {_day(body['expires'])})")
    out.print(f"roles: {', '.join(body['roles']) or 'none'}")
    _print_rules(body["rules"])


def _day(time: str | None) -> str:
    return "never" if time is None else time[:19] + "Z"


# ---- tokens ----


@token_app.command("create")
def create_token(
    context: typer.Context,
    identity: Identity,
    role: Annotated[
        list[str] | None, typer.Option("--role", help="Role that the identity gets, too. May be given several times.")
    ] = None,
    expires: Annotated[
        str | None, typer.Option("--expires", help="Duration such as 90d, or never; default 365d.")
    ] = None,
    note: Annotated[str, typer.Option("--note", help="What it is for.")] = "",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write the token to this new file, readable by its owner only."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Create a token. It is shown once and cannot be shown again."""
    client = global_of(context).client()
    file = None if output is None else _new_private_file(output)
    try:
        body = client.create_token(identity, roles=role or (), expires=expires, note=note)
    except BaseException:
        if file is not None and output is not None:
            os.close(file)
            output.unlink(missing_ok=True)
        raise
    if file is not None:
        with os.fdopen(file, "w") as writer:
            writer.write(body.pop("token") + "\n")
    if as_json:
        print_json(body)
        return
    out.print(f"token {body['id']} of {identity}, expires {_day(body['expires'])}")
    out.print(f"written to {output}" if output is not None else body["token"])


def _new_private_file(path: Path) -> int:
    """Raises ConfigError: it exists, or cannot be created."""
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot create {path}: {error.strerror}; no token was created") from error


@token_app.command("ls")
def list_tokens(context: typer.Context, as_json: JsonFlag = False) -> None:
    """List tokens, without their secrets."""
    tokens = global_of(context).client().tokens()
    if as_json:
        print_json(tokens)
        return
    rows = [
        [
            one["identity"],
            one["id"],
            _day(one["created"]),
            ("expired " if one["expired"] else "") + _day(one["expires"]),
            ", ".join(one["roles"]),
            one["note"],
        ]
        for one in tokens
    ]
    print_table(["identity", "token", "created", "expires", "roles", "note"], rows)


@token_app.command("revoke")
def revoke_token(
    context: typer.Context,
    token_id: Annotated[str, typer.Argument(metavar="TOKEN", help="The id of the token, from natslog token ls.")],
    yes: Yes = False,
) -> None:
    """Revoke a token. Requests with it are refused at once, and those in progress end within 5 s."""
    from natslog.security.tokens import id_in

    token_id = id_in(token_id)
    if not yes:
        confirm(f"Revoke the token {token_id}?", or_else=f"token {token_id} is not revoked")
    global_of(context).client().revoke_token(token_id)
    out.print(f"token {token_id} was revoked")


# ---- rules ----


def _print_rules(rules: list[dict[str, Any]]) -> None:
    if not rules:
        out.print("no access rules: nothing is permitted")
        return
    rows = [[one["id"], one["who"], one["action"], one["stream"], one["subject"]] for one in rules]
    print_table(["rule", "who", "action", "stream", "subject"], rows)


@acl_app.command("add")
def add_rule(
    context: typer.Context,
    who: Annotated[
        str, typer.Argument(metavar="WHO", help="An identity, role:NAME, * (every identity), or anonymous.")
    ],
    action: Annotated[
        str, typer.Argument(metavar="ACTION", help="read, publish, manage, cursor, monitor, or admin (all of them).")
    ],
    stream: Annotated[str, typer.Argument(metavar="[STREAM]", help="Pattern of stream names, as 'orders*'.")] = "*",
    subject: Annotated[str, typer.Option("--subject", help="Only messages on these subjects.")] = ">",
    as_json: JsonFlag = False,
) -> None:
    """Permit an action. What no rule permits is refused."""
    rule = global_of(context).client().add_rule(who, action, stream, subject)
    print_json(rule) if as_json else _print_rules([rule])


@acl_app.command("ls")
def list_rules(context: typer.Context, as_json: JsonFlag = False) -> None:
    """List the access rules."""
    rules = global_of(context).client().rules()
    print_json(rules) if as_json else _print_rules(rules)


@acl_app.command("rm")
def remove_rule(
    context: typer.Context, rule: Annotated[str, typer.Argument(metavar="RULE", help="The id of the rule, as r12.")]
) -> None:
    """Remove a rule. Requests in progress that only it permits end within 5 s."""
    global_of(context).client().remove_rule(rule)
    out.print(f"rule {rule} was removed")


@acl_app.command("check")
def check_rule(
    context: typer.Context,
    identity: Identity,
    action: Annotated[str, typer.Argument(metavar="ACTION", help="read, publish, manage, cursor, monitor or admin.")],
    stream: Annotated[
        str, typer.Argument(metavar="[STREAM]", help="Name of a stream, which need not exist; *: the whole cluster.")
    ] = "*",
    subject: Annotated[
        str | None, typer.Option("--subject", help="On these subjects; default: all that the stream has recorded.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Show whether an identity may do something, and the rule that decides. Exit code 3: it may not."""
    body = global_of(context).client().check_access(action, stream, subject=subject, identity=identity)
    if as_json:
        print_json(body)
    else:
        out.print(_verdict(body))
    if not body["allowed"]:
        raise typer.Exit(3)


def _verdict(body: dict[str, Any]) -> str:
    what = f"{body['identity']} may {body['action']} stream {body['stream']} on {', '.join(body['subjects'])}"
    rule = body["rule"]
    if rule is not None:
        return (
            f"allowed: {what}, by rule {rule['id']} ({rule['who']} {rule['action']} {rule['stream']} {rule['subject']})"
        )
    if body["allowed"]:
        return f"allowed: {what}, by several rules together"
    if body["allowed_subjects"]:
        return f"limited: {what} only where the subject is one of {', '.join(body['allowed_subjects'])}"
    return f"refused: no access rule permits that {what}"


# ---- roles ----


@role_app.command("ls")
def list_roles(context: typer.Context, as_json: JsonFlag = False) -> None:
    """List the identities that have roles."""
    roles = global_of(context).client().roles()
    if as_json:
        print_json(roles)
    else:
        print_table(["identity", "roles"], [[name, ", ".join(its)] for name, its in roles.items()])


Role = Annotated[str, typer.Argument(metavar="ROLE", help="Name of the role; rules are for role:ROLE.")]


@role_app.command("add")
def assign_role(context: typer.Context, role: Role, identity: Identity) -> None:
    """Give a role to an identity."""
    global_of(context).client().assign_role(role, identity)
    out.print(f"{identity} has the role {role}")


@role_app.command("rm")
def unassign_role(context: typer.Context, role: Role, identity: Identity) -> None:
    """Take a role from an identity."""
    global_of(context).client().unassign_role(role, identity)
    out.print(f"{identity} does not have the role {role} any more")


# ---- quotas ----

QuotaIdentity = Annotated[
    str, typer.Argument(metavar="IDENTITY", help="An identity, or *: all that have no quota of their own.")
]


@quota_app.command("ls")
def list_quotas(context: typer.Context, as_json: JsonFlag = False) -> None:
    """List the quotas, and the defaults."""
    body = global_of(context).client().quotas()
    if as_json:
        print_json(body)
        return
    names = list(body["default"])
    rows = [["default", *(_limit(body["default"][name]) for name in names)]]
    rows += [
        [who, *(_limit(quota[name]) if name in quota else "" for name in names)]
        for who, quota in body["quotas"].items()
    ]
    print_table(["identity", *names], rows)


def _limit(value: int | None) -> str:
    return "no limit" if value is None else str(value)


@quota_app.command("set")
def set_quota(
    context: typer.Context,
    identity: QuotaIdentity,
    connections: Annotated[int | None, typer.Option(help="Open connections to a broker.")] = None,
    requests: Annotated[int | None, typer.Option(help="Requests in progress at a broker.")] = None,
    polls: Annotated[int | None, typer.Option(help="Requests that wait for messages at a broker.")] = None,
    requests_per_s: Annotated[int | None, typer.Option(help="Requests a second to a broker.")] = None,
    bytes_in_per_s: Annotated[str | None, typer.Option(help="Bytes a second that a broker receives, as 10MiB.")] = None,
    bytes_out_per_s: Annotated[str | None, typer.Option(help="Bytes of messages a second that a broker sends.")] = None,
    streams: Annotated[int | None, typer.Option(help="Streams that it created, in the cluster.")] = None,
    stored_bytes: Annotated[
        str | None, typer.Option(help="Sum of max_bytes times replicas of these streams; each then needs a max_bytes.")
    ] = None,
    cursors: Annotated[int | None, typer.Option(help="Cursors that it set first, in the cluster.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Replace the quota of an identity; a limit that is not given has its default."""
    sizes = {"bytes_in_per_s": bytes_in_per_s, "bytes_out_per_s": bytes_out_per_s, "stored_bytes": stored_bytes}
    counts = {
        "connections": connections,
        "requests": requests,
        "polls": polls,
        "requests_per_s": requests_per_s,
        "streams": streams,
        "cursors": cursors,
    }
    limits = {name: parse_size_bytes(text, name) for name, text in sizes.items() if text is not None}
    limits |= {name: count for name, count in counts.items() if count is not None}
    body = global_of(context).client().set_quota(identity, limits)
    print_json(body) if as_json else print_table(["of the quota", "value"], [[name, body[name]] for name in body])


@quota_app.command("rm")
def remove_quota(context: typer.Context, identity: QuotaIdentity) -> None:
    """Remove the quota of an identity."""
    global_of(context).client().remove_quota(identity)
    out.print(f"{identity} has no quota of its own any more")
