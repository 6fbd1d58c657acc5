"""Commands that take the same settings of a broker as `natslog server`: from flags, variables, and the TOML file."""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, get_args

import typer.models

from natslog.cli import serve
from natslog.config import DEFAULT_DATA_DIR, SETTINGS, BrokerConfig, load_config
from natslog.errors import ConfigError

_PANEL = "Settings of the broker, as of natslog server"


def with_broker_settings(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the options of `natslog server` besides its own; it gets them as the argument `settings`."""
    own = [one for one in inspect.signature(command, eval_str=True).parameters.values() if one.name != "settings"]
    shared = [
        one.replace(annotation=_in_panel(one.annotation))
        for one in inspect.signature(serve.server, eval_str=True).parameters.values()
    ]

    def run(**given: Any) -> None:
        settings = {one.name: given.pop(one.name) for one in shared}
        command(**given, settings=settings)

    run.__name__, run.__doc__, run.__module__ = command.__name__, command.__doc__, command.__module__
    parameters = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in (*own, *shared)]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


def _in_panel(annotation: Any) -> Any:
    kind, option = get_args(annotation)
    assert isinstance(option, typer.models.OptionInfo), "all parameters of the command are options"
    option = copy.copy(option)
    option.rich_help_panel = _PANEL
    return Annotated[kind, option]


def config_of(settings: Mapping[str, Any]) -> tuple[BrokerConfig | None, str]:
    """The settings of the broker of this machine, or None with the reason for which they are wrong. Without any
    setting, and without a data folder of the default name, there is no broker here: None, and no reason.
    """
    path: Path | None = settings["config"]
    flags = {name: value for name, value in settings.items() if name != "config"}
    is_given = path is not None or any(value is not None for value in flags.values())
    has_variables = any(f"NATSLOG_{name.removesuffix('_s').upper()}" in os.environ for name in SETTINGS)
    if not (is_given or has_variables or Path(DEFAULT_DATA_DIR).is_dir()):
        return None, ""
    try:
        return load_config(path, flags), ""
    except ConfigError as error:
        return None, error.message
