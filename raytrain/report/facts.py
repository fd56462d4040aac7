"""What did a run write about itself when it was started? `run.json`, for whoever judges the run afterwards."""

from __future__ import annotations

from typing import Any

from raytrain.errors import StorageError
from raytrain.rundir import RUN, RunDir


def facts_of(run_dir: RunDir) -> dict[str, Any]:
    """The content of `run.json`, which has a plan.

    Raises:
        StorageError: there is no run, or the file cannot be read, or says something else.
    """
    try:
        facts = run_dir.read_json(RUN)
    except (FileNotFoundError, NotADirectoryError):
        rule, fix = f"a run's directory holds {RUN}", "give the directory of a run: its storage, then its name"
        raise StorageError(run_dir.path, f"no {RUN}", rule, fix) from None
    except ValueError as error:
        raise not_as_written(run_dir, f"not JSON: {error}") from None
    except OSError as error:
        raise not_as_written(run_dir, str(error)) from None
    if not isinstance(facts, dict) or not isinstance(facts.get("plan"), dict):
        raise not_as_written(run_dir, "no plan")
    return facts


def not_as_written(run_dir: RunDir, found: str) -> StorageError:
    """The error for a `run.json` that is not what a run writes."""
    rule = "holds the plan that the run was started with"
    return StorageError(run_dir.child(RUN), found, rule, "bring back the file that the run wrote, or run again")
