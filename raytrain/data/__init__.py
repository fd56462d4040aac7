"""Where rows come from and how they reach the workers: sources, and the loader that delivers the plan's rows."""

from raytrain.data.drawn import mix, weighted
from raytrain.data.image_source import images
from raytrain.data.in_memory import arrays, dataset
from raytrain.data.line_files import csv, jsonl
from raytrain.data.numpy_files import numpy
from raytrain.data.packed_text import text
from raytrain.data.parquet import parquet
from raytrain.data.tables import huggingface, ray

__all__ = [
    "arrays",
    "csv",
    "dataset",
    "huggingface",
    "images",
    "jsonl",
    "mix",
    "numpy",
    "parquet",
    "ray",
    "text",
    "weighted",
]
