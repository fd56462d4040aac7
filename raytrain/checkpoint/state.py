"""How is the state of a run converted to files and back? Weights as safetensors, the rest for plain `torch.load`.

A snapshot is a copy in host memory that shares nothing with the live objects: taking it blocks training, serializing it
does not. Runs in the workers' processes; never touches a filesystem.
"""

from __future__ import annotations

import io
import pickle
import sys
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from raytrain.errors import CheckpointError, ResumeError, UnsavableError

MODEL = "model.safetensors"
EMA = "ema.safetensors"
STATE = "state.pt"

_COMPILED = "_orig_mod."
"""What torch.compile puts before the names of a module's parameters."""

_LEAVES = (type(None), bool, int, float, complex, str, bytes, Tensor, torch.dtype, torch.device, torch.Size)
_MAPPINGS = (dict, OrderedDict, Counter)
_MISSING = object()


class Restored(NamedTuple):
    """The parts of a restored state that are not in model, optimizer and scheduler; see `Snapshot`."""

    step: int
    extra: dict[str, Any]
    ema: dict[str, Tensor]


@dataclass(frozen=True)
class Snapshot:
    """A host copy of the state after `step` finished steps.

    Args:
        step: number of finished steps.
        model: tensors by the keys of the bare model's `state_dict`, each contiguous and with its own memory.
        rest: "optimizer", "scheduler" (or None), "step", "kinds" (class names), "extra" (plain values and tensors of the
            worker's), and "model_extra", the entries of the model's `state_dict` that are not tensors.
        ema: averaged weights by the same keys; empty without `run.ema_decay`.
        seconds: duration of the copy.
    """

    step: int
    model: dict[str, Tensor]
    rest: dict[str, Any]
    ema: dict[str, Tensor]
    seconds: float = 0.0
    release: Callable[[], None] = lambda: None
    """Gives the memory back to the next snapshot; nobody may use this one afterwards."""

    def files(self) -> dict[str, bytes]:
        """The state as `model.safetensors` and `state.pt`, and `ema.safetensors`: the model with the averaged weights.

        Raises:
            UnsavableError: `torch.load` would refuse a value by default, or safetensors does not support a dtype.
        """
        files = {MODEL: _model_bytes(self.model), STATE: _plain_bytes(self.rest)}
        return files | ({EMA: _model_bytes({**self.model, **self.ema})} if self.ema else {})


class HostMemory:
    """The memory of a snapshot that has been saved, for the next one: new memory costs more time than the copy itself.

    A snapshot that is taken before the last one was released gets new memory.
    """

    def __init__(self) -> None:
        self._spare: dict[tuple[torch.Size, torch.dtype, bool], list[Tensor]] = {}

    def copy_of(self, state: Any) -> tuple[Any, Callable[[], None]]:
        """A copy of nested values without live tensors, and what gives its memory back, from any thread."""
        spare, self._spare = self._spare, {}
        used: dict[tuple[torch.Size, torch.dtype, bool], list[Tensor]] = {}

        def copy_tensor(tensor: Tensor) -> Tensor:
            on_gpu = tensor.is_cuda  # pinned memory makes the copies asynchronous
            key = tensor.shape, tensor.dtype, on_gpu
            found = spare.get(key)
            host = found.pop() if found else torch.empty(key[0], dtype=key[1], device="cpu", pin_memory=on_gpu)
            used.setdefault(key, []).append(host)
            return host.copy_(tensor.detach(), non_blocking=on_gpu)

        return _copy(state, copy_tensor), lambda: setattr(self, "_spare", used)


def bare_name(model: nn.Module, name: str) -> str:
    """The name of a parameter or buffer, without the names of wrappers: torch.compile's and DataParallel's."""
    outer = "module." if isinstance(model, nn.DataParallel) else ""
    return name.removeprefix(outer).replace(_COMPILED, "")


def bare_entries(model: nn.Module) -> dict[str, Any]:
    """The model's `state_dict` with names without wrappers."""
    return {bare_name(model, key): value for key, value in model.state_dict().items()}


def live_state(
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: LRScheduler | None,
    step: int,
    extra: Mapping[str, Any] | None = None,
    ema: Mapping[str, Tensor] | None = None,
) -> dict[str, Any]:
    """The state as nested plain values and the live tensors themselves; arguments as those of `snapshot`.

    Returns:
        "model", the entries of the bare model's `state_dict`, "ema", and the parts of `Snapshot.rest` but for "model_extra".
    """
    return {
        "model": bare_entries(model),
        "ema": dict(ema or {}),
        "step": step,
        "extra": dict(extra or {}),
        "kinds": _kinds(optimizer, scheduler),
        **_parts(optimizer, scheduler),
    }


def load_live_state(
    state: Mapping[str, Any], model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler | None
) -> Restored:
    """Loads what `live_state` has returned on a peer. Raises ResumeError as `restore`."""
    return _load(state["model"], state, model, optimizer, scheduler)


def snapshot(
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: LRScheduler | None,
    step: int,
    extra: Mapping[str, Any] | None = None,
    ema: Mapping[str, Tensor] | None = None,
    memory: HostMemory | None = None,
) -> Snapshot:
    """Copies the state to host memory; returns when the copy is complete.

    Args:
        model: the bare model, not wrapped in DDP.
        optimizer: its optimizer, possibly before its first step.
        scheduler: the learning rate scheduler, or None.
        step: number of finished steps.
        extra: what else belongs to the state: plain values and tensors by name.
        ema: averaged weights by the names of the bare model's parameters.
        memory: where the copy goes; new memory by default.
    """
    start = time.monotonic()
    rest, release = (memory or HostMemory()).copy_of(live_state(model, optimizer, scheduler, step, extra, ema))
    entries, averages = rest.pop("model"), rest.pop("ema")
    rest["model_extra"] = {key: value for key, value in entries.items() if not isinstance(value, Tensor)}
    if any(parameter.is_cuda for parameter in model.parameters()):
        torch.cuda.current_stream().synchronize()  # copies from a GPU are asynchronous
    tensors = {key: value for key, value in entries.items() if isinstance(value, Tensor)}
    return Snapshot(step, tensors, rest, averages, time.monotonic() - start, release)


def check_savable(model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler | None) -> None:
    """Checks, without copying a tensor, that `Snapshot.files` would accept the state.

    Raises:
        UnsavableError: it would not.
    """
    entries = model.state_dict()
    _model_bytes({key: value.new_empty(0) for key, value in entries.items() if isinstance(value, Tensor)})
    refuse_objects({key: value for key, value in entries.items() if not isinstance(value, Tensor)}, "model_extra")
    refuse_objects(_parts(optimizer, scheduler), "")


def check_restorable(model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler | None) -> None:
    """Saves and loads, in memory, the state of optimizer and scheduler, and what a model has besides tensors.

    Afterwards they have the same state. The optimizer's is small as long as it has made no step.

    Raises:
        UnsavableError: something cannot be saved, or is another value after it was loaded.
    """
    check_savable(model, optimizer, scheduler)
    saved = _open(_plain_bytes(HostMemory().copy_of(_parts(optimizer, scheduler))[0]))
    entries = model.state_dict()
    plain = {key: value for key, value in entries.items() if not isinstance(value, Tensor)}
    extra = _open(_plain_bytes(HostMemory().copy_of(plain)[0]))
    if extra:
        model.load_state_dict({**entries, **extra}, strict=True)
    _load_optimizer(optimizer, saved["optimizer"])
    if scheduler:
        scheduler.load_state_dict(saved["scheduler"])
    saved = _open(_plain_bytes(saved))  # whatever was loaded may have been changed or kept
    if lost := _lost(saved, _parts(optimizer, scheduler), ""):
        raise UnsavableError(
            lost, "has another value after it was saved and loaded", "let load_state_dict restore what state_dict returns"
        )


def restore(
    files: Mapping[str, bytes],
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: LRScheduler | None,
    keeps_settings: bool = False,
) -> Restored:
    """Loads `model.safetensors` and `state.pt` into live objects on any device.

    Args:
        keeps_settings: keep the learning rates and other settings of the live optimizer, and the scheduler as it is; load
            only the optimizer's state per parameter, such as momentum.

    Raises:
        CheckpointError: a file is missing, or contains pickled objects (their code is not run).
        ResumeError: model, optimizer or scheduler do not match; the model is unchanged.
    """
    for name in (MODEL, STATE):
        if name not in files:
            raise CheckpointError(f"{name} is missing: the checkpoint has only {', '.join(files) or 'no files'}")
    rest = _open(files[STATE]) | {"ema": safetensors.torch.load(files[EMA]) if EMA in files else {}}
    entries = {**safetensors.torch.load(files[MODEL]), **rest["model_extra"]}
    return _load(entries, rest, model, optimizer, scheduler, keeps_settings)


def _load(
    entries: Mapping[str, Any],
    rest: Mapping[str, Any],
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: LRScheduler | None,
    keeps_settings: bool = False,
) -> Restored:
    if difference := _difference(bare_entries(model), entries):
        raise _differs("model", difference, "the model has the parameters and buffers of the checkpoint")
    for role, kind in _kinds(optimizer, scheduler).items():
        if kind != rest["kinds"][role]:
            saved = rest["kinds"][role]
            raise _differs(role, f"{kind or 'none'} here, {saved or 'none'} in the checkpoint", "both have the same class")
    own = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    try:
        _load_optimizer(optimizer, rest["optimizer"])
    except ValueError as error:
        raise _differs("optimizer", str(error), "it has the parameter groups of the checkpoint's") from error
    model.load_state_dict({key: entries[bare_name(model, key)] for key in model.state_dict()}, strict=True)
    if keeps_settings:
        for group, settings in zip(optimizer.param_groups, own, strict=True):
            group.update(settings)
    if scheduler and not keeps_settings:
        scheduler.load_state_dict(rest["scheduler"])
    return Restored(int(rest["step"]), rest["extra"], rest["ema"])


def _load_optimizer(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    optimizer.load_state_dict(saved)
    _keep_types(optimizer, saved)


def _keep_types(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Undoes what `load_state_dict` has changed: it casts state to the type of its parameter, and breaks strings."""
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        for name, value in saved["state"].get(number, {}).items():
            optimizer.state[parameter][name] = _with_types(optimizer.state[parameter].get(name), value)


def _with_types(loaded: Any, saved: Any) -> Any:
    """`saved`, with its tensors on the devices of those in `loaded`."""
    if isinstance(saved, Tensor):
        return saved.to(loaded.device) if isinstance(loaded, Tensor) and loaded.dtype != saved.dtype else loaded
    if type(saved) in _MAPPINGS and type(loaded) is type(saved) and loaded.keys() == saved.keys():
        return type(saved)({key: _with_types(loaded[key], value) for key, value in saved.items()})
    if type(saved) in (list, tuple) and type(loaded) is type(saved) and len(loaded) == len(saved):
        return type(saved)(_with_types(*pair) for pair in zip(loaded, saved, strict=True))
    return saved if type(saved) is str else loaded


def _parts(optimizer: Optimizer, scheduler: LRScheduler | None) -> dict[str, Any]:
    return {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict() if scheduler else None}


def _lost(saved: Any, now: Any, where: str) -> str:
    """The path of the first saved value that is another one now; empty if there is none. There may be more values now."""
    if isinstance(saved, Mapping) and isinstance(now, Mapping):
        pairs = [(f"{where}.{key}".lstrip("."), value, now.get(key, _MISSING)) for key, value in saved.items()]
    elif isinstance(saved, list | tuple) and isinstance(now, list | tuple) and len(saved) == len(now):
        pairs = [(f"{where}[{index}]", value, other) for index, (value, other) in enumerate(zip(saved, now, strict=True))]
    elif isinstance(saved, Tensor):
        return "" if isinstance(now, Tensor) and torch.equal(saved, now.cpu()) else where
    else:
        return "" if saved == now or saved != saved else where  # noqa: PLR0124 - NaN
    return next(filter(None, (_lost(*pair[1:], pair[0]) for pair in pairs)), "")


def _copy(value: Any, copy_tensor: Callable[[Tensor], Tensor]) -> Any:
    """A copy without live tensors; numpy scalars become numbers. Other objects are kept, and refused by name later.

    Interns strings, because pickle writes the second occurrence of an object as a reference: the bytes of equal states are
    equal, restored or not.
    """
    if isinstance(value, Tensor):
        return copy_tensor(value)
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in _MAPPINGS:
        return type(value)({_copy(key, copy_tensor): _copy(item, copy_tensor) for key, item in value.items()})
    if type(value) is str:
        return sys.intern(value)
    if type(value) in (list, tuple):
        return type(value)(_copy(item, copy_tensor) for item in value)
    return value


def _model_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    try:
        return bytes(safetensors.torch.save(dict(tensors)))
    except KeyError as error:
        keys = [key for key, tensor in tensors.items() if tensor.dtype in error.args]
        what = f"has the dtype {error}, which safetensors does not support"
        raise UnsavableError(_some(keys), what, "use another dtype, or make it a non-persistent buffer") from error


def _plain_bytes(value: dict[str, Any]) -> bytes:
    refuse_objects(value, "")
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _open(data: bytes) -> dict[str, Any]:
    try:
        return dict(torch.load(io.BytesIO(data), map_location="cpu", weights_only=True))
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{STATE} contains more than tensors and plain values, and is not loaded") from error


def refuse_objects(value: Any, where: str) -> None:
    """Raises UnsavableError for a value that is neither plain nor a tensor, and names its path."""
    kind = type(value)
    if kind in _MAPPINGS:
        for key, item in value.items():
            refuse_objects(key, f"{where} key {key!r}")
            refuse_objects(item, f"{where}.{key}" if where else str(key))
    elif kind in (list, tuple):
        for index, item in enumerate(value):
            refuse_objects(item, f"{where}[{index}]")
    elif kind not in _LEAVES:
        what = f"is a {kind.__module__}.{kind.__qualname__}, which plain torch.load would refuse"
        raise UnsavableError(
            where, what, "keep it out of state_dict(): a state is tensors, numbers, strings, lists and dicts"
        )


def _kinds(optimizer: Optimizer, scheduler: LRScheduler | None) -> dict[str, str]:
    several = getattr(optimizer, "class_names", "")
    return {"optimizer": several or type(optimizer).__name__, "scheduler": type(scheduler).__name__ if scheduler else ""}


def _difference(here: Mapping[str, Any], saved: Mapping[str, Any]) -> str:
    """How the entries of a model differ from the saved ones; empty if they match."""
    parts = []
    if missing := [key for key in here if key not in saved]:
        parts.append(f"not in the checkpoint: {_some(missing)}")
    if unexpected := [key for key in saved if key not in here]:
        parts.append(f"only in the checkpoint: {_some(unexpected)}")
    pairs = [(key, _form(here[key]), _form(saved[key])) for key in here if key in saved]
    if changed := [f"{key} ({now} here, {then} in the checkpoint)" for key, now, then in pairs if now != then]:
        parts.append(f"of another dtype or shape: {_some(changed)}")
    return "; ".join(parts)


def _form(value: Any) -> str:
    if not isinstance(value, Tensor):
        return "not a tensor"
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _differs(where: str, value: str, rule: str) -> ResumeError:
    fix = f"restore the {where} of the run, or choose another run.name"
    return ResumeError(where, value, rule, fix)
