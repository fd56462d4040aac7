"""How is a command line read? By click, with flags made of pydantic models and with errors in four parts.

Shared by the commands of `raytrain` and by job scripts. click splits the words, finds unknown flags and writes the help;
pydantic converts and checks the values of a model's flags. Nothing here imports torch or ray.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from types import NoneType
from typing import Any, Literal, TextIO, cast, get_args, get_origin

import click
from click.core import ParameterSource
from pydantic import BaseModel, TypeAdapter, ValidationError

from raytrain.config import RunConfig, unknown_name
from raytrain.errors import ConfigError, FourPartError, RaytrainError, TaskError
from raytrain.sweep_config import SweepConfig
from raytrain.tune.space import kinds_of

_SETTING = re.compile(r"(?<![\w.-])(?:sweep\.space\.(?:run\.)?\w+|(?:run|sweep)\.[a-z][a-z0-9_]*)(?![\w(])")
_KNOWN = {*(f"run.{name}" for name in RunConfig.model_fields), *(f"sweep.{name}" for name in SweepConfig.model_fields)}
DEBUG = "RAYTRAIN_DEBUG"
"""Environment variable: if set, tracebacks of errors in the task's code have our own frames, too."""
_CONTEXT = {"help_option_names": ["-h", "--help"]}


class Option(click.Option):
    """A flag.

    Args:
        section: title of the help's section in which it stands.
        field: path of the model's field that it sets, for example ("run", "workers"); () where there is none.
        annotation: of that field.
    """

    def __init__(
        self, *words: Any, section: str = "Options", field: tuple[str, ...] = (), annotation: Any = None, **settings: Any
    ) -> None:
        super().__init__(*words, **settings)
        self.section, self.field, self.annotation = section, field, annotation

    def type_cast_value(self, ctx: click.Context, value: Any) -> Any:
        """Raises ConfigError where the value is wrong, or is the next flag."""
        words = value if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(word, str) and word.startswith("--") for word in words):
            raise ConfigError(self.opts[0], "not given", "is followed by a value", see_help(ctx))
        try:
            return super().type_cast_value(ctx, value)
        except click.BadParameter as error:
            raise ConfigError(self.opts[0], value, error.message, see_help(ctx)) from None


option = partial(click.option, cls=Option, show_default=True)
"""Decorator: a flag of a command."""


class Argument(click.Argument):
    """A positional argument with a line in the help."""

    def __init__(self, *words: Any, line: str, **settings: Any) -> None:
        super().__init__(*words, **settings)
        self.line = line


def number(kind: Any) -> Callable[[Any], Any]:
    """The type of an option that pydantic checks, for example `number(PositiveFloat)`."""
    adapter = TypeAdapter(kind)

    def read(value: Any) -> Any:
        try:
            return adapter.validate_python(value)
        except ValidationError as error:
            raise click.BadParameter(rule_of(error)) from None

    return read


class Command(click.Command):
    """A command whose help has sections."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **{"context_settings": _CONTEXT, **settings})

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Raises ConfigError for a word too many."""
        ctx.allow_extra_args = True
        try:
            rest = super().parse_args(ctx, args)
        except click.UsageError as error:
            error.ctx = error.ctx or ctx
            raise
        if rest:
            raise ConfigError(rest[0], "one argument too many", "is not expected here", see_help(ctx))
        return rest

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if isinstance(param, Argument):
                sections.setdefault("Arguments", []).append((param.human_readable_name, param.line))
            elif record := param.get_help_record(ctx):
                sections.setdefault(getattr(param, "section", "Options"), []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records, col_max=28)


class Group(click.Group):
    """A command with commands below it."""

    command_class = Command
    group_class = type

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **{"context_settings": _CONTEXT, "no_args_is_help": False, **settings})

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """Raises ConfigError, with the nearest name, for an unknown command."""
        if args[0] not in self.commands:
            raise unknown_name(args[0], list(self.commands))
        return super().resolve_command(ctx, args)


class LastingStream:
    """A stream whose reader may go before the program ends, as a closed terminal or `head`; what is written then is lost."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with self._until_lost():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._until_lost():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _until_lost(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())


def exit_code_of(action: Callable[[], int | None], fields: Iterable[str] | None = None) -> int:
    """Runs a command; its exit code: what it returns (None: 0), 2 if the user can correct the cause of an error, 130 after
    Ctrl-C, otherwise 1. Writes errors to stderr.

    Args:
        action: the command.
        fields: of a job's task: errors name its flags instead of settings; None for other commands.
    """
    out, err = cast(TextIO, LastingStream(sys.stdout)), cast(TextIO, LastingStream(sys.stderr))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        return _exit_code_of(action, fields)


def _exit_code_of(action: Callable[[], int | None], fields: Iterable[str] | None) -> int:
    try:
        return action() or 0
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    except click.exceptions.Exit as end:  # of --help
        return end.exit_code
    except (KeyboardInterrupt, click.Abort):
        sys.stderr.write("stopped\n")
        return 130
    except (RaytrainError, click.UsageError) as error:
        shown = _four_parts(error) if isinstance(error, click.UsageError) else error
        sys.stderr.write(error_text(shown, fields, is_debug=bool(os.environ.get(DEBUG))))
        return 2 if isinstance(shown, FourPartError) else 1


def error_text(error: RaytrainError, fields: Iterable[str] | None = None, is_debug: bool = False) -> str:
    """What stderr says: for an error in the task's code its traceback and then one line, otherwise the error's own text.

    Args:
        error: what was raised.
        fields: names of the task's fields.
        is_debug: whether tracebacks have our own frames, too.
    """
    if isinstance(error, TaskError) and error.traceback.startswith("Traceback"):
        text = error.details if is_debug else error.traceback
        return f"{text.rstrip()}\nerror: raised by {error.where}\n"
    if isinstance(error, TaskError):
        return f"error: {error.traceback}\n"
    return f"error: {str(error) if fields is None else with_flags(str(error), fields)}\n"


def say(line: str) -> None:
    """Writes a line to stdout at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _four_parts(error: click.UsageError) -> ConfigError:
    ctx = error.ctx
    if ctx is None:  # click sets it in all errors of a command line
        return ConfigError("command line", "not understood", error.message, "see --help")
    if isinstance(error, click.NoSuchOption):
        return unknown_name(error.option_name, flags_of(ctx.command), "is one of the flags that --help shows")
    if isinstance(error, click.MissingParameter) and error.param is not None:
        where = error.param.human_readable_name if isinstance(error.param, Argument) else error.param.opts[0]
        return ConfigError(where, "not given", "is required", see_help(ctx))
    if isinstance(error, click.BadOptionUsage):
        return ConfigError(error.option_name, "not understood", error.message, see_help(ctx))
    if isinstance(ctx.command, click.Group):
        return ConfigError(ctx.command_path, "no command", f"is {' or '.join(ctx.command.commands)}", see_help(ctx))
    return ConfigError(ctx.command_path, "not understood", error.message, see_help(ctx))


def flags_of(command: click.Command) -> list[str]:
    """All flags of a command and of those below it."""
    below = command.commands.values() if isinstance(command, click.Group) else ()
    own = [
        flag for param in command.params if isinstance(param, click.Option) for flag in (*param.opts, *param.secondary_opts)
    ]
    return list(dict.fromkeys([*own, *(flag for one in below for flag in flags_of(one)), "--help"]))


def see_help(ctx: click.Context) -> str:
    return f"see {ctx.command_path} --help"


def rule_of(error: ValidationError) -> str:
    message = error.errors(include_url=False)[0]["msg"]
    return message[0].lower() + message[1:]


def options_of(
    model: type[BaseModel],
    defaults: Mapping[str, Any],
    path: tuple[str, ...] = (),
    section: str = "Options",
    sections: Mapping[str, str] | None = None,
    optional: Collection[str] = (),
) -> list[Option]:
    """One flag for each field of a model; fields of a model in a field have flags such as --run.workers.

    Args:
        model: whose fields have docstrings.
        defaults: shown instead of the fields' own, by name.
        path: of the model in its command: ("run",) for flags that begin with --run.
        section: of the help.
        sections: titles of further sections, each by the name of the field at which it begins.
        optional: names of required fields that may be left out.
    """
    options: list[Option] = []
    for name, field in model.model_fields.items():
        section = (sections or {}).get(name, section)
        default = defaults.get(name, None if field.is_required() else field.get_default(call_default_factory=True))
        kind = kinds_of(field.annotation)[0]
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            inner = default.model_dump() if isinstance(default, BaseModel) else {}
            options += options_of(kind, inner, (*path, name), section, optional=optional)
        else:
            is_required = field.is_required() and ".".join((*path, name)) not in optional
            told = "" if is_required else "  [required]" if field.is_required() else _default_text(default)
            help = (field.description or "") + told
            options.append(_option((*path, name), field.annotation, section=section, help=help, required=is_required))
    return options


def _option(path: tuple[str, ...], annotation: Any, **settings: Any) -> Option:
    flag, name, kinds = flag_of(".".join(path)), "__".join(path), kinds_of(annotation)
    settings |= {"field": path, "annotation": annotation}
    if kinds == [bool]:
        return Option([f"{flag}/{flag.replace('--', '--no-', 1)}", name], **settings)
    return Option([flag, name], metavar=_placeholder(kinds), multiple=_holds_many(kinds[0]), **settings)


def given_values(ctx: click.Context) -> dict[str, Any]:
    """Values that a command line gives to fields, for pydantic to convert: {"lr": "0.2", "run": {"workers": ["1:4"]}}."""
    found: dict[str, Any] = {}
    for option in ctx.command.params:
        if not isinstance(option, Option) or not option.field or option.name is None:
            continue
        if ctx.get_parameter_source(option.name) == ParameterSource.COMMANDLINE:
            into = found
            for name in option.field[:-1]:
                into = into.setdefault(name, {})
            into[option.field[-1]] = _plain(ctx.params[option.name], option.annotation)
    return found


def with_defaults(model: type[BaseModel], given: Mapping[str, Any]) -> dict[str, Any]:
    """The given values; a model in a field keeps the field's default for what is not given."""
    defaults = {
        name: field.default.model_dump()
        for name, field in model.model_fields.items()
        if isinstance(field.default, BaseModel)
    }
    return {
        name: defaults[name] | value if name in defaults and isinstance(value, dict) else value
        for name, value in given.items()
    }


def _plain(value: Any, annotation: Any) -> Any:
    """Something that pydantic can convert from what click found: a bool, one word, or several words."""
    kind = kinds_of(annotation)[0]
    if isinstance(value, str):
        if value == "None" and NoneType in get_args(annotation):
            return None
        is_enum = isinstance(kind, type) and issubclass(kind, Enum)
        return kind.__members__.get(value, value) if is_enum else value
    if not isinstance(value, tuple):
        return value
    if value == ("None",) and NoneType in get_args(annotation):
        return None
    if (get_origin(kind) or kind) is dict:
        return {key: item for word in value for key, item in _pairs(word)}
    return [item for word in value for item in _items(word)]


def _items(word: str) -> list[Any]:
    """'1,2' and '[1, 2]' -> ["1", "2"] and [1, 2]; a word that is no JSON stays for pydantic to refuse."""
    if word.startswith("["):
        with contextlib.suppress(ValueError):
            return list(json.loads(word))
    return word.split(",")


def _pairs(word: str) -> Iterable[tuple[str, Any]]:
    """'a=1,b=2' and '{"a": 1, "b": 2}' -> pairs."""
    if word.startswith("{"):
        with contextlib.suppress(ValueError):
            return dict(json.loads(word)).items()
    return [(key, item) for key, _, item in (pair.partition("=") for pair in word.split(","))]


def _holds_many(kind: Any) -> bool:
    return (get_origin(kind) or kind) in (list, tuple, set, frozenset, dict)


def _default_text(value: Any) -> str:
    """A default as a user would type it: (1, 2) -> '[default: 1:2]', 60.0 -> '[default: 60]'; '' for none."""
    if value is True:
        return "  [default: yes]"
    if isinstance(value, float):
        value = f"{value:g}"
    if isinstance(value, (tuple, list)):
        value = (":" if isinstance(value, tuple) and [*map(type, value)] == [int, int] else ",").join(map(str, value))
    return "" if value is None or value is False or value in ("", {}) else f"  [default: {value}]"


def _placeholder(kinds: Sequence[Any]) -> str:
    """What stands for a value: 'N', 'X', 'TEXT', 'MIN:MAX' or '{min,max}'."""
    if get_origin(kinds[0]) is Literal:
        return "{" + ",".join(str(choice) for choice in get_args(kinds[0]) if choice != "") + "}"
    names: dict[Any, str] = {int: "N", float: "X", tuple[int, int]: "MIN:MAX"}
    return names.get(kinds[0], "TEXT") if len(kinds) == 1 else "TEXT"


def flag_of(name: str) -> str:
    """'run.global_batch' -> '--run.global-batch'."""
    return "--" + name.replace("_", "-")


def with_flags(text: str, fields: Iterable[str] = ()) -> str:
    """A text that names settings, with flags in their place; a first line that is the name of a field is one, too.

    Args:
        text: of an error.
        fields: names of the task's fields.
    """

    def flag(found: re.Match[str]) -> str:
        is_setting = found[0] in _KNOWN or found[0].startswith("sweep.space.")
        return flag_of(found[0]) if is_setting else found[0]

    first, newline, rest = text.partition("\n")
    return _SETTING.sub(flag, (flag_of(first) if first in set(fields) else first) + newline + rest)
