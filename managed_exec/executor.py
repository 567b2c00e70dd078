"""``GPUPoolExecutor``: a thread pool whose tasks run on the devices of the machine.

    submit -> queue -> worker: device booked, context entered, task called, device work waited for -> future

The executor owns the queue, the loads and the threads; each worker has its own device context. Locks, outermost first:

1. ``_shutdown_lock`` (of the standard pool): the shutdown and broken flags, and the set of threads.
2. the standard pool's global lock: that no worker is started while the interpreter exits.
3. ``TaskQueue._lock``: the tasks that wait.
4. ``DeviceLoads._lock``: the bookings. A leaf.
5. ``Footprints._lock``: what was learned of the tasks' memory. A leaf, taken beside no other.
6. ``Lanes._lock``: the processes that are idle. A leaf.

The watchdog takes the first two to replace a thread, and has no lock of its own that anyone waits for. A future's own
lock is a leaf too, and so are those that bars and metrics count under. A view takes the second alone, to start.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import thread as stock
from contextlib import AbstractContextManager
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Any, Literal, TextIO, TypeVar, cast

import torch

from managed_exec.config import (
    checked_flag,
    checked_max_workers,
    checked_memory,
    checked_need,
    checked_placement,
    checked_tasks_per_device,
    checked_workers,
)
from managed_exec.context import DeviceContext
from managed_exec.devices import CpuDevice, resolve_devices
from managed_exec.devices.discovery import DeviceLike
from managed_exec.events import Hook, Hooks, TaskSubmitted
from managed_exec.inheritance import SubmitterModes, SubmitterStreams
from managed_exec.managed_context import ManagedContext
from managed_exec.memory.limits import Limits, capacity_bytes
from managed_exec.memory.manager import MemoryManager, configure
from managed_exec.memory.manager import manager as process_manager
from managed_exec.memory.policy import MemoryPolicy
from managed_exec.options import ANY, NO_OPTIONS, options_of
from managed_exec.scheduling.appraisal import Appraiser
from managed_exec.scheduling.ending import call_if_there, cancel_waiting, fail_waiting, join_all
from managed_exec.scheduling.footprints import Footprints
from managed_exec.scheduling.health import DeviceHealth
from managed_exec.scheduling.lanes import Lanes
from managed_exec.scheduling.loads import DeviceLoads
from managed_exec.scheduling.outcomes import Outcomes, tell_not_run
from managed_exec.scheduling.placement import Placement
from managed_exec.scheduling.queue import TaskQueue
from managed_exec.scheduling.threads import start_thread
from managed_exec.scheduling.watchdog import Watchdog
from managed_exec.scheduling.worker import Worker
from managed_exec.streaming import begin_map
from managed_exec.task import Task
from managed_exec.telemetry.observers import Observers
from managed_exec.telemetry.progress import with_progress
from managed_exec.telemetry.sampler import DeviceSampler
from managed_exec.telemetry.statistics import Census, PoolStatistics
from managed_exec.telemetry.watch import View

T = TypeVar("T")


class GPUPoolExecutor(ThreadPoolExecutor):
    """A ``ThreadPoolExecutor`` that binds each task to a device when it starts.

    In a task ``"cuda"`` without an index, and ``.cuda()``, mean the task's device: a GPU, a simulated device or, where
    there is no accelerator, the CPU. A future is done when the device work of its task is done.

    Args:
        max_workers: most tasks at once, on all devices together. By default as many as the standard pool takes, but at
            least one for each device, and with processes exactly one for each; with ``tasks_per_device``, exactly what
            the devices take.
        thread_name_prefix: as in the standard pool, like the next two.
        initializer: called once in each worker thread, outside any task.
        initargs: its arguments.
        devices: None for every accelerator there is, else the CPU; or a count, indices, strings, ``torch.device``
            objects. All of one kind.
        tasks_per_device: most tasks at once on one device; None for no bound but ``max_workers``.
        placement: which device a task gets: ``"least-loaded"``, ``"round-robin"``, ``"pack"``, or a function like
            these (see ``managed_exec.scheduling``).
        memory: what may be done when a device has no room: what tasks create on an accelerator is managed, it can leave
            the device and come back. The process has one memory manager, so all pools that have a policy have the same;
            None is for that one, or the default. False: nothing is managed, and a device without room is the task's
            error.
        inherit_context: whether context variables, grad mode, inference mode and autocast of the submitting thread
            hold in the task. False gives the standard pool's behaviour.
        workers: ``"threads"``, or ``"processes"``: tasks run in processes of their device, so that one that crashes
            takes no other with it, and fails with ``WorkerLostError`` (or runs again, see ``gpu_task``). What a task is
            given and returns is pickled then; tensors arrive on the CPU, wherever they were. Context variables stay
            here, for they cannot be pickled in general. The initializer runs in each process.
        hooks: callables that are told what happens, one event at a time, in the thread where it happens; see
            ``managed_exec.events``. Moves of memory are those of the whole process.

    Raises:
        ValueError: a number below one, no or unknown devices, an unknown placement or kind of workers. The text says
            what is there.
        TypeError: an argument of the wrong type.
    """

    def __init__(
        self,
        max_workers: int | None = None,
        thread_name_prefix: str = "",
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
        *,
        devices: int | DeviceLike | Iterable[DeviceLike] | None = None,
        tasks_per_device: int | None = None,
        placement: str | Placement = "least-loaded",
        memory: MemoryPolicy | Literal[False] | None = None,
        inherit_context: bool = True,
        workers: Literal["threads", "processes"] = "threads",
        hooks: Iterable[Hook] = (),
    ) -> None:
        tasks_per_device = checked_tasks_per_device(tasks_per_device)
        place = checked_placement(placement)
        max_workers = checked_max_workers(max_workers)
        memory = checked_memory(memory)
        in_processes = checked_workers(workers) == "processes"
        self._hooks = Hooks(hooks)
        self._devices = resolve_devices(devices)
        device_tasks = None if tasks_per_device is None else tasks_per_device * len(self._devices)
        if max_workers is None and device_tasks is None and in_processes:
            max_workers = len(self._devices)
        super().__init__(max_workers or device_tasks, thread_name_prefix, initializer, initargs)
        if max_workers is None and device_tasks is None:
            self._max_workers = max(self._max_workers, len(self._devices))
        # A worker more than the devices take tasks would have nothing to do but wait for one of them.
        self._max_threads = self._max_workers if device_tasks is None else min(self._max_workers, device_tasks)
        self._workers = cast("set[threading.Thread]", self._threads)  # the standard pool's, which its shutdown joins
        self._thread_initializer = initializer, initargs
        self._inherit_context = checked_flag(inherit_context, "inherit_context")
        self._accelerators = tuple(device for device in self._devices if device.is_accelerator)
        # In the worker's own thread; refers to nothing of this object, which may be collected before its workers end.
        self._make_context: Callable[[], DeviceContext] = partial(DeviceContext, self._devices)
        limits: Limits | None = None
        holds_back = False  # tasks, by what earlier ones of their functions have needed
        withdraw: Callable[[torch.device], None] | None = None
        self._policy_holders: weakref.WeakSet[object] | None = None
        # Whose streams a task waits for. Tasks in processes wait when their arguments are copied.
        self._awaited = () if in_processes else self._accelerators
        self._lanes: Lanes | None = None
        manager: MemoryManager | None = None  # where it is this process's
        if in_processes:
            policy = (memory or process_manager().policy) if memory is not False and self._accelerators else None
            broken = weakref.WeakMethod(self._initializer_failed)
            self._lanes = Lanes(
                self._devices,
                policy,
                self._max_threads,
                tasks_per_device,
                initializer,
                initargs,
                partial(call_if_there, broken),
            )
            self._thread_initializer = None, ()
            self._make_context = partial(DeviceContext, (CpuDevice(),))
        elif memory is not False and self._accelerators:
            holder = None if memory is None else self
            manager = configure(memory, [device.torch_device for device in self._accelerators], holder)
            self._policy_holders = manager.holders
            self._make_context = partial(ManagedContext, self._devices, manager)
            limits = manager.limits
            holds_back = manager.policy.admission == "learned"
            withdraw = limits.withdraw
        capacity = self._lanes.capacity_bytes if self._lanes else partial(capacity_bytes, self._devices, limits)
        self._loads = DeviceLoads(self._devices, tasks_per_device, place, capacity)
        self._footprints = Footprints()
        self._appraiser: Appraiser | None = None
        if self._accelerators and not in_processes:  # whose memory is not seen here
            measures = limits is not None
            self._appraiser = Appraiser(self._devices, self._loads, self._footprints, measures, holds_back)
        self._tasks = TaskQueue(self._loads, self._appraiser if len(self._devices) > 1 or holds_back else None)
        self._work_queue = cast("Any", self._tasks)  # where the standard pool's shutdown looks for tasks to cancel
        self._health = DeviceHealth(self._devices, self._loads, withdraw)
        self._watchdog = Watchdog(
            self._workers, self._shutdown_lock, self._tasks, f"{self._thread_name_prefix}_watchdog"
        )
        running, most = self._watchdog.running, self._max_threads
        census = Census(self._devices, self._loads, self._tasks, running, self._workers, most, manager, self._lanes)
        self._observers = Observers(self._hooks, manager, census, f"{self._thread_name_prefix}_view")
        self._sampler: DeviceSampler | None = None  # runs from the first submit on, where there is a choice of devices
        # Tasks submitted and not yet known to be done with, and those done with since; the first is guarded by the
        # shutdown lock. A thread is started when there are more tasks than threads: counting idle threads instead
        # would miss one that has just been given a task and has not taken it yet.
        self._unfinished = 0
        self._done_with: deque[None] = deque()
        self._task_ids = itertools.count()

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Schedule ``fn(*args, **kwargs)`` and return its future.

        Every keyword goes to *fn*, none is read here.

        Raises:
            RuntimeError: the pool or the interpreter is shutting down.
            BrokenThreadPool: an initializer failed.
            ValueError: by ``gpu_task`` *fn* wants a device that the pool has not, or more memory than any has.
        """
        options = options_of(fn)
        task = Task(
            next(self._task_ids),
            fn,
            args,
            kwargs,
            copy_context() if self._inherit_context else None,
            SubmitterModes.capture(self._devices[0].torch_device.type) if self._inherit_context else None,
            SubmitterStreams.capture(self._awaited) if self._awaited else None,
            options,
            ANY if options is NO_OPTIONS else checked_need(options, self._devices, self._loads, self._lanes),
        )
        task.future.watcher = self._watchdog
        is_told = self._hooks.hooks and not (self._broken or self._shutdown or stock._shutdown)
        if is_told:
            try:
                self._hooks.emit(TaskSubmitted(task.id, task.name, task.submitted_s))
            except KeyboardInterrupt as interrupt:
                tell_not_run(self._hooks, task, interrupt, threading.current_thread().name)
                raise
        refusal: RuntimeError | None = None
        with self._shutdown_lock, stock._global_shutdown_lock:
            if self._broken:
                refusal = stock.BrokenThreadPool(self._broken)
            elif self._shutdown:
                refusal = RuntimeError("cannot schedule new futures after shutdown")
            elif stock._shutdown:
                refusal = RuntimeError("cannot schedule new futures after interpreter shutdown")
            else:
                self._tasks.put(task)
                while self._done_with:
                    self._done_with.pop()
                    self._unfinished -= 1
                self._unfinished += 1
                if self._unfinished > len(self._workers) < self._max_threads:
                    self._start_worker()
        if refusal is not None:
            if is_told:
                tell_not_run(self._hooks, task, refusal, threading.current_thread().name)
            raise refusal
        return task.future

    def map(
        self,
        fn: Callable[..., T],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
        in_flight: int | str | None = None,
        progress: bool = False,
        **newer: Any,
    ) -> Iterator[T]:
        """Return an iterator over ``fn(*args)`` of each *args* of ``zip(*iterables)``, in order.

        Args:
            fn: what is called, in tasks.
            iterables: its arguments.
            timeout: seconds from now until the last result; None for no bound.
            chunksize: has no effect, as in any pool of threads.
            in_flight: bytes, or text such as ``"2GiB"``, of arguments and results that there may be at once, from
                ``submit`` until the result is taken: what does not fit is not taken from *iterables* yet. Counted are
                tensors, arrays and byte strings, also in containers; see ``managed_exec.streaming``. None: everything
                is submitted at once, as in the standard pool.
            progress: whether a bar shows how many calls are done, and what the devices do; see ``telemetry.progress``.
            newer: what ``map`` of later Pythons takes: ``buffersize``, the most calls that are in flight.

        Raises:
            TypeError, ValueError: *in_flight* cannot be read, or is not positive.
            TimeoutError, or what a call raised: from the iterator, which cancels what has not started.
        """
        begin = partial(begin_map, fn, iterables, in_flight, timeout, chunksize, newer)
        if checked_flag(progress, "progress"):
            return with_progress(self._observers, self.submit, begin, fn, iterables)
        return begin(self)

    @property
    def footprints(self) -> Footprints:
        """What the pool has learned of the memory that each function's tasks need.

        Empty in a new pool; ``load`` brings in what another has saved. Nothing is learned on the CPU, nor with
        ``memory=False``.
        """
        return self._footprints

    def trace(self, path: str | Path) -> AbstractContextManager[None]:
        """Write to *path*, at the end of the block, a trace of what the pool does in it.

        https://ui.perfetto.dev and ``chrome://tracing`` show it: tasks and waits by device and worker, spilled bytes by
        tier, calls made elsewhere. Times fit those of ``torch.profiler``.

        Raises:
            OSError: the file cannot be written; raised at the beginning of the block, as far as can be told then.
        """
        return self._observers.trace(path)

    def statistics(self) -> PoolStatistics:
        """Return what the pool has done and does now; printed, it is lines for people. Waits for no task."""
        return self._observers.census.take()

    def watch(self, interval_s: float | None = None, *, file: TextIO | None = None) -> View:
        """Return a view of the pool's devices, tasks and rates, which is live in a ``with`` block.

        On a terminal rich draws it in place, where it is installed, and in a notebook its cell is rewritten; else there
        is a line now and then.

        Args:
            interval_s: seconds between two looks; None for half a second in place, and five from line to line.
            file: where to; None for the notebook's cell, or standard error.

        Raises:
            TypeError, ValueError: *interval_s* is no number of seconds from 0.05 to 86400.
            RuntimeError: when it is to start, if the pool is shut down.
        """
        return self._observers.view(interval_s, file)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        try:
            if cancel_futures:
                with self._shutdown_lock:
                    self._shutdown = True  # so that nothing comes into the queue any more
                cancel_waiting(self._tasks, self._new_outcomes())
        finally:
            super().shutdown(False)
        has_waited = False
        try:
            if wait:
                join_all(self._workers, self._shutdown_lock)  # raises in a task of the pool
                has_waited = True
        finally:
            if self._policy_holders is not None:
                self._policy_holders.discard(self)  # another pool may bring another policy now
            if self._sampler is not None:
                self._sampler.end(wait=has_waited)
            if has_waited:
                self._watchdog.join()
            self._observers.close(wait=has_waited)

    shutdown.__doc__ = ThreadPoolExecutor.shutdown.__doc__

    def _new_outcomes(self) -> Outcomes:
        """Return what one thread notes the outcomes of tasks by."""
        outcomes = Outcomes(self._loads, self._hooks)
        self._observers.census.outcomes.append(outcomes)
        return outcomes

    def _initializer_failed(self) -> None:
        """Declare the pool broken, and fail all that waits.

        The standard pool's own stops at the first future that was cancelled, and takes away what ``shutdown`` has put
        for the workers.
        """
        reason: Any = "A thread initializer failed, the thread pool is not usable anymore"
        with self._shutdown_lock:
            self._broken = reason
        fail_waiting(self._tasks, self._new_outcomes(), reason)
        self._tasks.put(None)

    def _start_worker(self) -> None:
        """Start one more worker. The first two locks are held."""
        if self._sampler is None and len(self._accelerators) > 1:
            sampler = DeviceSampler(self._devices, self._loads, f"{self._thread_name_prefix}_sampler")
            start_thread(sampler.thread, sampler.wake)
            self._sampler = sampler
        tasks, watchdog = self._tasks, self._watchdog
        wake = None if self._sampler is None else self._sampler.wake

        def wake_all(_: object) -> None:
            """Wake the threads of a pool that was collected, so that they end."""
            tasks.put(None)
            if wake is not None:
                wake.put(None)

        worker = Worker(
            weakref.ref(self, wake_all),
            tasks,
            self._done_with,
            self._make_context,
            self._loads,
            self._appraiser,
            watchdog,
            self._health,
            *self._thread_initializer,
            self._new_outcomes(),
            lanes=self._lanes,
        )
        watchdog.start_worker(worker, f"{self._thread_name_prefix}_{len(self._workers)}")
