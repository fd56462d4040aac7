"""R9: the state as files that open without raytrain, and restored so that training continues bit-equal."""

from __future__ import annotations

import copy
import io
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

from raytrain.checkpoint.state import MODEL, STATE, HostMemory, Snapshot, live_state, load_live_state, restore, snapshot
from raytrain.errors import CheckpointError, ResumeError, UnsavableError

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

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p, lr=0.1: torch.optim.SGD(p, lr=lr, momentum=0.9),
    "adamw": lambda p, lr=0.01: torch.optim.AdamW(p, lr=lr),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "tensor_lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
}
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
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
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


class Training:
    """A model in training, on rows that depend only on the step."""

    def __init__(self, optimizer: str = "sgd", scheduler: str = "none", seed: int = 0, **settings: float) -> None:
        torch.manual_seed(seed)
        self.model = Net()
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters(), **settings)
        self.scheduler = SCHEDULERS[scheduler](self.optimizer)

    @property
    def parts(self) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        return self.model, self.optimizer, self.scheduler

    def run(self, first: int, last: int) -> Training:
        for step in range(first, last):
            tokens = torch.randint(6, (8,), generator=torch.Generator().manual_seed(step))
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(tokens), tokens).backward()
            self.optimizer.step()
            if self.scheduler:
                self.scheduler.step()
        return self

    def weights(self) -> dict[str, Tensor]:
        return {key: value.clone() for key, value in self.model.state_dict().items()}

    def settings(self) -> list[dict[str, Any]]:
        groups = self.optimizer.param_groups
        return [{name: value for name, value in group.items() if name != "params"} for group in groups]


def saved(training: Training, step: int) -> dict[str, bytes]:
    return snapshot(*training.parts, step).files()


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(value, b[key]) for key, value in a.items())


PAIRS = [(name, "cosine") for name in OPTIMIZERS] + [("adamw", name) for name in SCHEDULERS if name != "cosine"]


@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize("done", [0, 5])
@pytest.mark.parametrize(("optimizer", "scheduler"), PAIRS)
def test_r9_training_continues_bit_equal(optimizer: str, scheduler: str, done: int, in_memory: bool) -> None:
    straight = Training(optimizer, scheduler).run(0, done)
    taken, resumed = snapshot(*straight.parts, done), Training(optimizer, scheduler, seed=1).run(0, 2)
    if in_memory:
        restored = load_live_state(copy.deepcopy(live_state(*straight.parts, done)), *resumed.parts)
    else:
        restored = restore(taken.files(), *resumed.parts)
    assert restored.step == done
    assert snapshot(*resumed.parts, done).files() == taken.files(), "equal states have equal bytes"
    straight.run(done, 8)
    resumed.run(done, 8)
    assert same(straight.weights(), resumed.weights())
    assert straight.settings() == resumed.settings()


class Planted:
    """Creates a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    mark, training, planted = tmp_path / "mark", Training(), io.BytesIO()
    torch.save({"optimizer": Planted(mark)}, planted)
    torch.load(io.BytesIO(planted.getvalue()), weights_only=False)
    assert mark.exists(), "an unsafe load runs it"
    mark.unlink()
    with pytest.raises(CheckpointError, match="is not loaded"):
        restore(saved(training, 0) | {STATE: planted.getvalue()}, *training.parts)
    assert not mark.exists()


def test_r9_the_files_open_in_a_bare_script(tmp_path: Path) -> None:
    training = Training("adamw", "sequential").run(0, 3)
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
    command = [sys.executable, "-c", script]
    out = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120).stdout
    expected = training.model.get_parameter("head.weight").sum().item()
    keys = ["extra", "kinds", "model_extra", "optimizer", "scheduler", "step"]
    assert out == f"3 {training.settings()[0]['lr']} {expected} {keys}\n"


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else []
    return [tensor for item in items for tensor in tensors_in(item)]


def test_a_snapshot_shares_no_memory_with_the_live_state_and_keeps_tied_weights() -> None:
    training = Training("tensor_lr", "one_cycle").run(0, 2)
    taken = snapshot(*training.parts, 2)
    before, copies = taken.files(), tensors_in([taken.model, taken.rest])
    live = {tensor.data_ptr() for tensor in tensors_in([part.state_dict() for part in training.parts])}
    training.run(2, 5)
    assert taken.files() == before
    assert not live & {tensor.data_ptr() for tensor in copies}
    assert taken.seconds > 0
    assert torch.equal(taken.model["head.weight"], taken.model["embedding.weight"])
    assert taken.model["head.weight"].data_ptr() != taken.model["embedding.weight"].data_ptr()


def test_a_snapshot_reuses_the_memory_of_a_released_one_and_only_of_that() -> None:
    training, memory = Training("tensor_lr", "one_cycle").run(0, 2), HostMemory()
    first = snapshot(*training.parts, 2, memory=memory)
    places, before = places_of(first), first.files()
    second = snapshot(*training.run(2, 3).parts, 3, memory=memory)
    assert not places & places_of(second), "the first one is still being written"
    assert first.files() == before
    first.release()
    third = snapshot(*training.run(3, 4).parts, 4, memory=memory)
    assert places_of(third) == places
    assert third.files() == snapshot(*training.parts, 4).files()
    assert not places & places_of(snapshot(*training.parts, 4, memory=memory))


def places_of(taken: Snapshot) -> set[int]:
    return {tensor.data_ptr() for tensor in tensors_in([taken.model, taken.rest])}


class Unusual(nn.Linear):
    """Has buffers that are views, empty or not finite, and an extra state."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.seen, self.base = 0, torch.arange(12.0).reshape(3, 4)
        self.register_buffer("turned", self.base.t())
        self.register_buffer("part", self.base[1])
        self.register_buffer("empty", torch.zeros(0, 3, dtype=torch.bfloat16))
        self.register_buffer("odd", torch.tensor([float("nan"), -float("inf")]))

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def test_views_empty_and_non_finite_buffers_and_extra_state_are_restored() -> None:
    one, other = Unusual(), Unusual()
    one.seen = 7
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (one, other)]
    files = snapshot(one, optimizers[0], None, 0).files()
    assert len(files[MODEL]) < 1000
    other.base.zero_(), other.odd.zero_()  # type: ignore[operator]
    restore(files, other, optimizers[1], None)
    assert torch.equal(other.get_buffer("turned")[:, 1], torch.arange(4.0, 8.0))
    assert repr(other.odd.tolist()) == "[nan, -inf]"  # type: ignore[operator]
    assert other.seen == 7


def test_r9_a_value_that_plain_torch_load_or_safetensors_would_refuse_is_named() -> None:
    training = Training()
    training.optimizer.param_groups[0]["helper"] = [1, Planted(Path())]
    with pytest.raises(UnsavableError, match=r"optimizer\.param_groups\[0\]\.helper\[1\] is a .*Planted"):
        saved(training, 0)
    with pytest.raises(CheckpointError, match="Planted"):
        snapshot(*training.parts, 0).files()
    training.model.register_buffer("phase", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(UnsavableError, match=r"phase has the dtype torch\.complex128, which safetensors does not support"):
        saved(training, 0)


def test_r10_a_different_model_is_refused_by_key_and_unchanged() -> None:
    other = Training(seed=1)
    other.model.body[0] = nn.Linear(4, 4, bias=False)  # type: ignore[index]
    other.model.body[1] = nn.BatchNorm1d(4).double()  # type: ignore[index]
    for i in range(7):
        other.model.register_buffer(f"added{i}", torch.zeros(1))
    before = other.weights()
    with pytest.raises(ResumeError) as caught:
        restore(saved(Training(), 3), *other.parts)
    assert (caught.value.where, caught.value.fix.split(",")[0]) == ("model", "restore the model of the run")
    for text in (
        "not in the checkpoint: added0, added1, added2, added3, added4 and 2 more",
        "only in the checkpoint: body.0.bias",
    ):
        assert text in caught.value.value
    assert "body.1.weight (float64[4] here, float32[4] in the checkpoint)" in caught.value.value
    assert same(before, other.weights())


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
    before = other.weights()
    with pytest.raises(ResumeError) as caught:
        restore(saved(Training("sgd", "cosine"), 0), *other.parts)
    assert (caught.value.where, caught.value.value) == (where, value)
    assert same(before, other.weights())


@pytest.mark.parametrize("keeps_settings", [False, True])
def test_r10_other_parameter_groups_or_a_missing_file_are_refused(keeps_settings: bool) -> None:
    files, model = saved(Training(), 0), Net()
    groups = [{"params": [parameter]} for parameter in model.parameters()]
    with pytest.raises(ResumeError, match="parameter group"):
        restore(files, model, torch.optim.SGD(groups, lr=0.1), None, keeps_settings)
    with pytest.raises(CheckpointError, match=r"state\.pt is missing: the checkpoint has only model\.safetensors"):
        restore({MODEL: files[MODEL]}, model, torch.optim.SGD(groups, lr=0.1), None, keeps_settings)


@pytest.mark.parametrize("scheduler", ["none", "one_cycle"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_r15_a_clone_keeps_its_own_settings_and_takes_weights_and_moments(optimizer: str, scheduler: str) -> None:
    parent = Training(optimizer, scheduler, lr=0.1).run(0, 10)
    clone, own = Training(optimizer, scheduler, seed=1, lr=0.3), Training(optimizer, scheduler, lr=0.3)
    assert restore(saved(parent, 10), *clone.parts, keeps_settings=True).step == 10
    assert same(parent.weights(), clone.weights())
    for mine, other in zip(clone.model.parameters(), parent.model.parameters(), strict=True):
        torch.testing.assert_close(clone.optimizer.state[mine], parent.optimizer.state[other])
    assert clone.settings() == own.settings(), "its schedule is advanced elsewhere"
