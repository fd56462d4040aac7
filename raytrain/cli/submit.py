"""`raytrain submit`: a job script on a cluster, with what it needs from here, its log, and a second try on a new cluster."""

from __future__ import annotations

import os
import re
import shlex
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic_settings import CliPositionalArg, CliSuppress

from raytrain.config import unknown_name
from raytrain.errors import ConfigError

if TYPE_CHECKING:
    from raytrain.cluster.submit.jobs import Job, Jobs


class Submit(BaseModel):
    """Run a job script on a cluster, as `ray job submit` does, and say what is uploaded and how the job ended.

      raytrain submit jobs/digits.py --address http://HOST:8265 --follow --run.workers 4:64 --lr 0.2

    Flags below are read here; all others after the script, and everything after `--`, are the job's. It runs in a copy of
    the working directory, without what .gitignore and .rayignore name, version control, virtual environments, caches, and
    the folders runs and data. What it names that is left out is told. Storage and data belong where all nodes reach them.

    The job gets the variables NCCL_*, GLOO_*, TORCH_*, OMP_* and the like of this shell, those of --run.forward-env and
    --env. Their values are never shown here, but Ray keeps them: whoever sees the cluster's jobs or logs can see them.

    Where the cluster asks for a token: RAY_AUTH_MODE=token, with RAY_AUTH_TOKEN or ~/.ray/auth_token.

    Exit code: 0 submitted, 2 wrong use; with --follow that of the job: 0 succeeded, the driver's own if it failed (1 if it
    is not known, or the cluster was lost), 143 stopped by somebody, as if by SIGTERM. Ctrl-C leaves the job alone: 130.
    """

    model_config = ConfigDict(use_attribute_docstrings=True)

    script: CliPositionalArg[str] = ""
    """The job, a Python file in the working directory; then its own flags."""
    address: str | None = None
    """Of the cluster's dashboard, http://HOST:8265. Default: RAY_API_SERVER_ADDRESS, RAY_ADDRESS, a Ray on this machine."""
    working_dir: str = Field(".", alias="working-dir")
    """Directory that is uploaded, and in which the job runs."""
    include: list[str] = []
    """Folder to upload although it would be left out here (data, runs, a virtual environment); may be repeated."""
    exclude: list[str] = []
    """Pattern as in .gitignore for what is left out besides; may be repeated."""
    env: list[str] = []
    """NAME=VALUE for the job; NAME alone takes the value of this shell, so that it is not on the screen. Repeatable."""
    name: str = ""
    """Submission id. Default: the script's name with a random number."""
    follow: bool = False
    """Show the job's log until it ends, also through lost connections."""
    retries: int = Field(0, ge=0)
    """With --follow: how many times the job is submitted again after its cluster was lost and another one answers."""
    reconnect_s: float = Field(600.0, alias="reconnect", gt=0)
    """With --follow: seconds for which a cluster that does not answer is waited for."""
    attach: str = ""
    """Instead of a script: submission id of a job that was submitted before, to follow it."""
    arguments: CliSuppress[list[str]] = []
    """Of the job."""

    def cli_cmd(self) -> None:
        """Submits, follows, or both.

        Raises:
            SystemExit: with the exit code, unless it is 0.
            FourPartError: something cannot be submitted as asked.
        """
        self._check()
        job = None if self.attach else self._job()
        if self.address:
            os.environ["RAY_API_SERVER_ADDRESS"] = self.address  # which comes before the flag in Ray's client
        from raytrain.cluster.submit.jobs import UnknownJobError, connect

        address = self.address or os.environ.get("RAY_API_SERVER_ADDRESS") or os.environ.get("RAY_ADDRESS")
        jobs = connect(address)
        if job is not None:
            jobs.submit(job)
            _say(f"submitted {job.name}\n{_next_steps(job.name, address, self.follow)}")
        else:
            try:
                jobs.state(self.attach)
            except UnknownJobError as error:
                rule = "is the submission id of a job that the cluster knows"
                raise ConfigError("--attach", f"{self.attach}: {error}", rule, "ray job list shows those") from None
        if self.follow or self.attach:
            sys.exit(self._followed(jobs, job, address))

    def _check(self) -> None:
        if bool(self.script) == bool(self.attach):
            value = "both" if self.script else "neither"
            raise ConfigError("SCRIPT, --attach", value, "one of them is given", "see raytrain submit --help")
        if self.retries and not self.follow:
            raise ConfigError("--retries", self.retries, "only a job that is followed is submitted again", "add --follow")
        if not re.fullmatch(r"[\w.-]*", self.name, re.ASCII):
            raise ConfigError("--name", self.name, "is letters, digits, '-', '_' and '.'", "choose a name like digits-1")

    def _job(self) -> Job:
        """What is submitted; says what is uploaded."""
        from raytrain.cluster.submit.given import variables
        from raytrain.cluster.submit.jobs import Job
        from raytrain.cluster.submit.mentions import left_behind
        from raytrain.cluster.submit.upload import check_size, script_below, survey

        root = Path(self.working_dir).expanduser().absolute()
        honours_gitignore = os.environ.get("RAY_RUNTIME_ENV_IGNORE_GITIGNORE", "0") != "1"
        upload = survey(root, self.exclude, self.include, honours_gitignore)
        script = script_below(upload, self.script)
        given = variables(os.environ, self.env, self.arguments, str(Path.cwd()))
        for line in (*upload.summary(), *(f"warning: {text}" for text in left_behind(upload, script, self.arguments))):
            _say(line)
        _say(f"variables: {', '.join(sorted(given))}")
        check_size(upload)
        runtime_env = {"working_dir": str(root), "excludes": upload.excludes, "env_vars": given}
        name = self.name or f"{Path(script).stem}-{uuid.uuid4().hex[:8]}"
        return Job(name, shlex.join(["python", script, *self.arguments]), runtime_env)

    def _followed(self, jobs: Jobs, job: Job | None, address: str | None) -> int:
        from raytrain.cluster.submit.campaign import Campaign

        campaign = Campaign(jobs, self.attach if job is None else job.name, job, self.retries, self.reconnect_s, _say, _say)
        try:
            return campaign.run()
        except KeyboardInterrupt:
            _say(f"\n{campaign.name} goes on\n{_next_steps(campaign.name, address)}")
            return 130


def split(argv: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Divides what follows `raytrain submit`: words for the parser, and values that are taken as they are.

    The latter are the job's arguments and the flags that may be repeated, whose values may have commas in them.

    Raises:
        ConfigError: a flag before the script is not one of ours, or the value of one that may be repeated is missing.
    """
    repeated, single, switches = _flags()
    words: list[str] = []
    values: dict[str, Any] = {"arguments": [], **{name: [] for name in repeated.values()}}
    rest, has_script = list(argv), False
    while rest and rest[0] != "--":
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        if flag in repeated:
            values[repeated[flag]].append(value if equals else _value_after(flag, rest))
        elif flag in single:
            words += [word, *rest[: not equals]]
            del rest[: not equals]
        elif word in switches:
            words.append(word)
        elif has_script:
            values["arguments"].append(word)
        elif word.startswith("-"):
            rule = "is one of the flags of submit; those of the job come after its script"
            raise unknown_name(word, [*repeated, *single, *switches], rule)
        else:
            words.append(word)
            has_script = True
    values["arguments"] += rest[1:]
    return words, values


def _value_after(flag: str, rest: list[str]) -> str:
    if not rest or rest[0] == "--":
        raise ConfigError(flag, "no value", "is followed by one", "see raytrain submit --help")
    return rest.pop(0)


def _flags() -> tuple[dict[str, str], set[str], set[str]]:
    """Flags that may be repeated, with their fields; others that take a value; and those that do not."""
    hidden = ("script", "arguments")
    fields = {f"--{field.alias or name}": name for name, field in Submit.model_fields.items() if name not in hidden}
    kinds = {flag: Submit.model_fields[name].annotation for flag, name in fields.items()}
    repeated = {flag: name for flag, name in fields.items() if kinds[flag] == list[str]}
    single = {flag for flag in fields if flag not in repeated and kinds[flag] is not bool}
    return repeated, single, {"--follow", "--no-follow", "-h", "--help"}


def _next_steps(name: str, address: str | None, is_followed: bool = False) -> str:
    where = f" --address {without_password(address)}" if address else ""
    follow = "" if is_followed else f"  follow: raytrain submit --attach {name}{where}\n"
    return f"{follow}  stop:   ray job stop {name}{where}"


def without_password(address: str) -> str:
    """An address that may be shown: 'http://me:secret@host:8265' -> 'http://me:***@host:8265'."""
    return re.sub(r"(?<=://)([^/@:]*):[^/@]*@", r"\1:***@", address)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
