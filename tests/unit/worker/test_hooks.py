"""What the user's hooks may return, how their errors look, and what random numbers they get."""

from __future__ import annotations

import os
import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch
from ray.exceptions import RaySystemError

from raytrain.data.loader import Batch
from raytrain.data.ray_reader import RemoteError, RemoteErrors
from raytrain.errors import PACKAGE, ConfigError, InternalError, TaskError, WholeTracebacks
from raytrain.task import Loss, Task
from raytrain.worker import entry
from raytrain.worker.hooks import as_sum, autocast, on_device, own_transform, seed_everything, user_code

ROWS = 4


@pytest.mark.parametrize(
    ("answers", "total", "weight"),
    [
        ([torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor(2.5), 2.5, np.float32(2.5)], 10.0, 4),
        ([torch.tensor([True, False, True, True])], 3.0, 4),
        ([torch.tensor([3, 3, 3, 3]), torch.tensor(3), 3, np.int64(3)], 12.0, 4),
        ([torch.tensor(True), True, np.bool_(True)], 4.0, 4),
        ([Loss(torch.tensor(7.0), 3.0), Loss(torch.tensor(7.0), torch.tensor(3)), Loss(7, 3)], 7.0, 3),  # type: ignore[arg-type]
        ([Loss(np.float64(7.0), np.int64(3))], 7.0, 3),  # type: ignore[arg-type]
    ],
)
def test_r17_numbers_of_torch_numpy_and_python_are_sums_and_weights(answers: Any, total: float, weight: float) -> None:
    for answer in answers:
        got = as_sum(answer, ROWS, "loss")
        assert (float(got[0]), float(got[1])) == (total, weight), answer


ONE: Any = torch.tensor(1.0)


def test_r17_anything_else_is_refused_and_named() -> None:
    answers: dict[str, Any] = {"NoneType": None, "str": "0.5", "list": [0.5], "tuple": (ONE, 2.0), "dict": {"loss": 1.0}}
    answers |= {r"shape \(4, 1\)": torch.ones(ROWS, 1), r"shape \(3,\)": torch.ones(3), "ndarray": np.ones(ROWS)}
    answers[r"Loss\(shape \(4,\), float\)"] = Loss(torch.ones(ROWS), 4.0)
    answers[r"Loss\(shape \(\), shape \(4,\)\)"] = Loss(ONE, torch.ones(ROWS))
    answers[r"Loss\(shape \(\), str\)"] = Loss(ONE, "4")  # type: ignore[arg-type]
    answers[r"Loss\(NoneType, float\)"] = Loss(None, 4.0)  # type: ignore[arg-type]
    for got, answer in answers.items():
        with pytest.raises(TaskError, match=f"^accuracy returned {got}") as caught:
            as_sum(answer, ROWS, "accuracy")
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_the_gradient_flows_through_each_form_of_a_loss_and_not_through_its_weight() -> None:
    weight = torch.tensor(2.0, requires_grad=True)
    for answer, gradient in ((weight * torch.ones(ROWS), 4.0), (weight * 1, 4.0), (Loss(weight * 3, weight), 3.0)):
        total, count = as_sum(answer, ROWS, "loss")
        assert torch.autograd.grad(total, weight)[0] == gradient
        assert not (isinstance(count, torch.Tensor) and count.requires_grad)


def test_values_of_half_precision_are_added_up_in_single_precision() -> None:
    values = torch.full((1000,), 1.0078125, dtype=torch.bfloat16)  # exact in bfloat16, its sum is not
    total, _ = as_sum(values, 1000, "loss")
    assert float(total) == 1007.8125


def hook_that_fails() -> None:
    raise KeyError("pixels")


def test_a_users_error_starts_at_the_users_own_frame() -> None:
    with pytest.raises(TaskError) as caught, user_code("loss at step 3 on rank 1"):
        hook_that_fails()
    lines = str(caught.value).splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert os.path.basename(__file__) in lines[1]
    assert "hooks.py" not in str(caught.value).replace(os.path.basename(__file__), "")
    assert lines[-2:] == ["KeyError: 'pixels'", "raised by loss at step 3 on rank 1"]
    assert caught.value.__suppress_context__


def test_a_users_error_survives_pickling_whatever_it_holds() -> None:
    class Holds(Exception):
        def __reduce__(self) -> Any:
            raise TypeError("never pickled")

    with pytest.raises(TaskError) as caught, user_code("model"):
        raise Holds("a lock")
    assert "Holds: a lock" in str(pickle.loads(pickle.dumps(caught.value)))


def hook_that_explains() -> None:
    try:
        hook_that_fails()
    except KeyError as error:
        raise RuntimeError("no data") from error


def test_the_cause_of_a_users_error_is_shown() -> None:
    with pytest.raises(TaskError, match=r"(?s)KeyError: 'pixels'.*direct cause.*RuntimeError: no data"), user_code("data"):
        hook_that_explains()


def test_our_own_frames_are_shown_in_the_details_alone() -> None:
    """Those between frames of the task, and those of causes, too."""
    ours = compile("def through(call):\n    call()\n", f"{PACKAGE}worker/step.py", "exec")
    names: dict[str, Any] = {}
    exec(ours, names)

    def calls_us() -> None:
        try:
            names["through"](hook_that_fails)
        except KeyError:
            names["through"](hook_that_explains)

    with pytest.raises(TaskError) as caught, user_code("loss"):
        names["through"](calls_us)
    assert "worker/step.py" not in caught.value.traceback
    assert caught.value.traceback.count("in calls_us") == 2
    assert caught.value.details.count("worker/step.py") == 3


def test_an_error_in_ray_datas_process_is_shown_once_with_its_own_frames() -> None:
    def fails() -> None:
        with RemoteErrors():
            hook_that_fails()

    with pytest.raises(RemoteError) as remote:
        fails()
    with pytest.raises(TaskError) as caught, user_code("transform"):
        remote.value.reraise()
    assert caught.value.traceback.count("KeyError: 'pixels'") == 1
    assert "in hook_that_fails" in caught.value.traceback
    assert "raytrain/data" not in caught.value.traceback


def test_r16_an_unexpected_error_keeps_all_of_its_traceback() -> None:
    def deep(n: int) -> None:
        raise RuntimeError("x" * 2000 + " the last words") if n == 0 else deep(n - 1)

    with pytest.raises(InternalError, match=r"(?s)Traceback.*in deep.*the last words$") as caught, WholeTracebacks():
        deep(30)
    assert "truncated" not in str(pickle.loads(pickle.dumps(caught.value)))
    for error in (ConfigError("a", "b", "c", "d"), KeyboardInterrupt()):
        with pytest.raises(type(error)), WholeTracebacks():
            raise error


@pytest.mark.parametrize(
    ("raised", "kind"),
    [(RaySystemError(ImportError("x"), "No module named 'mine'"), TaskError), (RuntimeError("odd"), InternalError)],
)
def test_r16_a_worker_that_cannot_even_begin_says_why(
    raised: Exception, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def get(reference: Any) -> Any:
        raise raised

    monkeypatch.setattr(entry.ray, "get", get)
    with pytest.raises(kind, match=r"(?s)Traceback.*(No module named 'mine'|RuntimeError: odd)"):
        entry.run_worker({entry.CONNECTIONS: entry.Connections(None, None, None)})


def test_an_error_that_is_raytrains_own_passes() -> None:
    error = ConfigError("a", "b", "c", "d")
    with pytest.raises(ConfigError) as caught, user_code("model"):
        raise error
    assert caught.value is error


def test_a_directory_whose_name_begins_with_ours_is_not_ours() -> None:
    assert PACKAGE.endswith(f"{os.sep}raytrain{os.sep}")


def test_the_random_numbers_of_a_step_are_these_on_every_machine() -> None:
    seed_everything(5, 11, 2)
    got = [torch.rand(2).tolist(), np.random.rand(2).tolist(), [random.random(), random.random()]]
    np.testing.assert_allclose(got, GOLDEN, rtol=1e-6)


GOLDEN = [[0.502088845, 0.731867611], [0.044930034, 0.078710709], [0.141524791, 0.305959636]]


def test_r9_each_step_and_each_logical_worker_has_its_own_random_numbers() -> None:
    seen = set()
    for step in range(20):
        for logical in range(8):
            seed_everything(5, step, logical)
            seen.add((float(torch.rand(())), float(np.random.rand()), random.random()))
    for position in range(3):
        assert len({numbers[position] for numbers in seen}) == 160


def test_autocast_is_off_unless_asked_for() -> None:
    product = torch.ones(2, 2)
    with autocast("fp32", torch.device("cpu")):
        assert (product @ product).dtype == torch.float32
    with autocast("bf16", torch.device("cpu")):
        assert (product @ product).dtype == torch.bfloat16


def test_a_task_without_a_transform_of_its_own_has_none() -> None:
    class Doubles(Task):
        def transform(self, batch: Any) -> Any:
            return {name: 2 * column for name, column in batch.items()}

    assert own_transform(Task()) is None
    transform = own_transform(Doubles())
    assert transform is not None
    assert transform({"x": np.ones(1)})["x"] == 2


class OnHost:
    """A column that notes how it is copied."""

    is_pinned = False

    def pin_memory(self) -> OnHost:
        self.is_pinned = True
        return self

    def to(self, device: torch.device, non_blocking: bool) -> tuple[torch.device, bool, bool]:
        return device, non_blocking, self.is_pinned


def test_columns_are_copied_to_a_gpu_from_pinned_memory_without_waiting() -> None:
    column: Any = OnHost()
    gpu = torch.device("cuda")
    assert on_device(Batch({"x": column}), gpu)["x"] == (gpu, True, True)
    assert on_device(Batch({"x": column}), torch.device("cpu"))["x"] is column
