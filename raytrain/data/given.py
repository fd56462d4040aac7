"""Which source is meant by a value that a task's `data` gives?

A source is itself. A dictionary of columns, a DataFrame, a map-style dataset and those of Ray Data and Hugging Face have
numbered rows, so they are taken as what they are; all else is refused with the line to write. Runs in the driver.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raytrain.data.in_memory import ArraySource, dataset, from_columns
from raytrain.data.misfits import is_a, is_map_style, misfit
from raytrain.data.source import Columns, NotNumbers, Source, to_array
from raytrain.data.tables import huggingface, ray
from raytrain.errors import DataError


def as_source(where: str, value: Any) -> Source:
    """The source that a value is, or stands for.

    Args:
        where: where the value was given, for errors.

    Raises:
        DataError: the value has no numbered rows, or its rows or columns cannot become tensors.
    """
    if hasattr(value, "chunk_rows"):
        source: Source = value
        return source
    if is_a(value, "ray.data.Dataset"):
        return ray(value)
    if is_a(value, "datasets.DatasetDict") or (is_a(value, "datasets.Dataset") and value.format["type"] != "custom"):
        return huggingface(value)
    if isinstance(value, Mapping):
        return from_columns(where, value)
    if is_a(value, "pandas.DataFrame"):
        return _from_frame(where, value)
    if is_map_style(value):
        return dataset(value)
    raise misfit(where, value)


def _from_frame(where: str, frame: Any) -> ArraySource:
    """The columns of a DataFrame, without its index; those that are not numbers are left out, as of Parquet files."""
    names = [str(name) for name in frame.columns]
    if len(set(names)) < len(names):
        raise DataError(where, "columns " + ", ".join(names), "each column has a name of its own", "rename the columns")
    columns: Columns = {}
    left_out: dict[str, str] = {}
    for position, name in enumerate(names):
        series = frame.iloc[:, position]
        try:
            columns[name] = to_array(where, name, series.tolist() if series.dtype == object else series)
        except NotNumbers as error:
            left_out[name] = error.value
    if names and not columns:
        found = ", ".join(f"{name} ({reason})" for name, reason in left_out.items())
        raise DataError(where, found, "at least one column can become a tensor", "write a column as numbers")
    return from_columns(where, columns, left_out)
