"""The settings of a broker as options: those of `natslog server`, and of commands that examine a broker."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from natslog.cli.option_groups import OptionGroup, options_of
from natslog.config import DEFAULT_DATA_DIR, SETTINGS, BrokerConfig, load_config, variables_of
from natslog.errors import ConfigError

_FILE = inspect.Parameter(
    "config",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[Path | None, typer.Option("--config", help="TOML file of settings.")],
)
SERVER_SETTINGS = OptionGroup((_FILE, *options_of(SETTINGS)), dict)
EXAMINED_SETTINGS = SERVER_SETTINGS.in_panel("Settings of the broker, as of natslog server")


def loaded(settings: Mapping[str, Any]) -> BrokerConfig:
    """From the values of the options, the variables and the file. Raises ConfigError."""
    return load_config(settings["config"], {name: value for name, value in settings.items() if name != "config"})


def config_of(settings: Mapping[str, Any]) -> tuple[BrokerConfig | None, str]:
    """The settings of the broker of this machine, or None with the reason for which they are wrong. Without any
    setting, and without a data folder of the default name, there is no broker here: None, and no reason.
    """
    is_given = any(value is not None for value in settings.values())
    has_variables = any(variable in os.environ for one in SETTINGS for variable in variables_of(one))
    if not (is_given or has_variables or Path(DEFAULT_DATA_DIR).is_dir()):
        return None, ""
    try:
        return loaded(settings), ""
    except ConfigError as error:
        return None, error.message
