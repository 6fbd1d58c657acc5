"""Options that are stated once, and taken by several commands: as fields of a dataclass, or as rows of a table.

A command has one argument for them. `takes` gives it the options in the place of this argument, for typer reads options
from the signature of a command.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Annotated, Any, get_args

import typer
import typer.models

from natslog.setting_kinds import Stated

Command = Callable[..., None]


@dataclass(frozen=True, slots=True)
class OptionGroup:
    """Options, and what the command gets of their values (`make` has an argument of the name of each)."""

    parameters: tuple[inspect.Parameter, ...]
    make: Callable[..., Any]

    @classmethod
    def of(cls, made: Callable[..., Any]) -> OptionGroup:
        """The arguments of a function or the fields of a dataclass, which are annotated as those of a command."""
        return cls(tuple(inspect.signature(made, eval_str=True).parameters.values()), made)

    def in_panel(self, panel: str) -> OptionGroup:
        """The same, shown by `--help` in a panel of its own."""
        shown = []
        for one in self.parameters:
            kind, option = get_args(one.annotation)
            assert isinstance(option, typer.models.OptionInfo), "a group has no arguments"
            option = copy.copy(option)
            option.rich_help_panel = panel
            shown.append(one.replace(annotation=Annotated[kind, option]))
        return replace(self, parameters=tuple(shown))


def options_of(settings: Iterable[Stated]) -> tuple[inspect.Parameter, ...]:
    """An option for each setting: `max_age` is `--max-age`. The value of one that is not given is None."""
    parameters = []
    for one in settings:
        kind = one.setting.option_type | None
        option = typer.Option(*([one.setting.flag] if one.setting.flag else []), help=one.setting.help)
        keyword = inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=None)
        parameters.append(keyword.replace(annotation=Annotated[kind, option]))
    return tuple(parameters)


def takes(**groups: OptionGroup) -> Callable[[Command], Command]:
    """The command with these options, each group in the place of the argument of that name."""

    def with_options(command: Command) -> Command:
        parameters: list[inspect.Parameter] = []
        for own in inspect.signature(command, eval_str=True).parameters.values():
            parameters += groups[own.name].parameters if own.name in groups else [own]

        def run(**given: Any) -> None:
            made = {
                name: group.make(**{one.name: given.pop(one.name) for one in group.parameters})
                for name, group in groups.items()
            }
            command(**given, **made)

        run.__name__, run.__doc__, run.__module__ = command.__name__, command.__doc__, command.__module__
        parameters = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in parameters]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in parameters}
        return run

    return with_options
