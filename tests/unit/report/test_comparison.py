"""Two runs are identical only if all that both have recorded is equal to the last bit; else it is named where they part."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raytrain.checkpoint.store import CheckpointStore
from raytrain.errors import ConfigError, StorageError
from raytrain.events import kinds
from raytrain.events.log import EventLog
from raytrain.report.comparison import compare
from raytrain.report.outcome import Outcome, conditions, digests, outcome_of
from raytrain.rundir import RunDir
from raytrain.worker.digest import whole_digest

PLAN = {"num_rows": 22, "chunk_rows": [9, 13], "global_batch": 5, "num_logical": 3, "seed": 7, "shuffle_window": 2}
TENSORS = {"0.weight": "a0", "0.bias": "b0", "0.weight.exp_avg": "c0", "0.bias.exp_avg": "d0"}


def digest(step: int, changed: Mapping[str, str] | None = None) -> kinds.StateDigest:
    tensors = TENSORS | dict(changed or {})
    return kinds.StateDigest(time=1.0, step=step, digest=whole_digest(tensors), tensors=tensors)


def done(first: int, *losses: float) -> kinds.StepsDone:
    ones = [1.0] * len(losses)
    return kinds.StepsDone(
        time=1.0,
        first_step=first,
        losses=list(losses),
        weights=ones,
        rows=[5] * len(losses),
        learning_rates=ones,
        finished=ones,
    )


def restored(step: int) -> kinds.StateRestored:
    return kinds.StateRestored(time=1.0, step=step, checkpoint=f"step-{step}")


def outcome(*events: kinds.Event, files: Mapping[int, Mapping[str, str]] | None = None, **facts: Any) -> Outcome:
    losses = {e.first_step + i: loss for e in events if isinstance(e, kinds.StepsDone) for i, loss in enumerate(e.losses)}
    return Outcome("/runs/a", {"plan": PLAN, **facts}, losses, digests(events), files or {})


LOSSES = done(0, 0.5, 0.4, 0.3, 0.2)
WHOLE = outcome(LOSSES, digest(2), digest(4))


def test_equal_runs_are_identical_through_the_last_digest_of_both() -> None:
    found = compare(WHOLE, outcome(LOSSES, digest(2), digest(4), digest(6)))
    assert (found.is_identical, found.through_step, found.digests, found.losses) == (True, 4, (2, 4), (0, 1, 2, 3))


def test_the_first_digest_that_differs_is_named_with_its_tensors_in_the_models_order() -> None:
    other = outcome(LOSSES, digest(2), digest(4, {"0.bias.exp_avg": "d1", "0.bias": "b1"}), digest(6, {"0.weight": "a1"}))
    found = compare(outcome(LOSSES, digest(2), digest(4), digest(6)), other)
    assert not found.is_identical
    assert found.state is not None
    assert (found.state.step, found.state.equal_until, found.state.num_tensors) == (4, 2, 4)
    assert found.state.tensors == ("0.bias", "0.bias.exp_avg")
    assert found.loss is None


def test_a_tensor_that_one_run_has_alone_differs() -> None:
    more = TENSORS | {"1.bias": "e0"}
    other = kinds.StateDigest(time=1.0, step=2, digest=whole_digest(more), tensors=more)
    found = compare(outcome(digest(2)), outcome(other))
    assert found.state is not None
    assert (found.state.tensors, found.state.equal_until, found.state.num_tensors) == (("1.bias",), None, 5)


def test_the_first_loss_that_differs_is_named_though_all_digests_agree() -> None:
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


def test_digests_of_undone_steps_do_not_count_and_the_newest_of_a_step_does() -> None:
    wrong = {"0.weight": "a9"}
    events = [digest(2), digest(4, wrong), digest(6, wrong), restored(2), digest(2), digest(4)]
    assert digests(events) == {2: digest(2), 4: digest(4)}
    assert digests([digest(2, wrong), digest(2)]) == {2: digest(2)}
    assert digests([digest(4), digest(2), restored(4)]) == {2: digest(2), 4: digest(4)}


def test_files_of_weights_count_and_pickled_ones_are_only_shown() -> None:
    def run(weights: str, rest: str) -> Outcome:
        return outcome(LOSSES, files={4: {"model.safetensors": weights, "state.pt": rest}})

    same = run("1", "2")
    assert compare(same, same).is_identical
    found = compare(same, run("1", "3"))
    assert found.is_identical
    assert [(file.name, file.is_equal) for file in found.files] == [("model.safetensors", True), ("state.pt", False)]
    assert not compare(same, run("0", "2")).is_identical


def test_settings_that_could_explain_a_difference_are_named() -> None:
    run = {"precision": "fp32", "workers": [1, 1], "name": "a"}
    one = outcome(LOSSES, run=run, task={"name": "T", "fields": {"lr": 0.1}}, num_steps=4, versions={"torch": "2.9"})
    more = {"run": run | {"precision": "bf16", "workers": [2, 2], "name": "b"}, "num_steps": 4, "versions": {"torch": "2.9"}}
    found = compare(one, outcome(LOSSES, task={"name": "T", "fields": {"lr": 0.2}}, **more))
    assert not found.is_bitwise
    assert found.settings == ("task.fields.lr: 0.1 and 0.2", "run.precision: fp32 and bf16")


def test_two_bitwise_runs_promise_equal_bits() -> None:
    one, other = outcome(LOSSES, run={"exactness": "bitwise"}), outcome(LOSSES, run={"exactness": "default"})
    assert compare(one, one).is_bitwise
    assert not compare(one, other).is_bitwise


def test_other_devices_and_threads_of_the_workers_are_named() -> None:
    def told(worker: str, threads: int) -> kinds.ConditionsTold:
        return kinds.ConditionsTold(time=1.0, worker=worker, device="CPU AVX2", torch="2.9", threads=threads)

    one = replace(WHOLE, conditions=conditions([told("w0", 1), told("w1", 1)]))
    other = replace(WHOLE, conditions=conditions([told("w0", 1), told("w1", 2)]))
    assert one.conditions == {"device": "CPU AVX2", "torch": "2.9", "threads": "1"}
    assert compare(one, other).settings == ("workers.threads: 1 and 1 / 2",)
    assert conditions([]) == {}


@pytest.mark.parametrize("name", list(PLAN))
def test_runs_of_different_plans_are_refused(name: str) -> None:
    other = replace(WHOLE, directory="/runs/b", facts={"plan": PLAN | {name: 99}})
    with pytest.raises(ConfigError) as caught:
        compare(WHOLE, other)
    assert caught.value.where == "/runs/a and /runs/b"
    assert caught.value.value == f"plan.{name}: {PLAN[name]} and 99"


def test_runs_with_no_step_in_common_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        compare(WHOLE, outcome())
    assert caught.value.value == "4 finished steps and 0 finished steps"


def test_as_json_a_comparison_is_plain_and_whole() -> None:
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


def test_an_outcome_is_read_without_what_was_undone(tmp_path: Path) -> None:
    run_dir = RunDir.at(str(tmp_path), "run")
    undone = [done(2, 9.0, 9.0), digest(4, {"0.bias": "b9"})]
    write(run_dir, [done(0, 0.5, math.nan), digest(2), *undone, restored(2), done(2, 0.3), digest(3)])
    CheckpointStore(run_dir).write(2, {"model.safetensors": b"abc"}, {}, {})
    found = outcome_of(run_dir)
    assert [repr(loss) for loss in found.losses.values()] == ["0.5", "nan", "0.3"]
    assert found.digests == {2: digest(2), 3: digest(3)}
    assert found.files[2]["model.safetensors"].startswith("ba7816bf")


@pytest.mark.parametrize("content", [None, "{", "[]", "{}"])
def test_a_directory_without_a_plan_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    with pytest.raises(StorageError, match=r"run\.json"):
        outcome_of(RunDir.at(str(tmp_path.parent), tmp_path.name))


def test_a_log_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    run_dir = RunDir.at(str(tmp_path), "run")
    write(run_dir, [LOSSES])
    Path(run_dir.child("events.jsonl")).unlink()
    Path(run_dir.child("events.jsonl")).mkdir()
    with pytest.raises(StorageError, match=r"events\.jsonl"):
        outcome_of(run_dir)
