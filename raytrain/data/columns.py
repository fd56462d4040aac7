"""What is a column? Numbers that PyTorch knows, one entry per row, of one type and one shape per row in all of a run.

Turns what somebody else made into such arrays, and refuses what is none. It does not import PyTorch, which takes
seconds: Ray Data's processes start without it, unless the user's own code needs it. Pure functions.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raytrain.data.source import Columns
from raytrain.errors import DataError


def is_tensor(value: Any) -> bool:
    """Whether a value is a tensor of PyTorch; there are none where it is not imported."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def to_array(where: str, name: str, values: Any) -> NDArray[Any]:
    """A column that somebody else made, as a numpy array in native byte order that PyTorch can use.

    Args:
        where: whose column it is, for the error.
        name: its name.
        values: numpy array, torch tensor, or nested lists of numbers.

    Raises:
        DataError: the values are ragged, are no numbers, or have no rows dimension.
    """
    if is_tensor(values):
        values = values.detach().cpu().numpy()
    try:
        array = np.asarray(values)
    except ValueError:
        raise _ragged(where, name) from None
    if array.dtype.kind == "O" and any(np.ndim(value) for value in array.flat):
        raise _ragged(where, name)
    if array.dtype.kind not in "biufc":
        rule = "columns are numbers or booleans, since tensors are"
        raise DataError(f"{where}, column {name!r}", f"type {array.dtype}", rule, "leave the column out, or encode it")
    if array.ndim == 0:
        raise DataError(f"{where}, column {name!r}", f"{array}", "has one value for each row", "give a list or an array")
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def check_types(types: dict[str, Any], columns: Columns) -> None:
    """Refuses columns that are not like those seen before; `types` remembers them, empty at first.

    Raises:
        DataError: a column appeared, vanished, or changed its type or the shape of a row.
    """
    found = {name: (values.dtype, values.shape[1:]) for name, values in columns.items()}
    if found == types:
        return
    if not types:
        types.update(found)
        return
    name = next(name for name in {**types, **found} if types.get(name) != found.get(name))
    before, now = (f"{t[name][0]} {list(t[name][1])}" if name in t else "absent" for t in (types, found))
    rule = f"a column has one type and one shape per row in all batches of a run; before: {before}"
    raise DataError(f"data, column {name!r}", now, rule, "return the same type and shape for all rows from `transform`")


def missing_column(where: str, name: str, known: Iterable[str]) -> DataError:
    """The error for a column that is not there, with the nearest one that is."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    rule = "is one of the columns " + ", ".join(known) if known else "there are no columns"
    return DataError(where, f"no column {name!r}", rule, f"did you mean {near[0]!r}?" if near else "correct the name")


def sliced(columns: Columns, part: slice) -> Columns:
    """Some consecutive rows, sharing memory."""
    return {name: values[part] for name, values in columns.items()}


def _ragged(where: str, name: str) -> DataError:
    return DataError(
        f"{where}, column {name!r}", "rows of different lengths", "all rows have the same shape", "pad or cut the rows"
    )
