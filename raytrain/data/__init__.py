"""Where rows come from and how they reach the workers: sources, and the loader that delivers the plan's rows."""

from raytrain.data.drawn import mix, weighted
from raytrain.data.in_memory import arrays, dataset
from raytrain.data.parquet import parquet

__all__ = ["arrays", "dataset", "mix", "parquet", "weighted"]
