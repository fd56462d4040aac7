"""How is a command line read? By argparse with errors of ours, and pydantic-settings, which knows the models' fields.

Shared by `raytrain` and by job scripts. Values come from the command line alone, never from the environment. Nothing
heavy is imported here, so that `--help` is quick.
"""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Iterator
from typing import Any, NoReturn

from pydantic_settings import BaseSettings, CliSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from raytrain.config import unknown_name
from raytrain.errors import ConfigError, FourPartError

_UNKNOWN = re.compile(r"unrecognized arguments: (?P<name>[^\s=]+)")
_CHOICE = re.compile(r"argument (?P<name>[^:]+): invalid choice: '(?P<value>[^']*)'")
_MISSING = re.compile(r"the following arguments are required: (?P<names>.*)")
_VALUE = re.compile(r"argument (?P<name>[^:]+): (?P<rule>.*)", re.DOTALL)


class Parser(argparse.ArgumentParser):
    """An argument parser that raises ConfigError, with the nearest name, instead of ending the process.

    Flags are not abbreviated: an abbreviation would change its meaning when a flag is added.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})
        self.sections: dict[str, list[argparse.Action]] = {}
        """The help's sections, by title; where there are none, argparse's own."""
        self.description = inspect.cleandoc(self.description or "")

    def error(self, message: str) -> NoReturn:
        """Raises the ConfigError for one of argparse's messages."""
        if found := _UNKNOWN.match(message):
            raise self._unknown(found["name"])
        if (found := _CHOICE.match(message)) and (commands := list(self._commands())):
            raise unknown_name(found["value"], [name for name, _ in commands])
        if found := _MISSING.match(message):
            names = found["names"].removesuffix(":subcommand")
            raise ConfigError(names, "not given", "is required", f"see {self.prog} --help")
        if found := _VALUE.match(message):
            raise ConfigError(found["name"], "not understood", found["rule"], f"see {self.prog} --help")
        raise ConfigError(self.prog, "not understood", message, f"see {self.prog} --help")

    def format_help(self) -> str:
        """The help, in `sections` if there are any."""
        if not self.sections:
            return super().format_help()
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, [], [])
        formatter.add_text(self.description)
        for title, actions in self.sections.items():
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def flags(self) -> list[str]:
        """All flags of this parser and its commands, without the hidden ones."""
        shown = [action for action in self._actions if action.help != argparse.SUPPRESS]
        own = [flag for action in shown for flag in action.option_strings]
        return list(dict.fromkeys([*own, *(flag for _, parser in self._commands() for flag in parser.flags())]))

    def _unknown(self, name: str) -> ConfigError:
        if name.startswith("-"):
            return unknown_name(name, self.flags(), "is one of the flags that --help shows")
        return ConfigError(name, "one argument too many", "is not expected here", f"see {self.prog} --help")

    def _commands(self) -> Iterator[tuple[str, Parser]]:
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                yield from ((name, parser) for name, parser in action.choices.items() if isinstance(parser, Parser))


class CommandLine(BaseSettings):
    """Base of a model whose values come from the command line alone, never from the environment."""

    model_config = SettingsConfigDict(use_attribute_docstrings=True, cli_exit_on_error=False)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)


def settings_source(model: type[BaseSettings], prog: str) -> CliSettingsSource[Parser]:
    """What `CliApp.run(model, arguments, cli_settings_source=...)` needs to read a command line with `Parser`.

    Args:
        model: its fields are the flags, its docstring is the help's first paragraph.
        prog: the command's name in messages.
    """
    return CliSettingsSource(
        model,
        root_parser=Parser(prog=prog, description=model.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter),
        cli_implicit_flags=True,
        cli_enforce_required=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
    )


def exit_code(error: BaseException) -> int:
    """2 for what the user can mend in the command, the settings or the data, 130 for Ctrl-C, 1 for the rest."""
    if isinstance(error, KeyboardInterrupt):
        return 130
    return 2 if isinstance(error, FourPartError) else 1
