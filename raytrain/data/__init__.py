"""Where rows come from and how they get to the workers: sources, and the feed that delivers the plan's rows."""

from raytrain.data.arrays import arrays
from raytrain.data.datasets import dataset
from raytrain.data.parquet import parquet

__all__ = ["arrays", "dataset", "parquet"]
