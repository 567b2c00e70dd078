"""One thread of a pool: takes tasks from the queue and runs them, each bound to a device.

The life of a task in its worker, in this order, so that whoever sees the future done finds everything given back:

    book a device -> future running -> enter the device context -> call -> wait for its device work
        -> leave the context -> give the booking back -> drop arguments -> future done

A task that ran out of device memory, and may run again, goes back to the queue instead of the last two steps.

A worker refers to its executor only weakly, so that a pool nobody holds any more can be collected and its workers end.
"""

from __future__ import annotations

import logging
import traceback
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import thread as stock
from functools import partial
from typing import Any, Protocol

import torch

from managed_exec.context import DeviceContext
from managed_exec.devices import CpuDevice
from managed_exec.options import ANY, NO_OPTIONS
from managed_exec.scheduling.loads import DeviceLoads
from managed_exec.scheduling.queue import TaskQueue
from managed_exec.task import Task

_log = logging.getLogger("concurrent.futures")  # where the standard pool reports what befalls a worker


class WorkerOwner(Protocol):
    """What a worker needs of its executor."""

    _shutdown: bool

    def _initializer_failed(self) -> None: ...


class TaskLanes(Protocol):
    """Where tasks run if not in the worker's own thread. Both return the result, or what was raised instead."""

    def run(self, task: Task, position: int) -> tuple[Any, BaseException | None]: ...
    def run_on_cpu(self, task: Task) -> tuple[Any, BaseException | None]: ...


class Worker:
    """Run tasks until the pool shuts down, is collected, or the interpreter exits."""

    def __init__(
        self,
        owner: weakref.ref[WorkerOwner],
        tasks: TaskQueue,
        done_with: deque[None],
        make_context: Callable[[], DeviceContext],
        loads: DeviceLoads,
        initializer: Callable[..., object] | None,
        initargs: tuple[Any, ...],
        lanes: TaskLanes | None = None,
    ) -> None:
        self._owner = owner
        self._tasks = tasks
        # One entry for each task done with, until the next submit counts it. A deque, for its append is atomic.
        self._done_with = done_with
        self._make_context = make_context
        self._loads = loads
        self._initializer = initializer
        self._initargs = initargs
        self._lanes = lanes
        self._last_position: int | None = None
        self._on_cpu: DeviceContext | None = None  # for tasks that run out of device memory and may go on there

    def run(self) -> None:
        """Be the target of the worker's thread."""
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
            while True:
                taken = self._tasks.take(self._last_position)
                if taken is not None:
                    if self._run_task(*taken, context):
                        self._done_with.append(None)
                    del taken  # or the task would live until the next one comes
                elif self._must_exit():
                    self._tasks.put(None)  # for the next worker
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

    def _run_task(self, task: Task, position: int | None, error: BaseException | None, context: DeviceContext) -> bool:
        """Run *task*, booked at *position*; return whether it is done with: it may be to run again.

        Args:
            task: is not run if it was cancelled, or if the placement raised *error* for it.
        """
        # Of a task that has run once the future says running already. Of one that was cancelled, those who wait for it
        # are told so by this call.
        may_run = task.attempts > 0 or task.future.set_running_or_notify_cancel()
        if position is None or not may_run:
            if position is not None:
                self._give_back(position, task)
            if may_run:
                _finish(task, None, error)
            del error, task
            return True
        move = self._loads.move
        context.move_booking = move if task.need is ANY else partial(move, need=task.need)
        result: Any = None
        try:
            if self._lanes is None:
                result, error = run_bound(task, context, position)
            else:
                context.position = position
                result, error = self._lanes.run(task, position)
        finally:
            self._last_position = context.position  # not the one it began on, if a call of it was made elsewhere
            self._give_back(context.position, task)
        if error is not None and task.options is not NO_OPTIONS and is_out_of_memory(error):
            if task.options.on_oom == "retry" and task.attempts < task.options.retries:
                drop_frames(error)
                del error
                task.attempts += 1
                task.need = task.need._replace(alone=True)
                self._tasks.put_back(task)
                return False
            if task.options.on_oom == "cpu":
                drop_frames(error)
                error = None
                if self._lanes is None:
                    result, error = run_bound(task, self._cpu_context(), 0)
                else:
                    result, error = self._lanes.run_on_cpu(task)
        _finish(task, result, error)
        # The traceback of the error refers to this frame, and so to whatever this frame still refers to.
        del error, result, task
        return True

    def _give_back(self, position: int, task: Task) -> None:
        self._loads.give_back(position, task.need)
        self._tasks.look_again()

    def _cpu_context(self) -> DeviceContext:
        if self._on_cpu is None:
            self._on_cpu = DeviceContext((CpuDevice(),))
        return self._on_cpu


def _finish(task: Task, result: Any, error: BaseException | None) -> None:
    """Let go of what *task* was called with, and have its future done."""
    task.drop_call()
    try:
        if error is None:
            task.future.set_result(result)
        else:
            if is_out_of_memory(error):
                drop_frames(error)
            task.future.set_exception(error)
    except BaseException:  # noqa: BLE001 a done callback's; the future is done, and later tasks need this worker
        _log.exception("exception in a done callback of task %d", task.id)
    finally:
        del error, result, task


def run_bound(task: Task, context: DeviceContext, position: int) -> tuple[Any, BaseException | None]:
    """Run *task* on the device at *position*; return its result, or what it or its device raised."""
    result: Any = None
    error: BaseException | None = None
    # The call is written out here, for each frame between this one and the task's would keep its arguments alive as
    # long as the error of a failed task lives.
    try:
        context.enter(position, task.id, task.streams)
        modes = task.modes or context.fresh_modes
        if task.context is None:  # nothing is inherited
            result = task.fn(*task.args, **task.kwargs)
        elif modes is None:
            result = task.context.run(task.fn, *task.args, **task.kwargs)
        else:
            with modes.applied():
                result = task.context.run(task.fn, *task.args, **task.kwargs)
    except BaseException as raised:  # noqa: BLE001 a task may raise anything; all of it belongs to its future
        error = raised
    try:
        context.leave()
        if context.shares_results:
            context.share(result, task.streams)
    except BaseException as raised:  # noqa: BLE001 likewise; containers in a result run code of the user's
        result = None
        if error is None:
            error = raised
        else:
            # The task's own error comes first; what its device had to say besides is most often the same.
            _log.warning("task %d failed, and then its device reported: %r", task.id, raised)
    try:
        return result, error
    finally:
        del error, result, task


def error_chain(error: BaseException) -> list[BaseException]:
    """Return *error* and all that it was raised from or beside."""
    chain: list[BaseException] = []
    pending: list[BaseException | None] = [error]
    while pending:
        current = pending.pop()
        if current is not None and not any(current is link for link in chain):
            chain.append(current)
            pending += [current.__cause__, current.__context__]
    return chain


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether *error* is an out-of-memory error, or was raised from one."""
    return any(isinstance(link, torch.OutOfMemoryError) for link in error_chain(error))


def drop_frames(error: BaseException) -> None:
    """Let go of the locals of every frame that *error*, and what it was raised from, came through.

    An exception keeps the frames, and so the tensors, of the task that raised it for as long as its future lives; for
    an out-of-memory error that is the very memory that is missing. The traceback stays readable.
    """
    for link in error_chain(error):
        traceback.clear_frames(link.__traceback__)
