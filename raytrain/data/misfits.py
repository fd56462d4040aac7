"""What is wrong with a value that is given where rows are expected, and which line is right instead?

Knows the usual containers of data by their names, and imports none of their packages: a value of one is only there if its
package was imported. Runs in the driver.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any

import numpy as np

from raytrain.data.source import is_tensor
from raytrain.errors import DataError

ROW_NUMBERS = "has numbered rows, so that each row is trained on once in an epoch, whatever the workers"


def is_a(value: Any, *names: str) -> bool:
    """Whether a value is of one of these classes, such as "torch.utils.data.DataLoader", where they are imported."""
    for name in names:
        module, _, attribute = name.rpartition(".")
        kind = getattr(sys.modules.get(module), attribute, None)
        if isinstance(kind, type) and isinstance(value, kind):
            return True
    return False


def plain_tensors(value: Any) -> Sequence[Any] | None:
    """The tensors of a `TensorDataset` itself, whose rows are theirs; None for anything else."""
    is_plain = is_a(value, "torch.utils.data.TensorDataset") and type(value).__name__ == "TensorDataset"
    return value.tensors if is_plain else None


def is_map_style(value: Any) -> bool:
    """Whether a value is a map-style dataset: one of PyTorch's, of Hugging Face's, or any class with rows by number."""
    if is_a(value, "torch.utils.data.Dataset", "datasets.Dataset"):
        return not _is_stream(value) and hasattr(value, "__len__") and hasattr(value, "__getitem__")
    is_known = isinstance(value, (Mapping, list, tuple, str, bytes)) or hasattr(value, "shape")
    return not is_known and hasattr(value, "__len__") and hasattr(value, "__getitem__")


def check_map_style(where: str, value: Any) -> None:
    """Raises DataError for what is not a map-style dataset; a list is one of its rows."""
    if not (isinstance(value, list) or is_map_style(value)):
        raise misfit(where, value)


def misfit(where: str, value: Any) -> DataError:
    """The error for a value that is no source, with the line to write instead."""
    for is_kind, rule, fix in _KINDS:
        if is_kind(value):
            return DataError(where, _describe(value), rule, fix)
    fix = "write raytrain.arrays(x=...), raytrain.parquet(path) or raytrain.dataset(rows)"
    return DataError(
        where, _describe(value), "is a source, a map-style dataset, a DataFrame or a dictionary of columns", fix
    )


def _is_stream(value: Any) -> bool:
    iterable = ("torch.utils.data.IterableDataset", "datasets.IterableDataset")
    return is_a(value, *iterable) or isinstance(value, Iterator)


def _is_loader(value: Any) -> bool:
    return is_a(value, "torch.utils.data.DataLoader")


def _describe(value: Any) -> str:
    """The class of a value, and what a `DataLoader` has besides its dataset."""
    text = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    if not _is_loader(value):
        return text
    usual = "RandomSampler", "SequentialSampler", "_InfiniteConstantSampler"
    parts = []
    if (sampler := type(value.sampler).__name__) not in usual:
        parts.append(f"sampler {sampler}")
    if value.batch_sampler is not None and (batch_sampler := type(value.batch_sampler).__name__) != "BatchSampler":
        parts.append(f"batch_sampler {batch_sampler}")
    if (name := getattr(value.collate_fn, "__qualname__", type(value.collate_fn).__name__)) not in _DEFAULT_COLLATE:
        parts.append(f"collate_fn {name}")
    return text + (" with " + ", ".join(parts) if parts else "")


_DEFAULT_COLLATE = "default_collate", "default_convert"
_KINDS: tuple[tuple[Callable[[Any], bool], str, str], ...] = (
    (
        lambda value: _is_loader(value) and not _is_stream(value.dataset),
        "raytrain makes the batches itself: run.global_batch rows, each row once in an epoch, shuffled by run.seed",
        "write raytrain.dataset(loader.dataset); weights of a sampler go into `loss`, and what collate_fn does to rows "
        "into __getitem__ or `transform`",
    ),
    (
        lambda value: _is_stream(value) or _is_loader(value),
        ROW_NUMBERS,
        "write raytrain.dataset(list(rows)) if the rows fit in memory; else write them to Parquet files once and use "
        "raytrain.parquet(path)",
    ),
    (
        lambda value: isinstance(value, (str, PathLike)),
        "is a source, not a path",
        "write raytrain.parquet(path); for other files, csv, jsonl, numpy, images or text instead of parquet",
    ),
    (
        lambda value: is_tensor(value) or isinstance(value, np.ndarray),
        "columns have names, by which the hooks find them in their batch",
        "write raytrain.arrays(x=values)",
    ),
    (
        lambda value: isinstance(value, (list, tuple)),
        "says whether its entries are rows or columns",
        "write raytrain.dataset(rows) for a list of rows, raytrain.arrays(x=..., y=...) for columns",
    ),
    (
        lambda value: hasattr(value, "to_pandas"),
        "is a DataFrame of pandas, or a source",
        "write value.to_pandas()",
    ),
    (
        lambda value: hasattr(value, "__getitem__") and not hasattr(value, "__len__"),
        "a map-style dataset has a length",
        "define __len__, the number of rows",
    ),
)
"""What people give, in the order of the checks: the condition, the rule that it breaks, and the fix."""
