"""`raytrain audit`: did a run train on each row exactly once? Reads the run's directory; needs no cluster."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field
from pydantic_settings import CliPositionalArg, CliToggleFlag

from raytrain.errors import StorageError

if TYPE_CHECKING:
    from raytrain.rundir import RunDir


class Audit(BaseModel):
    """Prove from a run's record that each row was trained on once, in its planned step.

    The run must have been started with --run.audit.
    Exit code: 0 passed, 1 failed, 2 wrong use.
    """

    model_config = ConfigDict(use_attribute_docstrings=True)

    run_dir: CliPositionalArg[str]
    """Directory of the run, a path or a URI: its storage, then its name, for example runs/digits."""
    as_json: CliToggleFlag[bool] = Field(False, alias="json")
    """Write the report as JSON."""

    def cli_cmd(self) -> None:
        """Writes the report to stdout.

        Raises:
            SystemExit: with code 1, where the audit failed.
            FourPartError: there is nothing to audit.
        """
        from raytrain.report.audit import audit

        report = audit(run_dir_at(self.run_dir))
        lines = [json.dumps(report.to_json(), indent=1)] if self.as_json else report.lines()
        sys.stdout.write("\n".join(lines) + "\n")
        if not report.passed:
            raise SystemExit(1)


def run_dir_at(text: str) -> RunDir:
    """The run's directory from a path or URI, `<storage>/<name>`; a URI's options (`?region=...`) stay with it.

    Raises:
        StorageError: a URI that pyarrow does not know.
    """
    from raytrain.rundir import RunDir

    is_uri = "://" in text
    location, mark, options = text.partition("?") if is_uri else (os.path.abspath(os.path.expanduser(text)), "", "")
    storage, _, name = location.rstrip("/").rpartition("/")
    try:
        return RunDir.at((storage or "/") + mark + options, name)
    except (ValueError, OSError) as error:
        rule = "is a path, or a URI such as s3://bucket/runs/digits"
        raise StorageError(text, str(error), rule, "check how it is written") from None
