"""The elasticity that stands on what is public in Ray: every change ends the group, and a new one goes on from storage.

Each attempt is one plain `TorchTrainer`. A lost worker ends it, and the next one begins from the newest checkpoint; when
there has been room for more workers for a while, the group is asked to save and to end, and the next one is larger. So
rows, steps and results are those of any other run; what is lost is time. A node that is announced to go away is noticed
only when Ray Train ends the attempt, or when it goes: as a loss, which does not count. Runs in the driver.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import ray
from ray.exceptions import RayError
from ray.train import TrainingFailedError

from raytrain.elastic.attempt import Attempt, told
from raytrain.elastic.capacity import Patience, shortage
from raytrain.elastic.fates import Lost, in_one_line, is_preemption, is_save_that_failed, losses, own_failures
from raytrain.elastic.losses import Crashes, LossBudget
from raytrain.elastic.plain_ray import VARIABLES, Means, plain_trainer
from raytrain.elastic.room import Room, Steady, is_worth_a_restart, num_to_begin
from raytrain.elastic.variables import variables
from raytrain.elastic.wiring import Wiring, worker_name
from raytrain.errors import DeadlyRowsError, ResourceError, WorkersLostError
from raytrain.events.kinds import Event, WaitingForWorkers, WorkerLeft, WorkerLost
from raytrain.plan.layout import held_by
from raytrain.rendezvous.generation import NO_STATE

LOOK_EVERY_S = 0.25
ENDING_LIMIT_S = 30.0
"""What Ray Train may take to end a broken group, and to give back the places of one that has finished."""
END_LIMIT_S = 1.0
"""What it may take to end the workers when the run is called off."""


class StopRelay:
    """Takes the place of the one rendezvous of other runs: passes the wish to stop on to the attempt that runs."""

    def __init__(self) -> None:
        self.is_asked = False
        self.attempt: Attempt | None = None

    @property
    def stop(self) -> StopRelay:
        return self

    def remote(self) -> None:
        self.is_asked = True
        if self.attempt is not None:
            self.attempt.rendezvous.stop.remote()


class RestartingTrainer:
    """Trains in as many attempts as it takes.

    Args:
        means: how attempts are made.
        wiring: what is promised about workers; its rendezvous is the `StopRelay`.
        while_running: called several times a second in the thread that called `fit`; may raise to end the run.
    """

    def __init__(self, means: Means, wiring: Wiring, while_running: Callable[[], None]) -> None:
        self._means, self._wiring, self._while_running = means, wiring, while_running
        self._relay: StopRelay = wiring.rendezvous
        self._room = Room(dict(means.resources))
        self._budget, self._crashes = LossBudget(wiring.max_failures), Crashes()
        self._patience = Patience(wiring.min_workers, wiring.start_timeout_s, wiring.wait_timeout_s)
        self._attempt: Attempt | None = None
        self._num_attempts = self._num_workers = self._generation = 0
        self._reached = NO_STATE
        """The most finished steps of all attempts."""
        self._catch_up = NO_STATE
        """The same, where the last attempt was lost: until there, it should be known exactly in which step workers die."""

    def fit(self) -> None:
        """Returns when the run is complete or stopped.

        Raises:
            TrainingFailedError: a worker's function raised.
            ResourceError: there was no room for the smallest group for too long.
            WorkersLostError: too many were lost in a row, or Ray Train does not end a broken group.
            DeadlyRowsError: processes died in the same step, with the same rows.
        """
        try:
            with variables(VARIABLES):
                while num_workers := self._wait_for_room():
                    attempt = self._begin(num_workers)
                    self._watch(attempt)
                    if self._is_last(attempt):
                        return
        finally:
            self._room.give_back()
            if self._attempt is not None:
                self._attempt.close(END_LIMIT_S)

    def close(self, limit_s: float) -> None:
        """Waits until the thread of the last attempt has ended, since Ray must not be shut down under it; up to a limit."""
        if self._attempt is not None:
            self._attempt.wait(limit_s)

    def _wait_for_room(self) -> int:
        """How many workers the next attempt has; 0 if there is to be none, since the run is to stop."""
        wiring, before, since, given_back = self._wiring, self._attempt, time.monotonic(), Steady()
        self._room.ask(wiring.max_workers)
        while not self._relay.is_asked:
            now = time.monotonic()
            num_free, steady_s = self._room.look(now)
            has_all = before is None or before.has_ended or now - since > ENDING_LIMIT_S
            settled_s = given_back.look(has_all, now) if has_all else 0.0
            if num := num_to_begin(num_free, steady_s, (wiring.min_workers, wiring.max_workers), settled_s):
                self._room.give_back()
                return num
            self._check_patience(num_free, now)
            self._rest()
        return 0

    def _check_patience(self, num_free: int, now: float) -> None:
        """Too little room: says so after a while, and gives up after a longer one."""
        need = self._wiring.min_workers
        to_do = self._patience.look(0, num_free, now)
        if not to_do:
            return
        reason = shortage(dict(self._means.resources), need, ray.cluster_resources())
        if to_do == "tell":
            self._tell(WaitingForWorkers(have=num_free, need=need, reason=reason))
            return
        raise ResourceError(
            "run.workers",
            f"at least {need} workers; there was room for {num_free} for {now - (self._patience.since or now):.0f} s",
            reason,
            "lower run.workers or run.cpus_per_worker, add nodes, or raise run.start_timeout_s or run.wait_timeout_s",
        )

    def _begin(self, num_workers: int) -> Attempt:
        means, first = self._means, self._num_workers
        rendezvous = means.open_rendezvous(num_workers, self._catch_up, self._generation)
        self._num_attempts += 1
        self._num_workers += num_workers
        work = told(means.work, rendezvous, self._wiring.sink, first)
        trainer = plain_trainer(
            means, work, means.connect(rendezvous, first), num_workers, name=f"attempt-{self._num_attempts}"
        )
        names = tuple(worker_name(first + rank) for rank in range(num_workers))
        self._attempt = self._relay.attempt = Attempt(trainer.fit, rendezvous, names)
        return self._attempt

    def _watch(self, attempt: Attempt) -> None:
        """Returns when nobody trains any more."""
        num_workers = len(attempt.names)
        while not attempt.is_over:
            attempt.look()
            now = time.monotonic()
            if len(attempt.known) == num_workers:  # before that, what we ask for here could take their own places
                self._room.ask(self._wiring.max_workers - num_workers)
                self._patience.look(num_workers, num_workers, now)
            num_free, steady_s = self._room.look(now)
            if attempt.is_to_stop or is_worth_a_restart(num_free, steady_s, attempt.report.step > 0):
                attempt.stop()
            self._check_ending(attempt)
            self._rest()

    def _check_ending(self, attempt: Attempt) -> None:
        broken_s = attempt.broken_for_s(self._wiring.slow_timeout_s)
        if broken_s > ENDING_LIMIT_S:
            attempt.kill()
        if broken_s > 2 * ENDING_LIMIT_S:
            begun = ", ".join(attempt.known) or "none of them"
            raise WorkersLostError(
                f"Ray Train has not ended a broken group of {len(attempt.names)} workers for {broken_s:.0f} s; "
                f"those that had begun: {begun}"
            )

    def _is_last(self, attempt: Attempt) -> bool:
        """Tells and bears what was lost; returns whether the run is over."""
        attempt.look_closely()
        self._reached = max(self._reached, attempt.report.step)
        self._generation = max(self._generation, attempt.report.generation)
        error, self._catch_up = attempt.error, NO_STATE
        if error is not None:
            self._raise_own(attempt, error)
        if self._relay.is_asked or self._means.is_complete() or (error is None and not attempt.is_to_stop):
            return True
        lost = self._lost(attempt, error) if error is not None else []
        self._see_off(attempt, lost)
        if error is not None and not is_preemption(error):
            self._catch_up = self._reached
            self._bear(attempt, lost, in_one_line(error))
            if not attempt.known:
                self._tell(WaitingForWorkers(have=0, need=len(attempt.names), reason=in_one_line(error)))
        return False

    def _raise_own(self, attempt: Attempt, error: BaseException) -> None:
        """Raises what ends a run, rather than an attempt: an error of a worker's function, or of Ray Train's own checks."""
        own = own_failures(error, attempt.names, attempt.ended)
        is_excused = attempt.is_to_stop and is_save_that_failed(own)  # without us nobody would have had to save
        if not isinstance(error, TrainingFailedError | RayError) or (own and not is_excused):
            raise error

    def _lost(self, attempt: Attempt, error: BaseException) -> list[Lost]:
        found = losses(error, attempt.names, attempt.ended, attempt.report.survey.given_up)
        if found or is_preemption(error):
            return found
        return [Lost(worker, in_one_line(error), preempted=False) for worker in attempt.known]

    def _see_off(self, attempt: Attempt, lost: list[Lost]) -> None:
        """Tells what has become of the workers, and ends their rendezvous."""
        nowhere, reasons = ("", 0), {one.worker: one.reason for one in lost}
        for worker in {**attempt.known, **reasons}:
            node, pid = attempt.known.get(worker, nowhere)
            if worker in reasons:
                self._tell(WorkerLost(worker=worker, node=node, pid=pid, reason=reasons[worker]))
            else:
                self._tell(WorkerLeft(worker=worker, node=node, pid=pid))
        self._relay.attempt = None
        ray.kill(attempt.rendezvous)

    def _bear(self, attempt: Attempt, lost: list[Lost], why: str) -> None:
        """Raises if the end of this attempt was one too many. What was taken by the cloud does not count."""
        if lost and all(one.preempted for one in lost):
            return
        step, members = max(0, attempt.report.step), attempt.report.survey.members
        for one in lost:
            if one.preempted or one.worker not in members or one.worker in attempt.report.survey.given_up:
                continue
            held = held_by(members.index(one.worker), len(members), self._wiring.num_logical)
            if to_blame := self._crashes.note(step, frozenset(held)):
                raise DeadlyRowsError(step, tuple(sorted(to_blame)), one.reason)
        if not self._budget.lose(max(0, self._reached)):
            last = lost[-1].reason if lost else why
            raise WorkersLostError(
                f"the group was lost {self._budget.losses} times in a row at step {max(0, self._reached)}, without a "
                f"finished step in between (run.max_failures = {self._budget.max_failures}); the last time: {last}"
            )

    def _tell(self, event: Event) -> None:
        self._wiring.sink.append.remote([event])

    def _rest(self) -> None:
        self._while_running()
        time.sleep(LOOK_EVERY_S)
