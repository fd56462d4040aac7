"""How does a job's command line ask for a sweep, and how does one end? `--sweep.space.NAME TEXT` makes it one.

The names of these flags are those of the task, so they are taken out before the parser sees the rest.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from raytrain.cli.flags import is_given
from raytrain.config import RunConfig
from raytrain.errors import ConfigError
from raytrain.events.words import count_of
from raytrain.sweep_config import SweepConfig
from raytrain.task import Task

if TYPE_CHECKING:
    from raytrain.tune.outcome import SweepResult
    from raytrain.tune.sweep import Sweep

SPACE = "--sweep.space."


def split_space(argv: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The texts of a space by name ("lr", "run.global_batch"), and the other arguments.

    Raises:
        ConfigError: one of these flags stands without its text.
    """
    texts: dict[str, str] = {}
    others: list[str] = []
    words = iter(argv)
    for word in words:
        if not word.startswith(SPACE):
            others.append(word)
            continue
        flag, equals, text = word.partition("=")
        text = text if equals else next(words, "--")
        if text.startswith("--"):  # a single dash may begin a number
            raise ConfigError(flag, "not given", "expected one argument", f"for example {flag} log:1e-3:1")
        texts[flag.removeprefix(SPACE).replace("-", "_")] = text
    return texts, others


def check_space(names: Collection[str], others: Sequence[str]) -> None:
    """Checks that a space and the other arguments go together.

    Args:
        names: of the space; empty if there is none.
        others: the arguments without the space.

    Raises:
        ConfigError: something is given both as a flag and in the space, or a flag for sweeps has no space.
    """
    flags = [word.partition("=")[0] for word in others if word.startswith("--sweep.")]
    if flags and not names:
        fix = f"add {SPACE}NAME, for example {SPACE}lr log:1e-3:1"
        raise ConfigError(flags[0], "given without a space", "a sweep varies at least one field or setting", fix)
    for name in names:
        if is_given(name, others):
            rule = "has one value for all trials, or those of the space"
            raise ConfigError(name, f"given, and sweep.space.{name} too", rule, "leave one of them out")


def run_sweep(
    task: type[Task], space: Mapping[str, Any], config: RunConfig, sweep: SweepConfig, fixed: Mapping[str, Any]
) -> int:
    """Runs a sweep, and shows it on stdout; its exit code: 0 complete, 1 a trial failed, 130 or 143 stopped by a signal.

    Args:
        task: the task's class.
        space: domains of Ray Tune, by the names of fields of the task and settings of the run.
        config: the run's settings that all trials share.
        sweep: the sweep's own settings.
        fixed: values of the task's other fields.
    """
    from raytrain.launch.stopping import exit_on_sigterm
    from raytrain.tune.sweep import Sweep

    with exit_on_sigterm():  # Ray, which is imported by now, has a handler that exits with another code
        result = _shown(Sweep(task, space, config=config, sweep=sweep, fixed=fixed))
    if result.outcome == "already complete":
        trials = count_of(len(result.view.trials), "trial")
        sys.stdout.write(f"{result.name}: already complete, {trials} in {result.directory}\n")
    if result.stopped_by:
        return 128 + result.stopped_by
    return 1 if result.num_failed else 0


def _shown(sweep: Sweep) -> SweepResult:
    from raytrain.console.viewer import choose_for_sweep

    viewer = choose_for_sweep(sys.stdout)
    try:
        return sweep.fit(viewer)
    finally:
        viewer.close()
