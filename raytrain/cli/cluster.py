"""`raytrain cluster`: will this cluster file give the cluster that a run needs? Writes one, and checks one, both offline."""

from __future__ import annotations

import sys
from pathlib import Path

from pydantic import BaseModel, ConfigDict
from pydantic_settings import CliApp, CliPositionalArg, CliSubCommand, get_subcommand

from raytrain.cluster.file.spec import ClusterSpec
from raytrain.errors import ConfigError
from raytrain.units import parse_range


class Render(ClusterSpec):
    """Write a file for `ray up`, or manifests for `kubectl apply`, to stdout.

    The head never trains; workers are spot machines with GPUs, unless they are your own.
    Ray's token authentication is on. The file says what to edit, and how to use it.
    """

    out: str = ""
    """File to write instead of stdout."""

    def cli_cmd(self) -> None:
        """Writes it.

        Raises:
            FourPartError: a setting is missing, or the file cannot be written.
        """
        from raytrain.cluster.file.render import render

        text = render(self)
        if not self.out:
            sys.stdout.write(text)
            return
        try:
            Path(self.out).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError("--out", self.out, f"can be written ({error})", "give another path") from None


class Check(BaseModel):
    """List all mistakes in a cluster file, each with its line and what to do; needs no cloud and no network.

    For files of `ray up`, and for Kubernetes manifests. Run it where you would run `ray up`:
    it looks whether the files that are to be copied are there.
    Exit code: 0 no mistakes, 1 there are some, 2 wrong use.
    """

    model_config = ConfigDict(use_attribute_docstrings=True)

    file: CliPositionalArg[str]
    """The file."""
    workers: str = ""
    """Smallest and largest number of workers of the run, min:max as in --run.workers, to see whether they fit."""

    def cli_cmd(self) -> None:
        """Writes the mistakes to stdout.

        Raises:
            SystemExit: with code 1, where there are some.
            FourPartError: the file cannot be read.
        """
        from raytrain.cluster.file.checking import mistakes
        from raytrain.cluster.file.facts import facts_of_this_machine

        found = mistakes(self._text(), facts_of_this_machine(Path.cwd(), self._workers()))
        shown = [mistake.text(self.file) for mistake in found]
        sys.stdout.write("\n".join([*shown, _count(len(found))]) + "\n")
        if found:
            raise SystemExit(1)

    def _text(self) -> str:
        try:
            return Path(self.file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("FILE", self.file, f"is a text file ({error})", "give the path of one") from None

    def _workers(self) -> tuple[int, int] | None:
        if not self.workers:
            return None
        try:
            low, high = parse_range(self.workers)
        except ValueError:
            low, high = 0, 0
        if not 1 <= low <= high:
            raise ConfigError("--workers", self.workers, "is min:max, at least 1", "write it like 4:64")
        return low, high


def _count(number: int) -> str:
    return {0: "no mistakes", 1: "1 mistake"}.get(number, f"{number} mistakes")


class Cluster(BaseModel):
    """Write or check the file that describes a cluster."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    render: CliSubCommand[Render]
    """Write a cluster file for AWS, GCP, Azure, Kubernetes or machines of your own."""
    check: CliSubCommand[Check]
    """List all mistakes in a cluster file."""

    def cli_cmd(self) -> None:
        """Runs one of them.

        Raises:
            ConfigError: none is given.
        """
        command = get_subcommand(self, is_required=False)
        if command is None:
            raise ConfigError("raytrain cluster", "no command", "is render or check", "see raytrain cluster --help")
        CliApp.run_subcommand(self)
