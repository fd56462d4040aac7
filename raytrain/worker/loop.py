"""The life of a worker, from its first model to the end of the run. Read it aloud.

A worker builds the task's state, warms up, and enters the rendezvous. It leaves with a generation: it takes the leader's
state and trains, step after step, until the run is done, newcomers wait, or a peer is lost. Then it enters again. It runs
in the training thread of a worker process; what it needs from outside comes in as a `Surroundings`.
"""

from __future__ import annotations

import time
from contextlib import ExitStack, closing

from raytrain.checkpoint.saver import Saver
from raytrain.data.feed import Feed
from raytrain.errors import WorkersLostError
from raytrain.events.curve import StepRecord
from raytrain.events.kinds import GenerationFormed, Member, StateRestored, StepSkipped
from raytrain.plan.layout import held_by
from raytrain.rendezvous.state import NO_STATE, Entrant, Generation, Signals
from raytrain.rendezvous.vitals import READING, RESTORING, WAITING
from raytrain.worker import determinism
from raytrain.worker.audit import gather_row_ids
from raytrain.worker.bell import Bell
from raytrain.worker.boundary import BoundaryDuties
from raytrain.worker.group import Group, PeerLost, form, serve_store
from raytrain.worker.hooks import user_code
from raytrain.worker.pause import Pause
from raytrain.worker.start import restore_newest, warm_up
from raytrain.worker.state import TrainState, build_state, synchronise
from raytrain.worker.step import Stepper
from raytrain.worker.surroundings import Surroundings


class Loop:
    """Trains a task to its end, in as many generations as it takes."""

    def __init__(self, around: Surroundings) -> None:
        self._around = around
        config, telemetry = around.config, around.telemetry
        self._saver = Saver(
            around.store,
            config.keep_newest,
            config.keep_best,
            config.best,
            telemetry.emit,
            before_write=telemetry.flush,  # so that a checkpoint never knows steps that the log does not
            max_stall_s=config.collective_timeout_s / 2,  # a leader that waits longer would be taken for lost
        )
        self.rank = 0
        """The rank in the latest generation."""
        self._pause = Pause()
        self._losses_in_a_row = 0
        self._is_saved = False

    def run(self) -> None:
        """Returns when the run is complete or stopped, or when this worker was asked to leave.

        Raises:
            TaskError: the user's code raised.
            WorkersLostError: peers were lost too often without a finished step in between.
        """
        around, is_over, latest = self._around, False, 0
        if around.config.exactness == "bitwise":
            determinism.switch_on()
        around.telemetry.emit(determinism.conditions(around.worker, around.device))
        state = build_state(around.task, around.config, around.num_steps, around.device)
        warm_up(around, state)
        store = serve_store(around.host)
        while not is_over:
            around.pulse.part()
            generation = around.rendezvous.enter(self._entrant(state, store.port, latest))
            if generation is None:
                break
            latest = generation.number
            try:
                with form(generation, around.worker, store, around.device, around.config.collective_timeout_s) as group:
                    around.pulse.join(generation, group.abort)
                    is_over = self._train_together(state, group)
            except PeerLost as loss:
                self._bear(loss)
        if is_over:
            around.rendezvous.close()
        self._saver.close()

    def _entrant(self, state: TrainState, port: int, latest: int) -> Entrant:
        around = self._around
        return Entrant(
            around.worker,
            state.step,
            store=(around.host, port),
            node=around.host,
            pid=around.pid,
            node_id=around.node_id,
            is_saved=self._is_saved,
            after=latest,
        )

    def _train_together(self, state: TrainState, group: Group) -> bool:
        """Trains in one generation; returns whether the run is over."""
        around = self._around
        self.rank = group.rank
        around.telemetry.lead(group.leads)
        self._is_saved = False
        if group.leads and state.step == NO_STATE:
            around.pulse.mark(RESTORING)
            name = restore_newest(state, around.store, around.config.best)
            around.telemetry.emit(StateRestored(step=state.step, checkpoint=name))
        around.pulse.mark(WAITING)
        synchronise(state, group)
        around.telemetry.learn(group.share(around.telemetry.untold() if group.leads else None))
        held = held_by(group.rank, group.size, around.plan.num_logical)
        with ExitStack() as stack:
            feed = stack.enter_context(closing(around.feed("train", held, state.step, around.num_steps)))
            bell = stack.enter_context(closing(Bell(around.rendezvous, group.generation.number))) if group.leads else None
            stepper = stack.enter_context(closing(Stepper(around.task, around.config, state, group, around.pulse)))
            if group.leads:
                self._tell_generation(group.generation, state.step)

            def heard() -> Signals:
                return bell.signals if bell else Signals()

            duties = BoundaryDuties(around, group, held, self._saver, heard)
            told = duties.at_boundary(state)
            while state.step < around.num_steps and not (told.stop or told.gather):
                told = duties.at_boundary(state, self._step(state, group, stepper, feed, heard()))
            if told.stop:  # by a signal, which leaves no time to wait for storage
                duties.finish(state, patience_s=0.0)
                return True
            if told.save or not told.gather:
                duties.finish(state)
                self._is_saved = True
            return not told.gather

    def _step(self, state: TrainState, group: Group, stepper: Stepper, feed: Feed, signals: Signals) -> Signals:
        """One step, redone elsewhere if it fails, recorded if it does not; returns what all ranks agreed on."""
        around, step, started = self._around, state.step, time.monotonic()
        around.pulse.begin_step(step)
        around.pulse.mark(READING)
        with user_code(f"transform, or reading, for step {step} on rank {group.rank}"):
            shares = feed.step(step)
        data_wait_s = time.monotonic() - started
        around.pulse.mark(WAITING)
        row_ids = gather_row_ids(group, around.plan, step, shares) if around.config.audit else None
        rows = around.plan.rows_in_step(step)
        result = stepper.run(shares, rows, signals)
        self._pause.commit()
        self._losses_in_a_row = 0
        around.telemetry.record(
            StepRecord(step, result.loss, result.weight, rows, result.learning_rate, time.time(), data_wait_s, row_ids)
        )
        if not result.applied and group.leads:
            around.telemetry.emit(StepSkipped(step=step, loss=result.loss))
        return result.signals

    def _bear(self, loss: PeerLost) -> None:
        """Counts losses without progress, so that a step that always fails ends the run."""
        self._pause.break_off()
        self._losses_in_a_row += 1
        if self._losses_in_a_row > self._around.config.max_failures:
            raise WorkersLostError(
                f"the group broke {self._losses_in_a_row} times without a finished step in between; the last time: {loss}"
            )

    def _tell_generation(self, generation: Generation, step: int) -> None:
        size, num_logical = len(generation.members), self._around.plan.num_logical
        self._around.telemetry.emit(
            GenerationFormed(
                generation=generation.number,
                step=step,
                members=[
                    Member(
                        worker=m.worker,
                        rank=rank,
                        node=m.node,
                        pid=m.pid,
                        logical=list(held_by(rank, size, num_logical)),
                    )
                    for rank, m in enumerate(generation.members)
                ],
                cause=generation.cause,
                **({} if generation.cause == "start" else self._pause.parts(generation.waited_s)),
            )
        )
