"""What else, besides the order of sums, would make two runs differ in the last bit? Switched off, or told.

Equal bits need the same kind of device, the same PyTorch, and the same number of threads, which every worker tells at its
start. All of it belongs to a worker's process, for as long as that lives.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from raytrain.errors import ConfigError
from raytrain.events.kinds import ConditionsTold

_NAME = re.compile(r"([\w:.]+) does not have a deterministic implementation")


def switch_on() -> None:
    """Only deterministic kernels from now on; call it before the first one."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def conditions(worker: str, device: torch.device) -> ConditionsTold:
    """Those under which this process computes."""
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU {torch.backends.cpu.get_cpu_capability()}"
    return ConditionsTold(worker=worker, device=kind, torch=torch.__version__, threads=torch.get_num_threads())


@contextmanager
def named_operators() -> Iterator[None]:
    """Turns PyTorch's error for an operator without a deterministic kernel into a `ConfigError`; all others pass."""
    try:
        yield
    except RuntimeError as error:
        found = _NAME.search(str(error))
        if found is None:
            raise
        rule = f"the model uses deterministic kernels only, and {found[1]} has none on this device"
        fix = f"do without {found[1]}, or set run.exactness to default"
        raise ConfigError("run.exactness", "bitwise", rule, fix) from None
