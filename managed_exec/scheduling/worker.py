"""One thread of a pool: takes tasks from the queue and runs them, each bound to a device.

The life of a task in its worker, in this order, so that whoever sees the future done finds everything given back:

    book a device -> future running -> enter the device context -> call -> wait for its device work
        -> leave the context -> give the booking back -> drop arguments -> future done

A task that ran out of device memory, and may run again, goes back to the queue instead of the last two steps. A task
that is to stop and does not return is given up by the watchdog, which does the last three; its worker, when the task
does return, finds that its place is taken, and ends.

A worker refers to its executor only weakly, so that a pool nobody holds any more can be collected and its workers end.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import thread as stock
from functools import partial
from time import perf_counter
from typing import Any, Literal, Protocol, TypeAlias

from managed_exec.context import DeviceContext
from managed_exec.devices import CpuDevice
from managed_exec.errors import DeviceMemoryError, TaskCancelledError, TaskTimeoutError
from managed_exec.future import TaskFuture
from managed_exec.options import NO_OPTIONS
from managed_exec.scheduling.appraisal import Appraiser
from managed_exec.scheduling.health import DeviceHealth
from managed_exec.scheduling.loads import DeviceLoads
from managed_exec.scheduling.outcomes import Outcomes
from managed_exec.scheduling.queue import TaskQueue
from managed_exec.scheduling.run import drop_frames, is_device_error, is_out_of_memory, run_bound
from managed_exec.scheduling.threads import WorkerThread
from managed_exec.scheduling.watchdog import Watchdog
from managed_exec.sizes import format_bytes
from managed_exec.task import Task

_log = logging.getLogger("concurrent.futures")  # where the standard pool reports what befalls a worker

_STOPPED = (TaskCancelledError, TaskTimeoutError)


class WorkerOwner(Protocol):
    """What a worker needs of its executor."""

    _shutdown: bool

    def _initializer_failed(self) -> None: ...


# The result of a task, or what was raised instead.
Outcome: TypeAlias = "tuple[Any, BaseException | None]"


class TaskLanes(Protocol):
    """Where tasks run if not in the worker's own thread. See ``Lanes``."""

    def serve(self, work: Callable[[], None]) -> None: ...
    def run(
        self, task: Task, position: int | None, started: Callable[[], None], note_loss: Callable[[], None]
    ) -> Outcome: ...
    def tell_to_stop(self, task: Task) -> None: ...
    def kill(self, task: Task) -> None: ...


class Worker:
    """Run tasks until the pool shuts down, is collected, or the interpreter exits."""

    def __init__(
        self,
        owner: weakref.ref[WorkerOwner],
        tasks: TaskQueue,
        done_with: deque[None],
        make_context: Callable[[], DeviceContext],
        loads: DeviceLoads,
        appraiser: Appraiser | None,
        watchdog: Watchdog,
        health: DeviceHealth,
        initializer: Callable[..., object] | None,
        initargs: tuple[Any, ...],
        outcomes: Outcomes,
        first: tuple[Task, int | None, BaseException] | None = None,
        lanes: TaskLanes | None = None,
    ) -> None:
        self._owner = owner
        self._tasks = tasks
        # One entry for each task done with, until the next submit counts it. A deque, for its append is atomic.
        self._done_with = done_with
        self._make_context = make_context
        self._loads = loads
        self._appraiser = appraiser
        self._watchdog = watchdog
        self._running = watchdog.running
        self._clocks = watchdog.clocks
        self._health = health
        self._initializer = initializer
        self._initargs = initargs
        self._outcomes = outcomes
        self._first = first  # a task that was given up, where it ran, and its error: what to begin with
        self._lanes = lanes
        self.thread: WorkerThread  # set by the watchdog, which starts it
        self._was_given_up = False
        self._last_position: int | None = None
        self._on_cpu: DeviceContext | None = None  # for tasks that run out of device memory and may go on there

    def run(self) -> None:
        """Be the target of the worker's thread."""
        try:
            self.finish_first()
            if self._lanes is None:
                self._run()
            else:
                self._lanes.serve(self._run)
        finally:
            self._watchdog.note_worker_end(self)

    def _run(self) -> None:
        if self._initializer is not None:
            try:
                self._initializer(*self._initargs)
            except BaseException:  # noqa: BLE001 as the standard pool: reported, and the pool declared broken
                _log.critical("Exception in initializer:", exc_info=True)
                owner = self._owner()
                if owner is not None:
                    owner._initializer_failed()
                return
        try:
            context = self._make_context()
            context.move_booking = self._move_booking
            while not self._was_given_up:
                taken = self._tasks.take(self._last_position)
                if taken is not None:
                    if self._run_task(*taken, context):
                        self._done_with.append(None)
                    del taken  # or the task would live until the next one comes
                elif self._must_exit():
                    self._tasks.put(None)  # for the next worker
                    if self._loads.running or not self._is_needed(context):
                        return
        except BaseException:  # noqa: BLE001 the last resort of a thread nobody watches
            _log.critical("Exception in worker", exc_info=True)

    def _must_exit(self) -> bool:
        owner = self._owner()
        if owner is not None and not owner._shutdown and not stock._shutdown:
            return False
        if owner is not None:
            owner._shutdown = True
        return True

    def _is_needed(self, context: DeviceContext) -> bool:
        """Return whether tasks are held that only this worker may be left to start; fail those that nobody can."""
        for task in self._tasks.take_stranded():
            needed = format_bytes(task.need.n_bytes)
            error = DeviceMemoryError(
                f"{task} has not run: the pool has ended, and the {needed} that it asks for are still reserved for "
                "tasks that were given up and have not ended"
            )
            self._run_task(task, None, error, context)
            del task, error
        return self._tasks.has_held

    def _run_task(self, task: Task, position: int | None, error: BaseException | None, context: DeviceContext) -> bool:
        """Run *task*, booked at *position*; return whether it is done with: it may be to run again.

        Args:
            task: is not run if it was cancelled, or if the placement raised *error* for it.
        """
        # Of a task that has run once the future says running already. Of one that was cancelled, those who wait for it
        # are told so by this call.
        may_run = task.attempts > 0 or task.future.set_running_or_notify_cancel()
        if task.attempts > 0 and error is None and task.future.stop is not None:
            error = task.future.stop.new_error()  # it was told to stop between two runs
        if position is None or not may_run or error is not None:
            if position is not None:
                self._give_back(position, task)
            self._clocks.pop(task.future, None)
            end_without_run(task, error, self._outcomes, self.thread.name, is_cancelled=not may_run)
            del error, task
            return True
        result: Any = None
        report: BaseException | None = None  # what the device said besides
        is_mine = True  # whether it is still this worker that finishes the task
        self._note_start(task, position)
        self._running[task.future] = self, task, position
        try:
            result, error, report = self._call(task, context, position)
            if self._lanes is None and error is not None and (is_device_error(error) or report is not None):
                # While its place there is still taken, so that no other task gets it.
                self._health.examine(task.id, error if report is None else report)
            # Before the booking is given back, so that whoever finds its room knows what this task has shown.
            appraiser = self._appraiser
            if appraiser is not None:
                peak_bytes = 0 if context.last_owner is None else context.last_owner.peak_bytes
                if peak_bytes or error is not None or appraiser.holds_back:
                    out_of_memory = error is not None and is_out_of_memory(error)
                    appraiser.learn(task, peak_bytes, failed=error is not None, out_of_memory=out_of_memory)
        finally:
            self._last_position = context.position  # not the one it began on, if a call of it was made elsewhere
            if self._running.pop(task.future, None) is not None:
                if self._clocks:
                    self._clocks.pop(task.future, None)
                self._give_back(context.position, task)
            else:
                is_mine = False
                self._end_given_up(task, context.position)
        if not is_mine:
            del error, report, result, task
            return False
        if error is not None and task.options is not NO_OPTIONS and task.future.stop is None:
            on_cpu = task.options.on_oom == "cpu"
            may_run_again = on_cpu or (task.options.on_oom == "retry" and task.attempts < task.options.retries)
            if may_run_again and is_out_of_memory(error):
                drop_frames(error)
                del error, report
                self._note_retry(task, context.position, "out of memory")
                if on_cpu:
                    return self._run_on_cpu(task, context)
                task.need = task.need._replace(alone=True, unknown=None)
                self._tasks.put_back(task)
                return False
        self._outcomes.note_end(task, position, context.position, context.last_owner, error, self.thread.name)
        finish(task, result, error)
        # The traceback of the error refers to this frame, and so to whatever this frame still refers to.
        del error, report, result, task
        return True

    def _run_on_cpu(self, task: Task, context: DeviceContext) -> bool:
        """Run *task*, which ran out of device memory, on the CPU; return whether this worker is done with it."""
        if task.future.stop is not None:  # by whoever was told that it will run again
            self._clocks.pop(task.future, None)
            end_without_run(task, task.future.stop.new_error(), self._outcomes, self.thread.name, is_cancelled=False)
            return True
        self._note_start(task, None)
        self._running[task.future] = self, task, None
        result, error, _ = self._call(task, context, None)
        if self._running.pop(task.future, None) is None:
            self._was_given_up = True
            del error, result, task
            return False
        self._clocks.pop(task.future, None)
        self._outcomes.note_end(task, None, None, None, error, self.thread.name)
        finish(task, result, error)
        del error, result, task
        return True

    def _call(
        self, task: Task, context: DeviceContext, position: int | None
    ) -> tuple[Any, BaseException | None, BaseException | None]:
        """Call *task* on the device at *position*, or on the CPU if that is None.

        Returns:
            Its result, what was raised instead, and what the device said besides.
        """
        try:
            if self._lanes is not None:
                if position is not None:
                    context.position = position
                start_clock = partial(self._start_clock, task)
                return (*self._lanes.run(task, position, start_clock, partial(self._note_loss, task, position)), None)
            if task.options is not NO_OPTIONS:
                self._start_clock(task)
            if position is None:
                return run_bound(task, self._cpu_context(), 0)
            return run_bound(task, context, position)
        finally:
            del task  # the traceback of its error refers to this frame

    def _note_start(self, task: Task, position: int | None) -> None:
        """Note that a run of *task* begins on the device at *position*; on the CPU if that is None."""
        task.started_s = perf_counter()
        task.former_run = None
        if self._outcomes.are_told:
            self._outcomes.tell_start(task, position, self.thread.name)

    def _note_retry(self, task: Task, position: int | None, reason: Literal["out of memory", "process lost"]) -> None:
        """Note that a run of *task* at *position* is over for that *reason*, and another will come."""
        task.attempts += 1
        task.former_run = self._outcomes.device_at(position), perf_counter()
        if self._outcomes.are_told:
            self._outcomes.tell_retry(task, self.thread.name, reason)

    def _note_loss(self, task: Task, position: int | None) -> None:
        """Note that the process of *task* was lost, and that it begins to run again where it is booked."""
        self._watchdog.stop_clock(task.future)  # the next run's begins when it has a process
        self._note_retry(task, position, "process lost")
        if task.future.stop is None:  # else it does not run again, and may have been given up meanwhile
            self._note_start(task, position)

    def _start_clock(self, task: Task) -> None:
        if task.options.timeout is not None:
            self._watchdog.start_clock(task.future, task.options.timeout)

    def _end_given_up(self, task: Task, position: int) -> None:
        """End the run of a task that was given up, which the watchdog has made another worker finish."""
        self._loads.give_back_bytes(position, task.need)
        self._tasks.look_again()
        self._was_given_up = True

    def _move_booking(self, future: TaskFuture[Any], to_position: int) -> bool:
        """Book the running task of *future* on another device; return whether that took it."""
        run = self._running.pop(future, None)  # so that the watchdog does not give back what is on its way
        if run is None:
            return False
        _, task, position = run
        try:
            if position is None or not self._loads.move(position, to_position, task.need):
                return False
            run = self, task, to_position
            self._tasks.look_again()  # there is room where the task was
            return True
        finally:
            self._running[future] = run

    @property
    def is_of_lanes(self) -> bool:
        """Whether its tasks run in processes."""
        return self._lanes is not None

    def tell_to_stop(self, task: Task) -> None:
        """Pass on, to where *task* runs, that it is to stop, which its future says already."""
        if self._lanes is not None:
            self._lanes.tell_to_stop(task)

    def release(self, task: Task, position: int | None) -> None:
        """Free the place of *task*, which is given up, on the device at *position*; called by the watchdog."""
        if self._lanes is not None:
            self._lanes.kill(task)
        if position is not None:
            self._loads.give_back_place(position, task.need)
            self._tasks.look_again()

    def successor(self, task: Task, position: int | None, error: BaseException) -> Worker:
        """Return a worker to go on in the place of this one, whose first act is to fail *task* with *error*."""
        return Worker(
            self._owner,
            self._tasks,
            self._done_with,
            self._make_context,
            self._loads,
            self._appraiser,
            self._watchdog,
            self._health,
            self._initializer,
            self._initargs,
            self._outcomes,
            (task, position, error),
            self._lanes,
        )

    def finish_first(self) -> None:
        """Finish the task that was given up before this worker came, if any: its callbacks run here."""
        if self._first is not None:
            first, self._first = self._first, None
            task, position, error = first
            self._outcomes.note_end(task, position, position, None, error, self.thread.name)
            finish(task, None, error)
            del first, task, error
            self._done_with.append(None)

    def _give_back(self, position: int, task: Task) -> None:
        self._loads.give_back(position, task.need)
        self._tasks.look_again()

    def _cpu_context(self) -> DeviceContext:
        if self._on_cpu is None:
            self._on_cpu = DeviceContext((CpuDevice(),))
        return self._on_cpu


def end_without_run(
    task: Task, error: BaseException | None, outcomes: Outcomes, thread: str, *, is_cancelled: bool
) -> None:
    """End *task*, which was taken from the queue and is not run: with *error*, or it was cancelled and is done."""
    if is_cancelled:
        outcomes.note_cancelled(task, thread)
    else:
        outcomes.note_end(task, None, None, None, error, thread)
        finish(task, None, error)
    del error, task


def finish(task: Task, result: Any, error: BaseException | None) -> None:
    """Let go of what *task* was called with, and have its future done."""
    task.drop_call()
    try:
        if error is None:
            task.future.set_result(result)
        else:
            if isinstance(error, _STOPPED) or is_out_of_memory(error):
                drop_frames(error)
            task.future.set_exception(error)
    except BaseException:  # noqa: BLE001 a done callback's; the future is done, and later tasks need this worker
        _log.exception("exception in a done callback of task %d", task.id)
    finally:
        del error, result, task
