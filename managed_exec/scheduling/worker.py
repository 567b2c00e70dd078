"""One thread of a pool: takes tasks from the queue and runs them, each bound to a device.

The life of a task in its worker, in this order, so that whoever sees the future done finds everything given back:

    future running -> book a device -> enter the device context -> call -> wait for its device work
        -> leave the context -> give the booking back -> drop arguments -> future done

A worker refers to its executor only weakly, so that a pool nobody holds any more can be collected and its workers end.
"""

from __future__ import annotations

import logging
import traceback
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import thread as stock
from queue import SimpleQueue
from typing import Any, Protocol

import torch

from managed_exec.context import DeviceContext
from managed_exec.scheduling.loads import DeviceLoads
from managed_exec.task import Task

_log = logging.getLogger("concurrent.futures")  # where the standard pool reports what befalls a worker


class WorkerOwner(Protocol):
    """What a worker needs of its executor."""

    _shutdown: bool

    def _initializer_failed(self) -> None: ...


class Worker:
    """Run tasks until the pool shuts down, is collected, or the interpreter exits."""

    def __init__(
        self,
        owner: weakref.ref[WorkerOwner],
        tasks: SimpleQueue[Task | None],
        done_with: deque[None],
        make_context: Callable[[], DeviceContext],
        loads: DeviceLoads,
        initializer: Callable[..., object] | None,
        initargs: tuple[Any, ...],
    ) -> None:
        self._owner = owner
        self._tasks = tasks
        # One entry for each task done with, until the next submit counts it. A deque, for its append is atomic.
        self._done_with = done_with
        self._make_context = make_context
        self._loads = loads
        self._initializer = initializer
        self._initargs = initargs
        self._last_position: int | None = None

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
            context.move_booking = self._loads.move
            while True:
                task = self._tasks.get()
                if task is not None:
                    self._run_task(task, context)
                    del task  # or the task would live until the next one comes
                    self._done_with.append(None)
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

    def _run_task(self, task: Task, context: DeviceContext) -> None:
        if not task.future.set_running_or_notify_cancel():
            return
        result: Any = None
        error: BaseException | None = None
        try:
            position = self._loads.book(self._last_position)
        except BaseException as raised:  # noqa: BLE001 belongs to the task's future, whatever it is
            error = raised
        else:
            try:
                result, error = _run_bound(task, context, position)
            finally:
                self._last_position = context.position  # not the one it began on, if a call of it was made elsewhere
                self._loads.give_back(context.position)
        task.drop_call()
        try:
            if error is None:
                task.future.set_result(result)
            else:
                _drop_frames_of_out_of_memory(error)
                task.future.set_exception(error)
        except BaseException:  # noqa: BLE001 a done callback's; the future is done, and later tasks need this worker
            _log.exception("exception in a done callback of task %d", task.id)
        # The traceback of the error refers to this frame, and so to whatever this frame still refers to.
        del error, result, task


def _run_bound(task: Task, context: DeviceContext, position: int) -> tuple[Any, BaseException | None]:
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


def _drop_frames_of_out_of_memory(error: BaseException) -> None:
    """Let go of the locals of every frame that an out-of-memory error, or one raised from it, came through.

    An exception keeps the frames, and so the tensors, of the task that raised it for as long as its future lives; for
    an out-of-memory error that is the very memory that is missing. The traceback stays readable.
    """
    chain: list[BaseException] = []
    pending: list[BaseException | None] = [error]
    while pending:
        current = pending.pop()
        if current is not None and not any(current is link for link in chain):
            chain.append(current)
            pending += [current.__cause__, current.__context__]
    if any(isinstance(link, torch.OutOfMemoryError) for link in chain):
        for link in chain:
            traceback.clear_frames(link.__traceback__)
