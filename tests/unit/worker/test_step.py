"""One optimizer step: its gradient, its commit, and what may go wrong in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from raytrain.checkpoint.store import CheckpointStore
from raytrain.config import RunConfig
from raytrain.data.loader import Batch, MicroBatch
from raytrain.errors import TaskError
from raytrain.rendezvous.health import REDUCING, WAITING
from raytrain.rendezvous.state import Signals
from raytrain.worker.bitwise import value_digest
from raytrain.worker.failures import PeerLost, peer_loss
from raytrain.worker.group import Group
from raytrain.worker.handover import digest_of
from raytrain.worker.state import TrainState, build_state
from raytrain.worker.step import IN_BACKWARD, IN_LOSS, IN_OPTIMIZER, StepResult, TrainStep, _sum, warm_up
from tests.laws.compare import assert_same, by_hand
from tests.laws.compare import settings as law_settings
from tests.support.local import Kill, LocalRun, Plot
from tests.support.tasks import NUM_ROWS, TASKS, Regression, WithBatchNorm
from tests.unit.worker.stubs import CPU, FakeHeartbeat, spec_of
from tests.unit.worker.tasks import BrokenBackward, ByMethod, Cliff, Slope, WithSpareLayer

QUIET = Signals()


class Bench:
    """A `TrainStep` in a group of one; `batches` cuts rows of the training data into micro-batches of logical workers."""

    def __init__(self, task: Any, group: Group, **settings: Any) -> None:
        self.task, spec = task, spec_of(task, **{"steps": 20} | settings)
        self.state = build_state(spec, CPU)
        warm_up(spec, self.state, CPU)
        self.state.step = 0
        self.heartbeat = FakeHeartbeat()
        self.train_step = TrainStep(spec, self.state, group, self.heartbeat)
        self.columns = task.data()["train"].take(np.arange(10))

    def micro(self, start: int, stop: int, **changed: Any) -> MicroBatch:
        columns = {name: values[start:stop].copy() for name, values in self.columns.items()} | changed
        tensors = {name: torch.as_tensor(values) for name, values in columns.items()}
        return MicroBatch(Batch(tensors), np.arange(start, stop))

    def batches(self, *cuts: list[int]) -> dict[int, list[MicroBatch]]:
        return {logical: [self.micro(start, stop) for start, stop in pairwise(cut)] for logical, cut in enumerate(cuts)}

    def run(self, batches: Any = None, rows: int = 8, pending: Signals = QUIET) -> StepResult:
        return self.train_step.run(batches or self.batches([0, 4], [4, 8]), rows, pending)

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.state.model.state_dict().items()}


Make = Callable[..., Bench]


@pytest.fixture
def bench(group: Group) -> Iterator[Make]:
    made: list[Bench] = []

    def build(task: Any, **settings: Any) -> Bench:
        made.append(Bench(task, group, **settings))
        return made[-1]

    yield build
    for one in made:
        one.train_step.close()


def final_weights(run: LocalRun) -> dict[str, torch.Tensor]:
    store = CheckpointStore(run.run_dir)
    newest = store.newest_verified()
    assert newest is not None
    return dict(safetensors.torch.load(store.read(newest, "model.safetensors")))


def local(task: Any, path: Path, num_workers: int, **settings: Any) -> LocalRun:
    defaults = {"name": "run", "workers": (1, 2), "logical_workers": 2, "global_batch": 10, "steps": 1, "seed": 5}
    return LocalRun(task, RunConfig(**defaults | settings), path, Plot(num_workers), limit_s=60)


# The gradient


def test_r4_a_step_is_that_of_plain_torch_on_all_rows(bench: Make) -> None:
    one = bench(Regression())
    model = Regression().model()
    model.load_state_dict(one.weights)
    optimizer = Regression().optimizer(model)
    whole = one.micro(0, 8).columns
    loss = Regression().loss(model, whole).mean()
    loss.backward()
    optimizer.step()
    result = one.run()
    assert result.loss == pytest.approx(float(loss.detach()), rel=1e-6)
    assert (result.weight, result.applied, one.state.step) == (8.0, True, 1)
    torch.testing.assert_close(one.weights, dict(model.state_dict()))


def test_micro_batches_and_a_logical_worker_without_rows_change_no_gradient(bench: Make) -> None:
    whole, cut, other = bench(Regression()), bench(Regression()), bench(Regression())
    whole.run()
    cut.run(cut.batches([0, 1, 4], [4, 6, 7, 8]))
    torch.testing.assert_close(cut.weights, whole.weights)
    whole.run({0: [whole.micro(0, 3)], 1: []}, rows=3)
    other.run()
    other.run({0: [other.micro(0, 3)]}, rows=3)
    assert digest_of(whole.state) == digest_of(other.state)


@pytest.mark.parametrize("clip_norm", [None, 1.0, 0.5])
@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_r4_a_norm_of_0_8_is_0_8_for_any_ranks_and_is_clipped_once(
    num_workers: int, lengths: bool, clip_norm: float | None, tmp_path: Path
) -> None:
    run = local(Slope(lengths=lengths), tmp_path, num_workers, clip_norm=clip_norm)
    steps = run.run()
    moved = -float(final_weights(run)["weight"])
    assert moved == pytest.approx(0.8 if clip_norm in (None, 1.0) else 0.5, rel=1e-5)
    assert steps[0].weight == (55 if lengths else 10)


def test_r3_a_rank_without_rows_does_not_change_a_short_last_step(tmp_path: Path) -> None:
    config = law_settings(global_batch=101, epochs=2)  # 203 rows: one row is left for the third step
    assert NUM_ROWS % 101 == 1
    run = LocalRun(TASKS["dropout"], config, tmp_path, Plot(2))
    steps = run.run()
    assert_same(run.run_dir, steps, by_hand("dropout", config))


# Edges


def test_r14_a_parameter_without_a_gradient_fails_the_run_by_name(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"does not depend on spare\.weight, spare\.bias;.*find-unused-parameters"):
        local(WithSpareLayer(), tmp_path, 2).run()


def test_r14_unused_parameters_work_with_find_unused_parameters(tmp_path: Path) -> None:
    """Also in steps in which a rank has no rows: an optimizer that decays weights must not begin to decay unused ones."""
    ends = []
    for num_workers in (1, 2):
        task, path = WithSpareLayer(), tmp_path / str(num_workers)
        run = local(task, path, num_workers, find_unused_parameters=True, global_batch=101, steps=3)
        run.run()
        ends.append(final_weights(run))
    start = build_state(spec_of(task, seed=5, steps=3), CPU).model.state_dict()
    assert torch.equal(ends[1]["spare.weight"], start["spare.weight"])
    assert not torch.equal(ends[1]["used.weight"], start["used.weight"])
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-5, atol=1e-6)


def test_r14_a_parameter_that_only_an_earlier_micro_batch_used_is_named_too(bench: Make) -> None:
    class Sometimes(WithSpareLayer):
        def loss(self, model: nn.Module, batch: Any) -> Any:
            extra = model.spare(batch["x"][:, :3]).sum(1) if batch["row"][0] == 0 else 0  # type: ignore[operator]
            return (model(batch["x"]) - batch["y"]).pow(2).sum(1) + extra

    with pytest.raises(TaskError, match=r"spare\.weight, spare\.bias"):
        bench(Sometimes()).run()


def test_r6_gradients_that_differ_in_each_attempt_end_the_run(bench: Make) -> None:
    class Growing(Slope):
        """Gradients that are a thousand times larger in each pass."""

        def loss(self, model: nn.Module, batch: Any) -> Any:
            GROWTH.append(1000.0)
            return super().loss(model, batch) * math.prod(GROWTH)

    one = bench(Growing(), exactness="bitwise")
    with pytest.raises(TaskError, match="other gradients each time"):
        one.run()


GROWTH: list[float] = []


def test_the_models_own_attributes_can_be_used(bench: Make) -> None:
    class Uses(WithSpareLayer):
        def loss(self, model: Any, batch: Any) -> Any:
            assert model.used.in_features == 12
            assert not hasattr(model, "no_such_thing")
            return (model(batch["x"]) - batch["y"]).pow(2).sum(1)

    assert bench(Uses(), find_unused_parameters=True).run().applied


@pytest.mark.parametrize(
    ("task", "texts"),
    [
        pytest.param(ByMethod(), ["loss did not call the model"], id="r14 a loss that bypasses the model's forward"),
        pytest.param(
            BrokenBackward(),
            ["ValueError: a wrong gradient", "the backward pass in the warm-up"],
            id="r16 an error in the backward pass is the user's",
        ),
    ],
)
def test_r14_r16_a_wrong_loss_is_the_users_error(task: Any, texts: list[str], bench: Make) -> None:
    with pytest.raises(TaskError) as caught:
        bench(task).run()
    assert all(text in str(caught.value) for text in texts)


def test_bf16_is_for_the_forward_pass_and_weights_stay_fp32(bench: Make) -> None:
    plain, half = bench(Regression()), bench(Regression(), precision="bf16")
    losses = plain.run().loss, half.run().loss
    assert losses[0] == pytest.approx(losses[1], rel=0.05)
    assert losses[0] != losses[1]
    assert {value.dtype for value in half.weights.values()} == {torch.float32}


# The commit


class Scheduled(WithBatchNorm):
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.1)

    def scheduler(self, optimizer: torch.optim.Optimizer, num_steps: int) -> Any:
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)


def test_r3_a_loss_that_is_not_finite_changes_only_the_step_number(bench: Make) -> None:
    one = bench(Scheduled())
    one.run()
    before, rate = digest_of(one.state), one.state.learning_rate
    bad = one.micro(4, 8, x=np.full((4, 12), np.nan, np.float32))
    result = one.run({0: [one.micro(0, 4)], 1: [bad]})
    assert not result.applied
    assert not np.isfinite(result.loss)
    assert digest_of(replace(one.state, step=one.state.step - 1)) == before
    assert (one.state.step, one.state.learning_rate) == (2, rate)
    assert one.run().applied
    assert one.state.learning_rate < rate


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_r3_a_gradient_that_is_not_finite_changes_only_the_step_number(clip_norm: float | None, bench: Make) -> None:
    one = bench(Cliff(), clip_norm=clip_norm)
    before = digest_of(one.state)
    result = one.run()
    assert (result.loss, result.applied, one.state.step) == (0.0, False, 1)
    assert digest_of(replace(one.state, step=one.state.step - 1)) == before


def everything(state: TrainState) -> dict[str, str]:
    """Digests of all that a step changes."""
    taken = state.snapshot()
    return {
        name: value_digest(value) for name, value in {**taken.model, **taken.rest, **taken.ema}.items() if name != "step"
    }


class Outgrown(WithBatchNorm):
    """A gradient that outgrows its exponent in a step whose loss is not finite, so that bitwise mode repeats the passes."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        each = super().loss(model, batch)
        return torch.where(batch["row"] >= 0, each, (each * 1e9).detach() * math.inf + each * 1e9)


@pytest.mark.parametrize("exactness", ["default", "bitwise"])
def test_a_step_that_is_skipped_leaves_every_bit_as_it_was_also_for_newcomers(exactness: str, bench: Make) -> None:
    one = bench(Outgrown(), exactness=exactness, ema_decay=0.9)
    one.run()
    before = everything(one.state)
    result = one.run({0: [one.micro(0, 4)], 1: [one.micro(4, 8, row=np.full(4, -1))]})
    assert not result.applied
    assert everything(one.state) == before
    if exactness == "bitwise":
        assert one.train_step._reducer._own_exponents() == one.train_step._reducer._sum.exponents


def test_a_run_whose_loss_is_never_finite_again_fails_and_says_since_when_and_why(bench: Make) -> None:
    one = bench(Regression(), max_skipped=3)
    last = one.run().loss
    bad = {0: [one.micro(0, 4)], 1: [one.micro(4, 8, x=np.full((4, 12), np.nan, np.float32))]}
    for _ in range(2):
        assert not one.run(bad).applied
        one.train_step.check_progress(bad)
    one.run(bad)
    with pytest.raises(
        TaskError, match=rf"3 steps in a row .* since step 1.*{last:.6g}, in step 0.*step 3: column x on rank 0"
    ):
        one.train_step.check_progress(bad)


def test_a_run_of_which_no_step_was_applied_fails_at_its_end(bench: Make) -> None:
    one = bench(Cliff(), steps=2)
    for is_last in (False, True):
        one.run()
        with pytest.raises(TaskError, match=r"no loss was finite.*gradient of weight") if is_last else nullcontext():
            one.train_step.check_progress({})


@pytest.mark.timeout(120)
@pytest.mark.parametrize("exactness", ["default", "bitwise"])
def test_a_compiled_model_is_compiled_once_and_not_again_in_a_new_group(
    exactness: str, bench: Make, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    one, plain = bench(Regression(), compile=True, exactness=exactness), bench(Regression(), exactness=exactness)
    compiled, expected = [one.run().loss, one.run().loss], [plain.run().loss for _ in range(3)]
    num_compilations = counter.frame_count
    assert num_compilations
    one.train_step.close()
    one.train_step = TrainStep(spec_of(Regression(), steps=20, exactness=exactness), one.state, group, one.heartbeat)
    assert [*compiled, one.run().loss] == pytest.approx(expected, rel=1e-6)
    assert counter.frame_count == num_compilations
    assert list(one.weights) == list(plain.weights)


class Freezing(Regression):
    def loss(self, model: Any, batch: Any) -> Any:
        model[0].requires_grad_(not (batch["row"] < 0).any())
        return super().loss(model, batch)


class Growing(Regression):
    """Writes a buffer that the first pass left alone."""

    def model(self) -> nn.Module:
        model = super().model()
        model.register_buffer("seen", torch.zeros(()))
        return model

    def loss(self, model: Any, batch: Any) -> Any:
        if (batch["row"] < 0).any():
            model.seen += 1
        return super().loss(model, batch)


@pytest.mark.parametrize(
    ("task", "message"), [(Freezing(), r"unfrozen parameters: 0\.weight"), (Growing(), "has written seen")]
)
def test_what_a_pass_changes_only_for_some_rows_is_refused_by_name(task: Any, message: str, bench: Make) -> None:
    one = bench(task)
    one.run()
    with pytest.raises(TaskError, match=message):
        one.run({0: [one.micro(0, 4)], 1: [one.micro(4, 8, row=np.full(4, -1))]})


class AddsGroup(Regression):
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
        optimizer.register_step_post_hook(lambda *_: optimizer.add_param_group({"params": [model[0].weight]}))
        return optimizer


def test_a_parameter_group_added_while_training_is_refused(bench: Make) -> None:
    with pytest.raises(TaskError, match="parameter groups of the optimizer have changed"):
        bench(AddsGroup()).run()


def test_the_imaginary_part_of_a_gradient_counts_when_it_is_checked() -> None:
    gradients = [torch.ones(2), torch.tensor([complex(1.0, math.inf)])]
    assert not _sum(gradients).to(torch.float64).isfinite()
    assert _sum(gradients[:1]).isfinite()


def test_a_schedule_moves_with_the_steps(bench: Make) -> None:
    one = bench(Scheduled())
    rates = [one.run().learning_rate for _ in range(3)]
    assert rates == pytest.approx([0.1 * (1 + np.cos(np.pi * step / 20)) / 2 for step in range(3)])


def test_signals_of_all_ranks_are_agreed_on(bench: Make) -> None:
    one = bench(Slope())
    assert one.run().signals == Signals()
    for signals in (Signals(regroup=True), Signals(regroup=True, save=True), Signals(stop=True)):
        assert one.run(pending=signals).signals == signals


def test_r6_the_activities_of_a_step_say_where_it_waits_for_others(bench: Make) -> None:
    one = bench(Slope())
    one.run(one.batches([0, 2, 4], [4, 8]))
    calls = [IN_LOSS, WAITING, IN_LOSS]  # DDP agrees on its buckets in a forward pass
    assert one.heartbeat.activities == [*calls, IN_BACKWARD, *calls, IN_BACKWARD, *calls, REDUCING, IN_OPTIMIZER]
    assert one.heartbeat.finished == [1]


class Lossy(Group):
    """Loses its peer in the n-th sum."""

    def __init__(self, group: Group, number: int) -> None:
        super().__init__(group.generation, group.rank, group.device)
        self.left = number

    def all_reduce_async(self, vector: torch.Tensor) -> Any:
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("[gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:22942")
        return super().all_reduce_async(vector)


@pytest.mark.parametrize("number", [1, 2])
def test_p2_a_step_that_loses_a_peer_can_be_repeated(number: int, bench: Make, group: Group) -> None:
    undisturbed = bench(Scheduled())
    undisturbed.run()
    lossy = Bench(Scheduled(), Lossy(group, number))
    before = digest_of(lossy.state)
    with pytest.raises(PeerLost), peer_loss():
        lossy.run()
    assert (lossy.state.step, digest_of(lossy.state)) == (0, before)
    lossy.run()
    assert digest_of(lossy.state) == digest_of(undisturbed.state)
    lossy.train_step.close()


@pytest.mark.parametrize("place", ["before reading", "before forward", "after commit"])
def test_p1_a_peer_that_dies_before_the_second_step_of_a_group_is_a_loss(place: str, tmp_path: Path) -> None:
    """DDP agrees on its buckets in the forward pass of that step, which is inside of the user's code."""
    config = law_settings(epochs=1)
    run = LocalRun(TASKS["dropout"], config, tmp_path, Plot(3, kills=[Kill("w0", place, 1)], replace=False))
    steps = run.run()
    assert_same(run.run_dir, steps, by_hand("dropout", config))
