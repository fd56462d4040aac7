"""Elastic PyTorch training on Ray: workers come and go, and the result does not change.

What a user needs:

    Task           base class of what is trained: data, model, optimizer, loss as hooks; fields are hyperparameters
    Loss           a loss with its own weight, for example a sum over tokens
    Sum            a metric that is added up over all rows, for the task's `summarise`
    arrays         in-memory data as a source
    parquet        Parquet files as a source
    csv, jsonl     CSV and JSON Lines files as a source
    text           texts, packed in rows of one length, as a source
    dataset        a map-style PyTorch dataset as a source
    numpy          .npy and .npz files as a source
    images         image files as a source
    ray            a Ray Dataset as a source
    huggingface    a dataset of Hugging Face as a source
    mix            several sources in fixed proportions
    weighted       a source whose rows are drawn in proportion to weights
    main           a task as a command: its fields and the settings are flags
    RunConfig      settings of a run
    Trainer        a run from Python: Trainer(task, config).fit()
    Result         how a run ended: steps, metrics, checkpoints
    SweepConfig    settings of a sweep
    Sweep          a hyperparameter search over elastic runs: Sweep(task, space).fit()
    SweepResult    how a sweep ended: the trials and the best of them
    trainable      elastic runs as trials of a plain ray.tune.Tuner
    show           fits a Trainer or a Sweep and shows its progress on stdout
    connected      a connection to Ray as a context manager, for jobs that prepare data before the run

Map of the package, in reading order:

    config, task   what a user sets and writes              launch      the driver: checks, starts and watches a run
    plan           which row belongs to which step          worker      one worker's training loop
    data           reads the planned rows                   rendezvous  who trains together: generations, heartbeats, drains
    checkpoint     saves and restores the state             elastic     how many workers: Ray Train, failures, resources
    events         the record of a run; its views           tune        sweeps on Ray Tune
    report         audit and comparison of records          cluster     cluster files, doctor, submit, chaos
    console        live and plain views                     cli         the commands

Glossary:

    worker          a process that trains, with one GPU or some CPUs
    logical worker  a fixed part of each global batch; workers share the logical workers, and their number never changes the
                    result, since each logical worker's gradient is computed alone and summed in one order
    step            one optimizer step: one global batch, forward, backward, update
    micro-batch     the rows of one forward and backward pass, a part of a logical worker's batch
    plan            the order of rows: a pure function of seed, step and logical worker, so that no state has to move
    source          the data of one split, with numbered rows
    generation      a set of workers that train together, with ranks; each change of the set forms the next generation
    rendezvous      the actor that forms generations
    drain           a worker finishes its step and leaves, because its node goes away; unlike a failure it costs nothing
    restart mode    each change restarts all workers from a checkpoint; where this Ray does not support in-place changes
    evaluation      metrics over the other sources, by all workers
    checkpoint      weights, optimizer and random state after a step; verified by checksums before it is used
    run             one training, in one directory: run.json, events.jsonl, checkpoints/
    event           one line of events.jsonl: what happened, when
    audit           proof from the events that each row was trained on exactly once
    digest          checksum of the weights and the optimizer state after a step, to compare runs bit by bit
    ledger          where the time of a run went: each second belongs to one class
    goodput         the share of training in that time
    sweep, trial    a search over hyperparameters; one run of it
    driver          the process of the job script; it starts and watches, and does not train
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from raytrain.version import VERSION

if TYPE_CHECKING:
    from raytrain.cli.job import main as main
    from raytrain.cli.job import show as show
    from raytrain.config import RunConfig as RunConfig
    from raytrain.data import arrays as arrays
    from raytrain.data import csv as csv
    from raytrain.data import dataset as dataset
    from raytrain.data import huggingface as huggingface
    from raytrain.data import images as images
    from raytrain.data import jsonl as jsonl
    from raytrain.data import mix as mix
    from raytrain.data import numpy as numpy
    from raytrain.data import parquet as parquet
    from raytrain.data import ray as ray
    from raytrain.data import text as text
    from raytrain.data import weighted as weighted
    from raytrain.launch.cluster import connected as connected
    from raytrain.launch.trainer import Result as Result
    from raytrain.launch.trainer import Trainer as Trainer
    from raytrain.sweep_config import SweepConfig as SweepConfig
    from raytrain.task import Loss as Loss
    from raytrain.task import Sum as Sum
    from raytrain.task import Task as Task
    from raytrain.tune.results import SweepResult as SweepResult
    from raytrain.tune.sweep import Sweep as Sweep
    from raytrain.tune.trial import trainable as trainable

_MODULES = {
    "Loss": "raytrain.task",
    "Result": "raytrain.launch.trainer",
    "RunConfig": "raytrain.config",
    "Sum": "raytrain.task",
    "Sweep": "raytrain.tune.sweep",
    "SweepConfig": "raytrain.sweep_config",
    "SweepResult": "raytrain.tune.results",
    "Task": "raytrain.task",
    "Trainer": "raytrain.launch.trainer",
    "arrays": "raytrain.data",
    "connected": "raytrain.launch.cluster",
    "csv": "raytrain.data",
    "dataset": "raytrain.data",
    "huggingface": "raytrain.data",
    "images": "raytrain.data",
    "jsonl": "raytrain.data",
    "main": "raytrain.cli.job",
    "mix": "raytrain.data",
    "numpy": "raytrain.data",
    "parquet": "raytrain.data",
    "ray": "raytrain.data",
    "show": "raytrain.cli.job",
    "text": "raytrain.data",
    "trainable": "raytrain.tune.trial",
    "weighted": "raytrain.data",
}
"""Modules of the public names; each is imported when its name is first used, since torch and ray take seconds."""

__all__ = list(_MODULES)
__version__ = VERSION


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'raytrain' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
