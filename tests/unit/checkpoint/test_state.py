"""R9: the full state as files that open without raytrain, and back so that training goes on as if nothing had been."""

from __future__ import annotations

import io
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedules

from raytrain.checkpoint.state import MODEL, STATE, restore, restore_bytes, snapshot
from raytrain.errors import CheckpointError, ResumeError

MODEL_SOURCE = """
from torch import nn
class Net(nn.Module):
    '''A body with BatchNorm, and a head tied to the embedding.'''
    def __init__(self, width=4):
        super().__init__()
        self.embedding = nn.Embedding(6, width)
        self.body = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width))
        self.head = nn.Linear(width, 6, bias=False)
        self.head.weight = self.embedding.weight
    def forward(self, tokens):
        return self.head(self.body(self.embedding(tokens)))
"""
_names: dict[str, Any] = {}
exec(MODEL_SOURCE, _names)
Net: type[nn.Module] = _names["Net"]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "tensor_lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
}
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], schedules.LRScheduler | None]] = {
    "none": lambda o: None,
    "lambda": lambda o: schedules.LambdaLR(o, lambda step: 0.9**step),
    "lambda_numpy": lambda o: schedules.LambdaLR(o, lambda step: np.cos(step / 10)),
    "one_cycle": lambda o: schedules.OneCycleLR(o, max_lr=0.2, total_steps=20),
    "cosine": lambda o: schedules.CosineAnnealingLR(o, T_max=20),
    "multi_step": lambda o: schedules.MultiStepLR(o, milestones=[3, 6, 6]),
    "sequential": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, 0.1, total_iters=4), schedules.CosineAnnealingLR(o, 16)], milestones=[4]
    ),
    "chained": lambda o: schedules.ChainedScheduler([schedules.ConstantLR(o, 0.5, 6), schedules.ExponentialLR(o, 0.9)]),
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Such small tensors gain nothing from threads, and lose much on a busy machine."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


class Training:
    """A model in training, on rows that depend on the step alone."""

    def __init__(self, optimizer: str = "sgd", scheduler: str = "none", seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = Net()
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.scheduler = SCHEDULERS[scheduler](self.optimizer)

    @property
    def parts(self) -> tuple[nn.Module, torch.optim.Optimizer, schedules.LRScheduler | None]:
        return self.model, self.optimizer, self.scheduler

    def run(self, first: int, last: int) -> None:
        for step in range(first, last):
            tokens = torch.randint(6, (8,), generator=torch.Generator().manual_seed(step))
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(tokens), tokens).backward()
            self.optimizer.step()
            if self.scheduler:
                self.scheduler.step()

    def learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])


def saved(training: Training, step: int) -> dict[str, bytes]:
    return snapshot(*training.parts, step).files()


def same(a: nn.Module, b: nn.Module) -> bool:
    pairs = zip(a.state_dict().items(), b.state_dict().items(), strict=True)
    return all(ka == kb and torch.equal(va, vb) for (ka, va), (kb, vb) in pairs)


@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize("scheduler", sorted(SCHEDULERS))
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_r9_training_goes_on_bit_equal_after_a_restore(optimizer: str, scheduler: str, in_memory: bool) -> None:
    straight = Training(optimizer, scheduler)
    straight.run(0, 5)
    taken = snapshot(*straight.parts, 5)
    resumed = Training(optimizer, scheduler, seed=1)
    restored = restore_bytes(taken.to_bytes(), *resumed.parts) if in_memory else restore(taken.files(), *resumed.parts)
    step = restored.step
    assert step == 5
    assert same(straight.model, resumed.model)
    for last in (6, 12):
        straight.run(step, last)
        resumed.run(step, last)
        step = last
        assert same(straight.model, resumed.model)
        assert straight.learning_rate() == resumed.learning_rate()


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_r9_every_optimizer_goes_on_bit_equal(optimizer: str) -> None:
    straight, resumed = Training(optimizer, "cosine"), Training(optimizer, "cosine", seed=1)
    straight.run(0, 3)
    restore(saved(straight, 3), *resumed.parts)
    straight.run(3, 8)
    resumed.run(3, 8)
    assert same(straight.model, resumed.model)


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_r9_an_optimizer_before_its_first_step_is_saved_and_restored(optimizer: str) -> None:
    fresh, other = Training(optimizer, "lambda"), Training(optimizer, "lambda", seed=1)
    assert restore(saved(fresh, 0), *other.parts).step == 0
    fresh.run(0, 3)
    other.run(0, 3)
    assert same(fresh.model, other.model)


def test_r9_a_restore_also_undoes_steps_of_a_live_state() -> None:
    training = Training("sgd", "one_cycle")
    training.run(0, 3)
    files = saved(training, 3)
    training.run(3, 6)
    after = {key: value.clone() for key, value in training.model.state_dict().items()}
    parameters = list(training.model.parameters())
    restore(files, *training.parts)
    assert all(a is b for a, b in zip(parameters, training.model.parameters(), strict=True))
    training.run(3, 6)
    assert all(torch.equal(after[key], value) for key, value in training.model.state_dict().items())


class Runs:
    """When it is unpickled, a file appears."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    mark, training = tmp_path / "mark", Training()
    planted = io.BytesIO()
    torch.save({"optimizer": Runs(mark)}, planted)
    planted.seek(0)
    torch.load(planted, weights_only=False)
    assert mark.exists(), "it would be run by a load that is not careful"
    mark.unlink()
    with pytest.raises(CheckpointError, match="is not opened"):
        restore(saved(training, 0) | {STATE: planted.getvalue()}, *training.parts)
    assert not mark.exists()


def test_r9_the_files_open_in_a_bare_script(tmp_path: Path) -> None:
    training = Training("adamw", "sequential")
    training.run(0, 3)
    for name, data in saved(training, 3).items():
        (tmp_path / name).write_bytes(data)
    script = f"""{MODEL_SOURCE}
import torch, sys
from safetensors.torch import load_file
model = Net()
model.load_state_dict(load_file("{MODEL}"), strict=True)
state = torch.load("{STATE}")
optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
optimizer.load_state_dict(state["optimizer"])
assert "raytrain" not in sys.modules
print(state["step"], optimizer.param_groups[0]["lr"], model.head.weight.sum().item(), sorted(state))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120
    )
    expected = training.model.get_parameter("head.weight").sum().item()
    keys = ["exponents", "kinds", "model_extra", "optimizer", "scheduler", "step"]
    assert done.stdout == f"3 {training.learning_rate()} {expected} {keys}\n"


def test_r9_tied_weights_are_all_kept_with_memory_of_their_own() -> None:
    taken = snapshot(*Training().parts, 0)
    tied = taken.model["head.weight"], taken.model["embedding.weight"]
    assert torch.equal(*tied)
    assert tied[0].data_ptr() != tied[1].data_ptr()
    restored = Training(seed=1)
    restore(taken.files(), *restored.parts)
    assert restored.model.head.weight is restored.model.embedding.weight


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else []
    return [tensor for item in items for tensor in tensors_in(item)]


def test_a_snapshot_does_not_change_while_training_goes_on() -> None:
    training = Training("tensor_lr", "one_cycle")
    training.run(0, 2)
    taken = snapshot(*training.parts, 2)
    before = taken.files()
    live = {tensor.data_ptr() for tensor in tensors_in([m.state_dict() for m in training.parts if m is not None])}
    training.run(2, 5)
    assert taken.files() == before
    assert not live & {tensor.data_ptr() for tensor in tensors_in([taken.model, taken.rest])}
    assert taken.seconds > 0


def test_tensors_that_are_views_or_not_contiguous_are_saved_whole() -> None:
    model = nn.Module()
    base = torch.arange(12.0).reshape(3, 4)
    model.register_buffer("turned", base.t())
    model.register_buffer("part", base[1])
    model.register_buffer("scalar", torch.tensor(True))
    model.register_buffer("empty", torch.zeros(0, 3, dtype=torch.bfloat16))
    model.weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    files = snapshot(model, optimizer, None, 0).files()
    assert len(files[MODEL]) < 1000
    base.zero_()
    restore(files, model, optimizer, None)
    assert torch.equal(model.get_buffer("turned")[:, 1], torch.arange(4.0, 8.0))


def test_extra_state_of_a_module_is_saved_too() -> None:
    class Counting(nn.Linear):
        seen = 0

        def get_extra_state(self) -> dict[str, int]:
            return {"seen": self.seen}

        def set_extra_state(self, state: dict[str, int]) -> None:
            self.seen = state["seen"]

    one, other = Counting(2, 2), Counting(2, 2)
    one.seen = 7
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (one, other)]
    restore(snapshot(one, optimizers[0], None, 0).files(), other, optimizers[1], None)
    assert other.seen == 7


class Opaque:
    pass


def test_r9_a_value_that_plain_torch_load_would_refuse_is_named() -> None:
    training = Training()
    training.optimizer.param_groups[0]["helper"] = [1, Opaque()]
    with pytest.raises(CheckpointError, match=r"optimizer\.param_groups\[0\]\.helper\[1\] is a .*Opaque"):
        saved(training, 0)
    with pytest.raises(CheckpointError, match="Opaque"):
        snapshot(*training.parts, 0).to_bytes()


def test_a_dtype_that_safetensors_does_not_know_is_named() -> None:
    model = nn.Linear(1, 1)
    model.register_buffer("phase", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(CheckpointError, match=r"torch\.complex128, the type of phase"):
        snapshot(model, torch.optim.SGD(model.parameters(), lr=0.1), None, 0).files()


def test_r10_a_model_that_differs_is_refused_by_key_and_stays_as_it_was() -> None:
    files = saved(Training(), 3)
    other = Training(seed=1)
    other.model.body[0] = nn.Linear(4, 4, bias=False)
    other.model.body[1] = nn.BatchNorm1d(4).double()
    other.model.register_buffer("added", torch.zeros(1))
    before = {key: value.clone() for key, value in other.model.state_dict().items()}
    with pytest.raises(ResumeError) as caught:
        restore(files, *other.parts)
    error = caught.value
    assert error.where == "model"
    assert "not in the checkpoint: added" in error.value
    assert "only in the checkpoint: body.0.bias" in error.value
    assert "body.1.weight (float64[4] here, float32[4] there)" in error.value
    assert "the model differs from the checkpoint's" in error.fix
    assert all(torch.equal(before[key], value) for key, value in other.model.state_dict().items())


def test_r10_a_long_list_of_keys_is_cut_with_its_number() -> None:
    small, large = nn.Linear(1, 1), nn.Sequential(*[nn.Linear(1, 1) for _ in range(4)])
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (small, large)]
    with pytest.raises(ResumeError, match="and 3 more"):
        restore(snapshot(small, optimizers[0], None, 0).files(), large, optimizers[1], None)


@pytest.mark.parametrize(
    ("optimizer", "scheduler", "where", "value"),
    [
        ("adamw", "cosine", "optimizer", "AdamW here, SGD in the checkpoint"),
        ("sgd", "one_cycle", "scheduler", "OneCycleLR here, CosineAnnealingLR in the checkpoint"),
        ("sgd", "none", "scheduler", "none here, CosineAnnealingLR in the checkpoint"),
    ],
)
def test_r10_another_optimizer_or_scheduler_is_refused(optimizer: str, scheduler: str, where: str, value: str) -> None:
    other = Training(optimizer, scheduler, seed=1)
    before = {key: tensor.clone() for key, tensor in other.model.state_dict().items()}
    with pytest.raises(ResumeError) as caught:
        restore(saved(Training("sgd", "cosine"), 0), *other.parts)
    assert (caught.value.where, caught.value.value) == (where, value)
    assert all(torch.equal(before[key], tensor) for key, tensor in other.model.state_dict().items())


def test_r10_other_parameter_groups_are_refused() -> None:
    training, other = Training(), Training(seed=1)
    groups = [{"params": [p], "lr": 0.1} for p in other.model.parameters()]
    with pytest.raises(ResumeError, match="parameter group"):
        restore(saved(training, 0), other.model, torch.optim.SGD(groups, momentum=0.9), None)


def test_a_missing_file_is_named() -> None:
    files = saved(Training(), 0)
    del files[STATE]
    with pytest.raises(CheckpointError, match=r"state\.pt is missing: the checkpoint has only model\.safetensors"):
        restore(files, *Training().parts)


def test_values_that_are_not_finite_survive() -> None:
    training, other = Training(), Training(seed=1)
    with torch.no_grad():
        training.model.get_parameter("body.0.bias")[:2] = torch.tensor([math.nan, -math.inf])
    restore(saved(training, 0), *other.parts)
    bias = other.model.get_parameter("body.0.bias")
    assert bias[0].isnan()
    assert bias[1] == -math.inf
