"""The user's model and optimizer: prepared, checked before the first step, and put in the modes that the task has set.

What cannot be the same for any number of workers is refused here, by name. Runs in the worker's training thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from raytrain.checkpoint.state import bare_name
from raytrain.errors import ConfigError, TaskError


def materialize(model: nn.Module, run_pass: Callable[[], object]) -> None:
    """Gives lazy modules their parameters and buffers, by one forward pass in eval mode that leaves statistics alone.

    Raises:
        ConfigError: the pass did not reach all lazy modules.
    """
    if not _lazy_names(model):
        return
    modes = modes_of(model)
    model.eval()
    with torch.no_grad():
        run_pass()
    set_modes(model, modes)
    if names := _lazy_names(model):
        rule = "lazy modules get their shapes from one call of the model in eval mode"
        fix = "call the model on an example in model(), or give the sizes"
        raise ConfigError("model, " + ", ".join(names[:3]), "not initialized", rule, fix)


def _lazy_names(model: nn.Module) -> list[str]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [name for name, tensor in tensors if torch.nn.parameter.is_lazy(tensor)]


def check_model(model: nn.Module, where: str) -> None:
    """Gives each buffer its own memory, and refuses modules whose result depends on the number of workers.

    Args:
        model: the user's.
        where: the hook that made it, for errors.

    Raises:
        ConfigError: there is nothing to train, or a module cannot be kept equal.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        rule = "has a parameter with requires_grad, since there is nothing to train otherwise"
        raise ConfigError(where, "no parameter that is trained", rule, "unfreeze a parameter")
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            rule = "statistics are those of a logical worker's rows: over all workers they would depend on their number"
            fix = "use BatchNorm, with as few logical workers as the rows of one statistic need"
            raise ConfigError(f"{where}, module {name}", "SyncBatchNorm", rule, fix)
        for key, buffer in module._buffers.items():
            if buffer is not None and 0 in buffer.stride() and buffer.numel() > 1:  # made by `expand`: cannot be loaded
                module._buffers[key] = buffer.clone(memory_format=torch.contiguous_format)


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Returns the names of the trained parameters that the optimizer does not have.

    Raises:
        ConfigError: the optimizer has parameters that are not the model's, so that nobody would reduce their gradients.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if foreign := [parameter for parameter in given if id(parameter) not in names]:
        value = f"{len(foreign)} parameters that are not the model's, the first of shape {list(foreign[0].shape)}"
        rule = "trains parameters of the model: only theirs are reduced, saved and given to new workers"
        raise ConfigError("optimizer", value, rule, "make them parameters of the module that model() returns")
    optimized = {id(parameter) for parameter in given}
    return [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in optimized]


def check_gradients(model: nn.Module, clips: bool, is_bitwise: bool) -> None:
    """Looks at the gradients of the warm-up pass.

    Raises:
        ConfigError: sparse gradients meet a setting that needs dense ones.
    """
    sparse = [name for name, p in model.named_parameters() if p.grad is not None and p.grad.layout != torch.strided]
    if not sparse or not (clips or is_bitwise):
        return
    where, value = ("run.exactness", "bitwise") if is_bitwise else ("run.clip_norm", "set")
    rule = f"needs dense gradients, and that of {sparse[0]} is sparse"
    raise ConfigError(where, value, rule, "use Embedding(..., sparse=False), or leave the setting out")


def modes_of(model: nn.Module) -> dict[nn.Module, bool]:
    """Whether each module is in train mode."""
    return {module: module.training for module in model.modules()}


def set_modes(model: nn.Module, modes: dict[nn.Module, bool]) -> None:
    """Puts the model in train mode, except for the modules that `modes` has in eval mode.

    The model's own `train` runs first, since it may keep parts in eval mode. A model that is in eval mode as a whole, as
    `from_pretrained` returns it, is meant to be trained: then all of it is in train mode.
    """
    model.train()
    if modes[model]:
        for module, is_training in modes.items():
            if not is_training:
                module.training = False


def kept_in_eval_mode(model: nn.Module, modes: dict[nn.Module, bool]) -> list[str]:
    """The names of the outermost modules that stay in eval mode while the model trains."""
    names = [name for name, module in model.named_modules() if modes[model] and not modes[module]]
    return [name for name in names if not any(name.startswith(f"{other}.") for other in names)]


def trained_names(model: nn.Module) -> list[str]:
    """The parameters with requires_grad."""
    return [bare_name(model, name) for name, parameter in model.named_parameters() if parameter.requires_grad]


def set_trained(model: nn.Module, names: list[str]) -> None:
    """Freezes and unfreezes parameters, so that exactly those with these names are trained."""
    wanted = set(names)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(bare_name(model, name) in wanted)


class Ema:
    """An exponential moving average of the model's floating-point parameters, updated after each applied step.

    Args:
        model: its parameters are where the average starts.
        decay: part of the average that is kept in an update.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._decay = decay
        self._parameters: list[Tensor] = [parameter for parameter in model.parameters() if parameter.is_floating_point()]
        self._average = [parameter.detach().clone() for parameter in self._parameters]
        numbers = {id(parameter): number for number, parameter in enumerate(self._parameters)}
        named = model.named_parameters(remove_duplicate=False)  # tied ones, too
        self._numbers = {bare_name(model, name): numbers[id(p)] for name, p in named if id(p) in numbers}

    def values(self) -> dict[str, Tensor]:
        """The averages by the names of the bare model's parameters."""
        return {name: self._average[number] for name, number in self._numbers.items()}

    def update(self) -> None:
        with torch.no_grad():
            torch._foreach_lerp_(self._average, self._parameters, 1 - self._decay)

    def load(self, values: Mapping[str, Tensor]) -> None:
        for name, number in self._numbers.items():
            self._average[number].copy_(values[name])

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """The model has the averaged weights inside of the block; its buffers stay the live ones."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for number, parameter in enumerate(self._parameters):
            parameter.data, self._average[number] = self._average[number], parameter.data


def first_not_finite(model: nn.Module, columns: dict[str, Tensor]) -> str:
    """Names a column of a batch, a parameter, a buffer or a gradient that has a value that is not finite; "" for none."""
    groups: list[tuple[str, Iterator[tuple[str, Tensor]]]] = [
        ("column", iter(columns.items())),
        ("parameter", iter(model.named_parameters())),
        ("buffer", iter(model.named_buffers())),
        ("gradient of", ((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)),
    ]
    for kind, tensors in groups:
        for name, tensor in tensors:
            is_bad = torch.isnan if kind == "buffer" else _is_not_finite  # masks are buffers, and hold -inf
            if (tensor.is_floating_point() or tensor.is_complex()) and bool(is_bad(tensor).any()):
                return f"{kind} {name}"
    return ""


def _is_not_finite(tensor: Tensor) -> Tensor:
    return tensor.isfinite().logical_not()


def check_parameter_groups(optimizer: torch.optim.Optimizer, sizes: list[int]) -> None:
    """Raises TaskError if the optimizer has other parameter groups than at the start: a newcomer could not load them."""
    if [len(group["params"]) for group in optimizer.param_groups] != sizes:
        fix = "create all groups in optimizer(), and unfreeze parameters by requires_grad"
        raise TaskError(f"the parameter groups of the optimizer have changed while it trained; {fix}", "optimizer")
