"""The life of a worker, from its first model to the end of the run. Read it aloud.

A worker builds the training state, warms up, and joins the rendezvous. It returns with a generation: it forms the process
group, takes the leader's state and trains, step after step, until the run is done, newcomers wait, or a peer is lost. Then
it joins again. Runs in the training thread of a worker process; everything outside of it comes in as a `WorkerContext`.
"""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from functools import partial

from raytrain.checkpoint.saver import Saver
from raytrain.config import RunConfig
from raytrain.data.loader import Loader
from raytrain.errors import WorkersLostError
from raytrain.events.curve import StepRecord
from raytrain.events.kinds import GenerationFormed, Member, OutputLine, StepSkipped
from raytrain.plan import logical_workers_of
from raytrain.rendezvous.health import HANDING_OVER, READING, RESTORING, WAITING
from raytrain.rendezvous.probe import WORKER_KEY
from raytrain.rendezvous.state import NO_STATE, Generation, JoinRequest, Signals
from raytrain.worker import bitwise
from raytrain.worker.boundary import StepBoundary
from raytrain.worker.context import WorkerContext
from raytrain.worker.failures import PeerLost
from raytrain.worker.group import Group, process_group, serve_store
from raytrain.worker.handover import broadcast_state
from raytrain.worker.heartbeat import SignalWatcher
from raytrain.worker.hooks import user_code
from raytrain.worker.sanity_check import sanity_check
from raytrain.worker.state import TrainState, build_state, restore_newest
from raytrain.worker.step import TrainStep, gather_row_ids, warm_up
from raytrain.worker.telemetry import PauseTimer

MAX_SAVE_STALL_S = 10.0
"""For how long training waits while the previous checkpoint is written; after that it goes on without the new one."""


def outermost_timeout_s(config: RunConfig) -> float:
    """How long a collective may take if the rendezvous does not act: by then it has evicted whoever others wait for."""
    longest_s = max(config.slow_timeout_s, config.hang_timeout_s, config.collective_timeout_s)
    return longest_s + 3 * config.heartbeat_timeout_s


class TrainingLoop:
    """Trains a task to its end, in as many generations as it takes."""

    def __init__(self, context: WorkerContext) -> None:
        self._context, self._config = context, context.spec.config
        self._saver = Saver(
            context.store,
            self._config.keep_newest,
            self._config.keep_best,
            self._config.best,
            context.telemetry.emit,
            before_write=partial(context.telemetry.flush, durably=True),  # a checkpoint has no steps that the log has not
            max_stall_s=MAX_SAVE_STALL_S,
        )
        self.rank = 0
        """The rank in the latest generation."""
        self._pause = PauseTimer()
        self._failures_in_a_row = 0
        self._is_saved = False

    def run(self) -> None:
        """Returns when the run is complete or stopped, or when this worker was asked to leave.

        Raises:
            TaskError: the user's code raised.
            WorkersLostError: the group broke too often without a finished step in between.
        """
        context, is_over, generation = self._context, False, None
        if self._config.exactness == "bitwise":
            bitwise.use_deterministic_algorithms()
        context.telemetry.emit(bitwise.worker_environment(context.worker, context.device))
        store = serve_store(context.host)
        store.set(WORKER_KEY, context.worker)
        context.heartbeat.serve((context.host, store.port))
        state = self._build_state()
        sanity_check(context, state)
        while not is_over:
            context.heartbeat.leave_generation()
            generation = context.rendezvous.join(self._join_request(state, store.port, generation))
            if generation is None:
                break
            try:
                with process_group(
                    generation, context.worker, store, context.device, outermost_timeout_s(self._config)
                ) as group:
                    context.heartbeat.enter_generation(generation, group.abort)
                    is_over = self._train_generation(state, group)
            except PeerLost as loss:
                self._handle_failure(loss)
                if state.is_partial:
                    state = self._build_state()
        if is_over:
            context.rendezvous.close()
        self._saver.close()

    def _build_state(self) -> TrainState:
        state = build_state(self._context.spec, self._context.device)
        warm_up(self._context.spec, state, self._context.device)
        return state

    def _train_generation(self, state: TrainState, group: Group) -> bool:
        """Trains in one generation; returns whether the run is over."""
        context, spec = self._context, self._context.spec
        self._synchronize(state, group)
        assigned = logical_workers_of(group.rank, group.size, spec.plan.num_logical)
        with ExitStack() as stack:
            loader = stack.enter_context(closing(context.loader("train", assigned, state.step, spec.num_steps)))
            train_step = stack.enter_context(closing(TrainStep(spec, state, group, context.heartbeat)))
            watcher = stack.enter_context(closing(SignalWatcher(context.rendezvous, group)))
            if group.is_leader:
                self._emit_generation(group.generation, state)
            boundary = StepBoundary(context, group, assigned, self._saver, watcher)
            agreed = boundary.run_due(state)
            while state.step < spec.num_steps and not (agreed.stop or agreed.regroup):
                agreed = boundary.run_due(state, self._step(state, group, train_step, loader, watcher.signals))
            if agreed.stop:  # by a signal, which leaves no time to wait for the storage
                boundary.wait_until_saved(state, retry_s=0.0)
                return True
            if agreed.save or not agreed.regroup:
                boundary.wait_until_saved(state)
                self._is_saved = True
            return not agreed.regroup

    def _synchronize(self, state: TrainState, group: Group) -> None:
        """Restores the state on the leader if nobody has one, and gives it and the unacknowledged steps to all ranks."""
        context = self._context
        self.rank, self._is_saved = group.rank, False
        context.telemetry.set_leader(group.is_leader)
        if group.is_leader and state.step == NO_STATE:
            context.heartbeat.set_activity(RESTORING)
            context.telemetry.emit(restore_newest(state, context.store, self._config.best))
        context.heartbeat.set_activity(HANDING_OVER)
        untold = group.broadcast_object(context.telemetry.unacknowledged() if group.is_leader else None)
        try:
            broadcast_state(state, group, partial(context.heartbeat.set_activity, HANDING_OVER))
        finally:  # whoever has the state has its steps, too: if the leader dies now, only this rank can still tell of them
            context.telemetry.merge([record for record in untold if record.step < state.step])

    def _step(self, state: TrainState, group: Group, train_step: TrainStep, loader: Loader, pending: Signals) -> Signals:
        """One step, recorded once it is committed; returns the signals that all ranks agreed on."""
        context, plan, step, started = self._context, self._context.spec.plan, state.step, time.monotonic()
        context.heartbeat.begin_step(step)
        context.heartbeat.set_activity(READING)
        with user_code(f"transform, or reading, for step {step} on rank {group.rank}"):
            batches = loader.step(step)
        data_wait_s = time.monotonic() - started
        context.heartbeat.set_activity(WAITING)
        row_ids = gather_row_ids(group, plan, step, batches) if self._config.audit else None
        rows = plan.rows_in_step(step)
        result = train_step.run(batches, rows, pending)
        self._pause.commit_step()
        self._failures_in_a_row = 0
        context.telemetry.record(
            StepRecord(step, result.loss, result.weight, rows, result.learning_rate, time.time(), data_wait_s, row_ids)
        )
        if not result.applied:
            if group.is_leader:
                context.telemetry.emit(StepSkipped(step=step, loss=result.loss))
            train_step.check_progress(batches)
        return result.signals

    def _handle_failure(self, loss: PeerLost) -> None:
        """Counts failures without progress, so that a step that always fails ends the run."""
        self._pause.fail_step()
        self._failures_in_a_row += 1
        if self._failures_in_a_row > self._config.max_failures:
            raise WorkersLostError(
                f"the group broke {self._failures_in_a_row} times without a finished step in between; the last time: {loss}"
            )

    def _join_request(self, state: TrainState, port: int, last: Generation | None) -> JoinRequest:
        context = self._context
        return JoinRequest(
            context.worker,
            state.step,
            store=(context.host, port),
            node=context.host,
            pid=context.pid,
            node_id=context.node_id,
            is_saved=self._is_saved,
            last_generation=last.number if last else 0,
        )

    def _emit_generation(self, generation: Generation, state: TrainState) -> None:
        size, num_logical = len(generation.members), self._context.spec.plan.num_logical
        members = [
            Member(
                worker=m.worker, rank=rank, node=m.node, pid=m.pid, logical=list(logical_workers_of(rank, size, num_logical))
            )
            for rank, m in enumerate(generation.members)
        ]
        pause = {} if generation.cause == "start" else self._pause.parts(generation.waited_s)
        self._context.telemetry.emit(
            GenerationFormed(generation=generation.number, step=state.step, members=members, cause=generation.cause, **pause)
        )
        for note in state.notes if generation.cause == "start" else ():
            self._context.telemetry.emit(OutputLine(rank=self.rank, stream="stderr", text=note))
