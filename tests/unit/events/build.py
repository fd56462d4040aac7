"""Events for tests, with defaults for the fields that a test does not use."""

from __future__ import annotations

from typing import Any

from raytrain.events import kinds


def started(time: float = 1.0, num_steps: int = 100, **fields: Any) -> kinds.RunStarted:
    sizes = {"steps_per_epoch": 10, "rows_per_epoch": 100, "global_batch": 10, "num_logical": 2, "workers": (1, 2)}
    return kinds.RunStarted(**{"time": time, "name": "r", "directory": "/r", "num_steps": num_steps, **sizes, **fields})


def steps(first: int, *losses: float, **fields: Any) -> kinds.StepsDone:
    lists = {name: [1.0] * len(losses) for name in ("weights", "learning_rates", "finished")}
    return kinds.StepsDone(
        **{"time": 1.0, "first_step": first, "losses": list(losses), "rows": [10] * len(losses), **lists, **fields}
    )


def formed(time: float = 1.0, workers: str = "ab", cause: str = "start", **fields: Any) -> kinds.GenerationFormed:
    members = [kinds.Member(worker=name, rank=rank, node="n", pid=1, logical=[rank]) for rank, name in enumerate(workers)]
    return kinds.GenerationFormed(**{"time": time, "generation": 1, "step": 0, "members": members, "cause": cause, **fields})


def restored(step: int, time: float = 1.0) -> kinds.StateRestored:
    return kinds.StateRestored(time=time, step=step, checkpoint=f"step-{step}")


def lost(worker: str, time: float = 1.0) -> kinds.WorkerLost:
    return kinds.WorkerLost(time=time, worker=worker, node="n", pid=1, reason="killed")


def evaluated(step: int, loss: float = 0.5, seconds: float = 0.1, **fields: Any) -> kinds.EvaluationDone:
    metrics = {"valid/loss": loss}
    return kinds.EvaluationDone(**{"time": 1.0, "step": step, "metrics": metrics, "rows": 1, "seconds": seconds, **fields})


def saved(step: int, stall_s: float = 0.0, time: float = 1.0) -> kinds.CheckpointSaved:
    return kinds.CheckpointSaved(time=time, step=step, checkpoint="c", size_bytes=1, seconds=0.1, stall_s=stall_s)


def output(text: str, time: float = 1.0) -> kinds.OutputLine:
    return kinds.OutputLine(time=time, rank=0, stream="stdout", text=text)
