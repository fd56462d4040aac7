"""Two runs are identical only if everything that both recorded is equal; else the first difference is named."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from raytrain.errors import ConfigError
from raytrain.events import kinds
from raytrain.events.log import EventLog
from raytrain.report.comparison import compare
from raytrain.report.outcome import Outcome, digests
from raytrain.rundir import RunDir
from raytrain.worker.bitwise import whole_digest

PLAN = {"num_rows": 22, "chunk_rows": [9, 13], "global_batch": 5, "num_logical": 3, "seed": 7, "shuffle_window": 2}
TENSORS = {"0.weight": "a0", "0.bias": "b0", "0.weight.exp_avg": "c0", "0.bias.exp_avg": "d0"}


def digest(step: int, changed: Mapping[str, str] | None = None) -> kinds.StateDigest:
    tensors = TENSORS | dict(changed or {})
    return kinds.StateDigest(time=1.0, step=step, digest=whole_digest(tensors), tensors=tensors)


def done(first: int, *losses: float) -> kinds.StepsDone:
    ones = dict.fromkeys(("weights", "rows", "learning_rates", "finished"), [1.0] * len(losses))
    return kinds.StepsDone(time=1.0, first_step=first, losses=list(losses), **ones)  # type: ignore[arg-type]


def restored(step: int) -> kinds.StateRestored:
    return kinds.StateRestored(time=1.0, step=step, checkpoint=f"step-{step}")


def outcome(*events: kinds.Event, files: Mapping[int, Mapping[str, str]] | None = None, **metadata: Any) -> Outcome:
    losses = {e.first_step + i: loss for e in events if isinstance(e, kinds.StepsDone) for i, loss in enumerate(e.losses)}
    return Outcome("/runs/a", {"plan": PLAN, **metadata}, losses, digests(events), files or {})


LOSSES = done(0, 0.5, 0.4, 0.3, 0.2)
WHOLE = outcome(LOSSES, digest(2), digest(4))


def test_equal_runs_are_identical_through_the_last_digest_of_both() -> None:
    found = compare(WHOLE, outcome(LOSSES, digest(2), digest(4), digest(6)))
    assert (found.is_identical, found.through_step, found.digests, found.losses) == (True, 4, (2, 4), (0, 1, 2, 3))


def test_the_first_different_digest_and_its_tensors_are_named() -> None:
    other = outcome(LOSSES, digest(2), digest(4, {"0.bias.exp_avg": "d1", "0.bias": "b1"}), digest(6, {"0.weight": "a1"}))
    found = compare(outcome(LOSSES, digest(2), digest(4), digest(6)), other)
    assert not found.is_identical
    assert found.state is not None
    assert (found.state.step, found.state.equal_until, found.state.num_tensors) == (4, 2, 4)
    assert found.state.tensors == ("0.bias", "0.bias.exp_avg")
    assert found.loss is None
    more = kinds.StateDigest(time=1.0, step=2, digest="x", tensors=TENSORS | {"1.bias": "e0"})
    state = compare(outcome(digest(2)), outcome(more)).state
    assert state is not None
    assert (state.tensors, state.equal_until, state.num_tensors) == (("1.bias",), None, 5)


def test_the_first_different_loss_is_named_with_equal_digests() -> None:
    found = compare(WHOLE, outcome(done(0, 0.5, 0.4, math.nextafter(0.3, 1), 0.1), digest(2), digest(4)))
    assert (found.is_identical, found.state) == (False, None)
    assert found.loss is not None
    assert (found.loss.step, found.loss.losses) == (2, (0.3, 0.30000000000000004))


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (math.nan, math.nan, True),
        (math.inf, math.inf, True),
        (math.nan, math.inf, False),
        (0.0, -0.0, False),
        (1, 1.0, True),
    ],
)
def test_losses_are_compared_by_their_bits(one: float, other: float, equal: bool) -> None:
    assert compare(outcome(done(0, one)), outcome(done(0, other))).is_identical == equal


def test_without_digests_losses_alone_are_compared() -> None:
    found = compare(outcome(LOSSES), WHOLE)
    assert (found.is_identical, found.digests, found.own_digests, found.through_step) == (True, (), (0, 2), 4)


def test_weight_files_count_and_pickled_files_are_only_shown() -> None:
    def run(weights: str, rest: str) -> Outcome:
        return outcome(LOSSES, files={4: {"model.safetensors": weights, "state.pt": rest}})

    same = run("1", "2")
    assert compare(same, same).is_identical
    found = compare(same, run("1", "3"))
    assert found.is_identical
    assert [(file.name, file.is_equal) for file in found.files] == [("model.safetensors", True), ("state.pt", False)]
    assert not compare(same, run("0", "2")).is_identical


def test_settings_and_environments_that_can_explain_a_difference_are_named() -> None:
    run = {"precision": "fp32", "workers": [1, 1], "name": "a"}
    task = {"name": "T", "fields": {"lr": 0.1}}
    one = replace(outcome(LOSSES, run=run, task=task, num_steps=4), environment={"threads": "1"})
    run, task = run | {"precision": "bf16", "workers": [2, 2], "name": "b"}, {"name": "T", "fields": {"lr": 0.2}}
    other = replace(outcome(LOSSES, run=run, task=task, num_steps=4), environment={"threads": "1 / 2"})
    lines = ("task.fields.lr: 0.1 and 0.2", "run.precision: fp32 and bf16", "workers.threads: 1 and 1 / 2")
    assert compare(one, other).settings == lines


@pytest.mark.parametrize("other", ["bitwise", "default"])
def test_only_two_bitwise_runs_promise_equal_bits(other: str) -> None:
    runs = [outcome(LOSSES, run={"exactness": exactness}) for exactness in ("bitwise", other)]
    assert compare(*runs).is_bitwise == (other == "bitwise")


@pytest.mark.parametrize("name", list(PLAN))
def test_runs_of_different_plans_are_refused(name: str) -> None:
    other = replace(WHOLE, directory="/runs/b", metadata={"plan": PLAN | {name: 99}})
    with pytest.raises(ConfigError) as caught:
        compare(WHOLE, other)
    assert caught.value.where == "/runs/a and /runs/b"
    assert caught.value.value == f"plan.{name}: {PLAN[name]} and 99"


def test_runs_with_no_step_in_common_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        compare(WHOLE, outcome())
    assert caught.value.value == "4 finished steps and 0 finished steps"


def test_a_comparison_is_plain_json() -> None:
    found = compare(WHOLE, outcome(done(0, 0.5, math.nan), digest(2, {"0.bias": "b1"}), digest(4)))
    value = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert (value["identical"], value["through_step"]) == (False, None)
    difference = {"step": 2, "equal_until": None, "tensors": ["0.bias"], "num_tensors": 4}
    assert value["digests"] == {"compared": 2, "first_difference": difference}
    assert value["losses"] == {"compared": 2, "first_difference": {"step": 1, "losses": [0.4, "nan"]}}


def write(run_dir: RunDir, events: list[kinds.Event], plan: Mapping[str, Any] = PLAN) -> None:
    run_dir.write_json({"plan": plan}, "run.json")
    log = EventLog(run_dir)
    log.append(events)
    log.close()
