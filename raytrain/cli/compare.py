"""`raytrain compare`: did two runs come to the same result, to the last bit? Reads their directories; needs no cluster."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field
from pydantic_settings import CliPositionalArg, CliToggleFlag

from raytrain.cli.audit import run_dir_at

if TYPE_CHECKING:
    from raytrain.report.comparison import Comparison

SHOWN_NAMES = 5


class Compare(BaseModel):
    """Show whether two runs came to the same result, to the last bit, or where they part.

    Compares the loss of each step, the files of checkpoints, and digests of weights
    and optimizer where both runs have recorded them (--run.digest every:N).
    The runs have the same data, seed and batch; their workers may differ.
    Exit code: 0 identical as far as is known, 1 they differ, 2 wrong use.
    """

    model_config = ConfigDict(use_attribute_docstrings=True)

    run_dir: CliPositionalArg[str]
    """Directory of a run, a path or a URI: its storage, then its name, for example runs/digits."""
    other_dir: CliPositionalArg[str]
    """Directory of the run to compare it with."""
    as_json: CliToggleFlag[bool] = Field(False, alias="json")
    """Write the comparison as JSON."""

    def cli_cmd(self) -> None:
        """Writes the comparison to stdout.

        Raises:
            SystemExit: with code 1, where the runs differ.
            FourPartError: there is nothing to compare.
        """
        from raytrain.report.comparison import compare
        from raytrain.report.outcome import outcome_of

        found = compare(outcome_of(run_dir_at(self.run_dir)), outcome_of(run_dir_at(self.other_dir)))
        shown = [json.dumps(found.to_json(), indent=1)] if self.as_json else lines(found)
        sys.stdout.write("\n".join(shown) + "\n")
        if not found.is_identical:
            raise SystemExit(1)


def lines(found: Comparison) -> list[str]:
    """The comparison for people."""
    return [
        f"compare {_verdict(found)}: {found.runs[0]} and {found.runs[1]}",
        *_part("digests", _digest_words(found)),
        *_part("losses", _loss_words(found)),
        *_part("files", _file_words(found)),
        *_part("settings", [] if found.is_identical else _setting_words(found)),
    ]


def _verdict(found: Comparison) -> str:
    from raytrain.events.words import count_of

    if found.is_identical:
        return f"identical through step {found.through_step}{'' if found.digests else ', as far as is known'}"
    if found.state:
        return f"DIFFERENT after {count_of(found.state.step, 'step')}"
    return f"DIFFERENT in the loss of step {found.loss.step}" if found.loss else "DIFFERENT in saved weights"


def _digest_words(found: Comparison) -> list[str]:
    from raytrain.events.words import count_of

    if not found.digests:
        have = " and ".join(map(str, found.own_digests))
        how = "run both with --run.digest every:N to compare weights and optimizer bit by bit"
        return [f"none of the same step ({have} in all): only losses and files were compared", how]
    compared, state = f"{len(found.digests)} compared", found.state
    if state is None:
        return [f"{compared}, all equal; the last after {count_of(found.digests[-1], 'step')}"]
    before = "none before it" if state.equal_until is None else f"equal after {count_of(state.equal_until, 'step')}"
    return [
        f"{compared}; the first that differs is after {count_of(state.step, 'step')}, {before}",
        f"{len(state.tensors)} of {count_of(state.num_tensors, 'tensor')} differ: {_some(state.tensors)}",
    ]


def _loss_words(found: Comparison) -> list[str]:
    if not found.losses:
        return ["none of the same step"]
    if found.loss is None:
        return [f"{len(found.losses)} compared, all equal to the last bit"]
    step, (one, other) = found.loss.step, found.loss.losses
    return [f"{len(found.losses)} compared; the first that differs is in step {step} (from 0): {one!r} and {other!r}"]


def _file_words(found: Comparison) -> list[str]:
    if not found.files:
        return ["no checkpoints of the same step"]
    compared, other = f"{len(found.files)} of checkpoints compared", [file for file in found.files if not file.is_equal]
    if not other:
        return [f"{compared}, all equal"]
    text = f"{compared}; different: {_some([f'{file.name} of step {file.step}' for file in other])}"
    note = "such files may differ in form alone, so they do not count"
    return [text] if any(file.is_proof for file in other) else [text, note]


def _setting_words(found: Comparison) -> list[str]:
    note = "without run.exactness bitwise, the number of workers changes the last bits of sums"
    return [*(found.settings or ["no difference that could explain it"]), *([] if found.is_bitwise else [note])]


def _part(title: str, words: Sequence[str]) -> list[str]:
    return [f"  {title if i == 0 else '':<9} {text}" for i, text in enumerate(words)]


def _some(names: Sequence[str]) -> str:
    more = len(names) - SHOWN_NAMES
    return ", ".join(names[:SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")
