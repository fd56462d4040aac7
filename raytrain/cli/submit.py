"""`raytrain submit`: a job script on a cluster, with its files and variables, its log, and a retry on a new cluster."""

from __future__ import annotations

import os
import re
import shlex
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from pydantic import NonNegativeInt, PositiveFloat

from raytrain.cli.flags import Argument, Command, flags_of, number, option, say
from raytrain.config import unknown_name
from raytrain.errors import ConfigError

if TYPE_CHECKING:
    from raytrain.cluster.submit.jobs import Job, Jobs

ADDRESS = "Of the cluster's dashboard.  [default: RAY_API_SERVER_ADDRESS, RAY_ADDRESS, a Ray on this machine]"
ENV = "Variable for the job; NAME alone takes the value of this shell, which keeps it off the screen. Repeatable."
RETRIES = "With --follow: how often to submit the job again after its cluster was lost and another one answers."
RECONNECT = "With --follow: how long to wait for a cluster that does not answer."
SCRIPT = "The job, a Python file in the working directory; then its own flags."


class SubmitCommand(Command):
    """Passes unknown flags, and everything after `--`, to the job."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        # -h is no help option of click, which would find it in a flag of the job such as -path, too
        context = {"ignore_unknown_options": True, "help_option_names": ["--help"]}
        super().__init__(*args, **{"context_settings": context, **settings})

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        return super().parse_args(ctx, ["--help" if word == "-h" else word for word in args[:end]] + args[end:])


@click.command(cls=SubmitCommand)
@click.argument("words", cls=Argument, nargs=-1, type=click.UNPROCESSED, metavar="[SCRIPT [FLAGS OF THE JOB]]", line=SCRIPT)
@option("--address", metavar="http://HOST:8265", help=ADDRESS)
@option("--working-dir", metavar="PATH", default=".", help="Directory to upload, in which the job runs.")
@option("--include", metavar="PATH", multiple=True, help="Folder to upload although it is left out by default. Repeatable.")
@option("--exclude", metavar="PATTERN", multiple=True, help="Files to leave out, as in .gitignore. Repeatable.")
@option("--env", metavar="NAME[=VALUE]", multiple=True, help=ENV)
@option("--name", help="Submission id.  [default: the script's name with a random number]")
@option("--follow/--no-follow", show_default=False, help="Show the job's log until it ends, also across lost connections.")
@option("--retries", type=number(NonNegativeInt), metavar="N", default=0, help=RETRIES)
@option("--reconnect", "reconnect_s", type=number(PositiveFloat), metavar="SECONDS", default=600.0, help=RECONNECT)
@option("--attach", metavar="ID", help="Instead of a script: submission id of an earlier job, to follow it.")
def submit(
    words: tuple[str, ...],
    address: str | None,
    follow: bool,
    retries: int,
    reconnect_s: float,
    attach: str | None,
    name: str | None,
    **files: Any,
) -> int:
    """Run a job script on a cluster.

    As `ray job submit`, but says what is uploaded, passes variables on, and says how the job ended:

    \b
      raytrain submit jobs/digits.py --address http://HOST:8265 --follow --run.workers 4:64 --lr 0.2

    Reads the flags below; all other flags after the script, and everything after `--`, are the job's. The job runs in a copy
    of the working directory, without the files that .gitignore and .rayignore name, version control, virtual environments,
    caches, and the folders runs and data. A warning names left-out files that the script mentions. Storage and data belong
    where all nodes can reach them.

    The job gets the variables NCCL_*, GLOO_*, TORCH_*, OMP_* and the like of this shell, those of --run.forward-env and
    --env. Their values are never shown here, but Ray keeps them: whoever sees the cluster's jobs or logs can see them.

    For a cluster that requires a token, set RAY_AUTH_MODE=token, with RAY_AUTH_TOKEN or ~/.ray/auth_token.

    Exit code: 0 submitted, 2 wrong use; with --follow that of the job: 0 succeeded, the driver's own if it failed (1 if it
    is not known, or the cluster was lost), 143 stopped by somebody, as if by SIGTERM. Ctrl-C leaves the job running: 130.
    """
    _check(words, attach, name, retries, follow)
    job = None if attach else _job(words[0], words[1:], name, **files)
    if address:
        os.environ["RAY_API_SERVER_ADDRESS"] = address  # which Ray's client prefers to the flag
    from raytrain.cluster.submit.jobs import connect

    address = address or os.environ.get("RAY_API_SERVER_ADDRESS") or os.environ.get("RAY_ADDRESS")
    jobs = connect(address)
    if job is not None:
        jobs.submit(job)
        say(f"submitted {job.name}\n{_next_steps(job.name, address, follow)}")
    elif attach:
        _check_known(jobs, attach)
    followed = attach if job is None else job.name if follow else None
    return _follow(jobs, job, followed, retries, reconnect_s, address) if followed else 0


def _check(words: tuple[str, ...], attach: str | None, name: str | None, retries: int, follow: bool) -> None:
    if words and words[0].startswith("-"):
        rule = "is one of the flags of submit; those of the job come after its script"
        raise unknown_name(words[0].partition("=")[0], flags_of(submit), rule)
    if bool(words) == bool(attach):
        value = "both" if words else "neither"
        raise ConfigError("SCRIPT, --attach", value, "one of them is given", "see raytrain submit --help")
    if retries and not follow:
        raise ConfigError("--retries", retries, "only a job that is followed is submitted again", "add --follow")
    if not re.fullmatch(r"[\w.-]*", name or "", re.ASCII):
        raise ConfigError("--name", name, "is letters, digits, '-', '_' and '.'", "choose a name like digits-1")


def _job(
    script: str,
    arguments: tuple[str, ...],
    name: str | None,
    *,
    working_dir: str,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    env: tuple[str, ...],
) -> Job:
    """The job to submit; says what is uploaded."""
    from raytrain.cluster.submit.jobs import Job, forwarded_env
    from raytrain.cluster.submit.upload import check_size, list_upload, script_below

    root = Path(working_dir).expanduser().absolute()
    honours_gitignore = os.environ.get("RAY_RUNTIME_ENV_IGNORE_GITIGNORE", "0") != "1"
    upload = list_upload(root, exclude, include, honours_gitignore)
    script = script_below(upload, script)
    given = forwarded_env(os.environ, env, arguments, str(Path.cwd()))
    for line in upload.summary():
        say(line)
    say(f"variables: {', '.join(sorted(given))}")
    check_size(upload)
    runtime_env = {"working_dir": str(root), "excludes": upload.excludes, "env_vars": given}
    return Job(
        name or f"{Path(script).stem}-{uuid.uuid4().hex[:8]}", shlex.join(["python", script, *arguments]), runtime_env
    )


def _check_known(jobs: Jobs, name: str) -> None:
    from raytrain.cluster.submit.jobs import UnknownJobError

    try:
        jobs.state(name)
    except UnknownJobError as error:
        rule = "is the submission id of a job that the cluster knows"
        raise ConfigError("--attach", f"{name}: {error}", rule, "ray job list shows those") from None


def _follow(jobs: Jobs, job: Job | None, name: str, retries: int, reconnect_s: float, address: str | None) -> int:
    from raytrain.cluster.submit.follow import JobRunner

    campaign = JobRunner(jobs, name, job, retries, reconnect_s, say, say)
    try:
        return campaign.run()
    except KeyboardInterrupt:
        say(f"\n{campaign.name} keeps running\n{_next_steps(campaign.name, address)}")
        return 130


def _next_steps(name: str, address: str | None, is_followed: bool = False) -> str:
    where = f" --address {without_password(address)}" if address else ""
    follow = "" if is_followed else f"  follow: raytrain submit --attach {name}{where}\n"
    return f"{follow}  stop:   ray job stop {name}{where}"


def without_password(address: str) -> str:
    """An address that may be shown: 'http://me:secret@host:8265' -> 'http://me:***@host:8265'."""
    return re.sub(r"(?<=://)([^/@:]*):[^/@]*@", r"\1:***@", address)
