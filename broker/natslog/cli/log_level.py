"""`natslog cluster log-level`: levels of the logs of brokers, shown and changed."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from natslog.cli.common import JsonFlag, global_of
from natslog.cli.output import print_json, print_table
from natslog.errors import InvalidRequest


def log_level(
    context: typer.Context,
    level: Annotated[
        str | None,
        typer.Argument(
            metavar="[LEVEL]",
            help="debug, info, warning, error, or default: as the broker was started. Without LEVEL they are shown.",
        ),
    ] = None,
    broker: Annotated[int | None, typer.Option("--broker", metavar="ID", help="Of this broker; default: all.")] = None,
    logger: Annotated[
        str | None,
        typer.Option("--logger", metavar="NAME", help="Of this logger, for example natslog.node; default: all."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Show or set the level of the log. A broker that is started again has the level of its settings.

    Exit code 1 if a broker does not answer.
    """
    client = global_of(context).client()
    if level is not None:
        found = client.set_log_level(level, logger=logger, broker=broker)
    else:
        if logger is not None:
            raise InvalidRequest("--logger requires a LEVEL")
        found = [one for one in client.log_levels() if broker in (None, one["broker"])]
    if as_json:
        print_json(found)
    else:
        print_table(["broker", "level", "loggers with a level of their own"], [_levels_row(one) for one in found])
    if any("problem" in one for one in found):
        raise typer.Exit(1)


def _levels_row(body: dict[str, Any]) -> list[Any]:
    if "problem" in body:
        return [body["broker"], "unknown", body["problem"]["message"]]
    own = ", ".join(f"{name}: {level}" for name, level in body["loggers"].items())
    return [body["broker"], body["level"], own or "none"]
