"""Environment variables: which ones are forwarded from the driver to its workers, and setting some for a while.

Setting is for options that Ray reads from nowhere else; in the main thread of the driver.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence

SUBMIT_DIRECTORY = "RAYTRAIN_SUBMIT_DIRECTORY"
"""Set for a job by `raytrain submit`: the directory in which it was called."""
FORWARDED_PREFIXES = ("NCCL_", "GLOO_", "TORCH_", "CUDA_LAUNCH_", "CUBLAS_", "OMP_", "MKL_")


def forwarded(environment: Mapping[str, str], named: Sequence[str] = ()) -> dict[str, str]:
    """The variables that workers take over from the driver: those of NCCL, gloo, PyTorch and their libraries.

    Args:
        environment: of the driver.
        named: further ones that the run asks for.
    """
    return {name: value for name, value in environment.items() if name.startswith(FORWARDED_PREFIXES) or name in named}


@contextlib.contextmanager
def environment_set(values: Mapping[str, str]) -> Iterator[None]:
    """Sets variables for as long as the block lasts."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
