"""How does each side of `checkpoint.py` save, and how does it load what it saved?

    python jobs/bench/checkpoint_sides.py SIDE CASE [OUT]

Trains with one worker, and without OUT no more than that. With OUT loads the newest checkpoint of an earlier call into a
new model and a new optimizer, as a fresh process does that resumes, and writes there how many seconds that took.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import workload

import raytrain

BATCH, DEPTH = 32, 5
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Case:
    """What to train: how wide, how long, how often to save; `directory` has the checkpoints, and `steps` in it the times."""

    directory: str
    width: int
    steps: int
    every: int

    @property
    def log_dir(self) -> str:
        return os.path.join(self.directory, "steps")

    @property
    def storage(self) -> str:
        return os.path.join(self.directory, "storage")

    def find(self, files: str) -> list[Path]:
        """Directories that have such a file, in the order in which they were finished."""
        return [path.parent for path in sorted(Path(self.storage).glob(files), key=lambda path: path.stat().st_mtime)]


def build_optimizer(model):
    import torch

    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)


def build_parts(case: Case, log_dir: str):
    """Model, optimizer and the scheduler that writes down the times."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = workload.build_model(case.width, DEPTH)
    optimizer = build_optimizer(model)
    return model, optimizer, workload.build_clock(optimizer, log_dir)


class Bench(raytrain.Task):
    """The benchmark's workload."""

    log_dir: str
    """Directory that gets the times of the steps."""
    width: int
    """Units of each hidden layer."""

    def data(self):
        return {"train": raytrain.arrays(**workload.make_columns())}

    def model(self):
        return workload.build_model(self.width, DEPTH)

    def optimizer(self, model):
        return build_optimizer(model)

    def scheduler(self, optimizer, num_steps):
        return workload.build_clock(optimizer, self.log_dir)

    def loss(self, model, batch):
        from torch.nn import functional as F

        return F.cross_entropy(model(batch["features"]), batch["label"], reduction="none")


def train_raytrain(case: Case) -> None:
    config = raytrain.RunConfig(
        name="bench",
        storage=case.storage,
        global_batch=BATCH,
        steps=case.steps,
        checkpoint_every=case.every,
        keep_newest=case.steps,
        threads_per_worker=1,
    )
    raytrain.Trainer(Bench(log_dir=case.log_dir, width=case.width), config).fit()


def load_raytrain(case: Case, model, optimizer, clock) -> None:
    from raytrain.checkpoint.state import restore
    from raytrain.checkpoint.store import CheckpointStore
    from raytrain.rundir import RunDir

    store = CheckpointStore(RunDir.at(case.storage, "bench"))
    checkpoint, _ = store.to_resume()
    restore({name: store.read(checkpoint, name) for name in checkpoint.manifest.files}, model, optimizer, clock)


def train_plainly(case: Case, save) -> None:
    """Trains in this process; `save` gets the number of finished steps, the model and the optimizer."""
    import torch
    from torch.nn import functional as F

    model, optimizer, clock = build_parts(case, case.log_dir)
    columns = {name: torch.from_numpy(values) for name, values in workload.make_columns().items()}
    for step in range(case.steps):
        rows = torch.arange(step * BATCH, (step + 1) * BATCH) % workload.ROWS
        loss = F.cross_entropy(model(columns["features"][rows]), columns["label"][rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        clock.step()
        if (step + 1) % case.every == 0:
            save(step + 1, model, optimizer)


def train_ray(is_async: bool, case: Case) -> None:
    import ray
    from ray.train import Checkpoint, CheckpointUploadMode, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    def save(step, model, optimizer) -> None:
        import torch

        directory = tempfile.mkdtemp(prefix="checkpoint-")
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, os.path.join(directory, "state.pt"))
        mode = CheckpointUploadMode.ASYNC if is_async else CheckpointUploadMode.SYNC
        ray.train.report(
            {"step": step},
            checkpoint=Checkpoint.from_directory(directory),
            checkpoint_upload_mode=mode,
            delete_local_checkpoint_after_upload=True,
        )

    ray.init(address="local", include_dashboard=False)
    TorchTrainer(
        lambda: train_plainly(case, save),
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(name="bench", storage_path=case.storage),
    ).fit()


def load_ray(case: Case, model, optimizer, clock) -> None:
    import torch

    state = torch.load(case.find("bench/*/state.pt")[-1] / "state.pt", weights_only=False)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def train_dcp(case: Case) -> None:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    pending = []

    def save(step, model, optimizer) -> None:
        wait()
        weights, moments = get_state_dict(model, optimizer)
        pending.append(dcp.async_save({"model": weights, "optimizer": moments}, checkpoint_id=f"{case.storage}/{step}"))

    def wait() -> None:
        if pending:
            pending.pop().result()

    dist.init_process_group("gloo", init_method=f"file://{case.directory}/store", rank=0, world_size=1)
    train_plainly(case, save)
    wait()


def load_dcp(case: Case, model, optimizer, clock) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=case.find("*/.metadata")[-1])
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


@dataclass(frozen=True)
class Side:
    """`last` matches the file that is written last of each checkpoint, below the storage."""

    train: object
    load: object
    last: str


OURS, SYNC, ASYNC, DCP = "raytrain", "Ray Train, sync", "Ray Train, async", "dcp.async_save"
SIDES = {
    OURS: Side(train_raytrain, load_raytrain, "bench/checkpoints/*/manifest.json"),
    SYNC: Side(functools.partial(train_ray, False), load_ray, "bench/*/state.pt"),
    ASYNC: Side(functools.partial(train_ray, True), load_ray, "bench/*/state.pt"),
    DCP: Side(train_dcp, load_dcp, "*/.metadata"),
}


def load(side: Side, case: Case) -> float:
    """Seconds from the checkpoint to the state in memory; checks that it is that of the last save."""
    with tempfile.TemporaryDirectory() as log_dir:
        model, optimizer, clock = build_parts(case, log_dir)
        began = time.perf_counter()
        side.load(case, model, optimizer, clock)
        took = time.perf_counter() - began
    found = int(next(iter(optimizer.state.values()))["step"])
    if found != case.steps:
        raise RuntimeError(f"loaded the state of step {found} instead of {case.steps}")
    return took


if __name__ == "__main__":
    if len(sys.argv) == 3:
        SIDES[sys.argv[1]].train(Case(**json.loads(sys.argv[2])))
    else:
        Path(sys.argv[3]).write_text(str(load(SIDES[sys.argv[1]], Case(**json.loads(sys.argv[2])))))
    sys.stdout.flush()
    os._exit(0)  # all is written; taking gloo's threads down now and then aborts the process (torch 2.13)
