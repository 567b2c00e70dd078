"""The processes in which the tasks of a pool with ``workers="processes"`` run.

    worker thread: task booked on a device -> idle lane of that device, or a new one -> call sent -> reply -> lane idle

A *lane* is one process for the life of which one device is current, over a ``ProcessPoolExecutor`` of its own. A worker
has a lane for the length of a task, so on a device there are never more lanes than tasks ran there at once.

Guarantees:

- A lane that ends, for whatever reason, fails the one task that it ran, and no other. One that ended while it was idle
  fails none.
- The last worker to end ends all lanes. A lane whose pool's process is gone ends by itself.
- Nothing has a name that could outlive the processes: values travel in anonymous memory (see ``tensors.parcel``).

Locks: ``Lanes._lock``, a leaf, below the pool's others. No lane is started, called or ended under it.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import thread as stock
from dataclasses import replace
from typing import Any

import torch

from managed_exec import sim
from managed_exec.devices import Device
from managed_exec.errors import TaskCancelledError, TaskTimeoutError, WorkerLostError
from managed_exec.memory.policy import MemoryPolicy
from managed_exec.options import Need
from managed_exec.scheduling import lane_process
from managed_exec.scheduling.lane import END_GRACE_S, Lane, LaneEndedError, LaneLostError, raised_in
from managed_exec.scheduling.lane_process import Call, ProcessSettings, Reply, Setup
from managed_exec.scheduling.run import drop_frames
from managed_exec.scheduling.sendable import check_sendable
from managed_exec.scheduling.threads import have_threads_end_first
from managed_exec.scheduling.worker import Outcome
from managed_exec.task import Task
from managed_exec.tensors.parcel import Parcel, pack

_log = logging.getLogger("concurrent.futures")  # where the standard pools report what befalls a worker

_MAX_STARTS = 5  # of processes that are killed, one after the other, before they can run anything
_CPU = torch.device("cpu")


class Lanes:
    """The lanes of one pool."""

    def __init__(
        self,
        devices: Sequence[Device],
        policy: MemoryPolicy | None,
        max_workers: int,
        tasks_per_device: int | None,
        initializer: Callable[..., object] | None,
        initargs: tuple[Any, ...],
        on_broken: Callable[[], None],
    ) -> None:
        """Start nothing yet.

        Args:
            devices: the pool's.
            policy: of the pool; None: nothing is managed.
            max_workers: most lanes at once.
            tasks_per_device: most lanes on one device, if there is such a bound.
            initializer: called once in each process; with *initargs*, pickled.
            on_broken: called when it has failed, once for each failure.

        Raises:
            NotSendableError: the initializer or an argument of it cannot be pickled.
        """
        have_threads_end_first()
        self._devices = [device.torch_device for device in devices]
        self._total_bytes = functools.cache(lambda position: devices[position].memory().total_bytes)
        self._policy = policy
        on_one = tasks_per_device or math.ceil(max_workers / len(devices))
        self._lane_policy = None if policy is None else _shared_policy(policy, on_one, max_workers)
        self._initializer = None if initializer is None else (initializer, initargs)
        if initializer is not None:
            check_sendable("the initializer", initializer, initargs, {})
        self._on_broken = on_broken
        self._simulator = sim.configuration() if self._devices[0].type == "sim" else None
        self._seeds = itertools.count(torch.initial_seed() + 1)
        self._lock = threading.Lock()  # guards the fields below
        self._lane_of: dict[Task, Lane] = {}  # where tasks run now, or will: their lane may still be starting
        self._idle: dict[torch.device, list[Lane]] = {}  # by device, the one used last at the end
        self._existing: Counter[torch.device] = Counter()  # by device, idle or not
        self._workers = 0  # threads that may want a lane

    # -- for the pool -------------------------------------------------------------------------------------------------

    def capacity_bytes(self, position: int) -> int:
        """Return what the tasks on the device at *position* may reserve there together."""
        return _limited(self._policy, self._total_bytes(position))

    def largest_bytes(self, need: Need) -> int:
        """Return the most that a single lane may use of a device that *need* takes."""
        totals = [self._total_bytes(i) for i in range(len(self._devices)) if need.takes(i)]
        return max(_limited(self._lane_policy, total) for total in totals)

    def serve(self, work: Callable[[], None]) -> None:
        """Call *work*, that of a worker, in its thread; end all lanes once no worker is left."""
        with self._lock:
            self._workers += 1
        try:
            work()
        finally:
            with self._lock:
                self._workers -= 1
                last = self._workers == 0
            if last:
                self._end_idle()

    # -- for a worker -------------------------------------------------------------------------------------------------

    def run(
        self, task: Task, position: int | None, started: Callable[[], None], note_loss: Callable[[], None]
    ) -> Outcome:
        """Run *task* in a lane; return its result, or what was raised instead.

        Args:
            position: of the lane's device; None for a lane without an accelerator, where it has run on one before.
            started: called when there is a lane, each time it runs.
            note_loss: called when a lane was lost, before it runs again in another; counts the run.
        """
        device = _CPU if position is None else self._devices[position]
        if task.need.alone:
            self._end_idle(device, but=1)  # what their allocators keep is room for this one
        while True:
            try:
                return self._run_once(task, device, started)
            except BaseException as error:  # noqa: BLE001 a worker goes on whatever befalls a task
                drop_frames(error)  # they refer to arguments of the task
                n_retries = task.attempts if position is not None else task.attempts - 1  # but for that on the CPU
                may_run_again = n_retries < task.options.retries and task.future.stop is None
                if not (isinstance(error, WorkerLostError) and may_run_again):
                    return None, error
                _log.warning("%s. It runs again", error)
                note_loss()

    def tell_to_stop(self, task: Task) -> None:
        """Pass on, to the process that runs *task*, that it is to stop, which its future says already."""
        with self._lock:
            lane = self._lane_of.get(task)
        if lane is not None and task.future.stop is not None:
            lane.stop(task.id, task.future.stop)

    def kill(self, task: Task) -> None:
        """End the process that runs *task*, if one does."""
        with self._lock:
            lane = self._lane_of.get(task)
            if lane is not None:
                lane.is_condemned = True  # so that no other task gets it, should this one end now
        if lane is not None:
            lane.kill()

    def _run_once(self, task: Task, device: torch.device, started: Callable[[], None]) -> Outcome:
        """Run *task* in a lane.

        Raises:
            WorkerLostError: the process of the lane has ended.
            NotSendableError: the task cannot be sent.
            Exception: a lane cannot be started.
        """
        name = str(task)
        parcel = self._packed(task, name, device)
        try:
            lane, reply = self._called(parcel, device, task, started)
        finally:
            parcel.close()
        if reply.failure is None:
            self._put_back(lane)
            return reply.value, None
        if reply.failure.is_poisoned:
            self._end(lane)
        else:
            self._put_back(lane)
        return None, raised_in(reply.failure)

    def _called(
        self, parcel: Parcel, device: torch.device, task: Task, started: Callable[[], None]
    ) -> tuple[Lane, Reply]:
        """Have the call in *parcel* made in a lane; return the lane, which is still the caller's, and the reply."""
        while True:
            lane = self._take(device, task)
            try:
                self._note(task, lane)
            except (TaskCancelledError, TaskTimeoutError):
                self._put_back(lane)
                raise
            try:
                started()
                return lane, lane.call(lane_process.run, parcel)
            except LaneEndedError:
                self._end(lane)  # while nobody used it, so no task is lost
            except LaneLostError:
                raise WorkerLostError(self._lost(task, device, lane)) from None
            except BaseException:
                self._end(lane)  # there may be something left in its channel
                raise
            finally:
                self._forget(task)

    def _note(self, task: Task, lane: Lane) -> None:
        """Note that *task* will run in *lane*: from now on it is told to stop there, and can be ended with it.

        Raises:
            TaskCancelledError, TaskTimeoutError: it was told to stop before, and may have been given up. Nothing is
                noted.
        """
        with self._lock:
            self._lane_of[task] = lane
        stop = task.future.stop  # after the note, so that who tells it later finds the lane
        if stop is not None:
            self._forget(task)
            raise stop.new_error()

    def _forget(self, task: Task) -> None:
        with self._lock:
            self._lane_of.pop(task, None)

    def _lost(self, task: Task, device: torch.device, lane: Lane) -> str:
        """Forget *lane*, whose process has ended, and return what to say of the task that was in it."""
        text = f"{task} on {device}: its process {self._ended(lane)} before the task was done"
        if task.attempts:
            text += f", in its run number {task.attempts + 1}"
        if not task.options.retries:
            text += ". Tasks that may run twice are run again with gpu_task(retries=1) or more"
        return text

    def _packed(self, task: Task, name: str, device: torch.device) -> Parcel:
        """Return the call that runs *task*."""
        with self._lock:
            shares_device = self._existing[device] > 1
        try:
            inherits = task.context is not None
            return pack(Call(task.id, name, task.fn, task.args, task.kwargs, inherits, task.modes, shares_device))
        except Exception:
            check_sendable(name, task.fn, task.args, task.kwargs)
            raise  # each part can be sent, and all together they cannot: too many descriptors, say

    # -- lanes --------------------------------------------------------------------------------------------------------

    def _take(self, device: torch.device, task: Task) -> Lane:
        """Return a lane of *device* that the caller has for *task* alone; start one if none is idle.

        Raises:
            TaskCancelledError, TaskTimeoutError: the task was told to stop before one was started.
            WorkerLostError: the process has ended before it was ready.
            BrokenThreadPool: the user's initializer failed in it.
        """
        while True:
            with self._lock:
                idle = self._idle.get(device)
                lane = idle.pop() if idle else None
                if lane is None:
                    self._existing[device] += 1
            if lane is None:
                break
            if lane.is_alive:
                return lane
            self._end(lane)
        try:
            return self._started(device, task)
        except BaseException:
            with self._lock:
                self._existing[device] -= 1
            raise

    def _started(self, device: torch.device, task: Task) -> Lane:
        """Return a new lane of *device*, ready for tasks. One that is killed before is no task's fault: start another.

        Unless *task*, for which it is started, is to stop: then it may have been killed for that.

        Raises:
            TaskCancelledError, TaskTimeoutError: the task was told to stop before it was started.
            WorkerLostError: it has ended by itself, or too many were killed one after the other.
            BrokenThreadPool: the user's initializer failed in it.
        """
        for _ in range(_MAX_STARTS):
            with self._lock:
                seed = next(self._seeds) % 2**63
            setup = Setup(str(device), self._simulator, self._lane_policy, ProcessSettings.capture(), seed)
            if task.future.stop is not None:
                raise task.future.stop.new_error()
            lane = Lane(device)
            try:
                self._note(task, lane)
                self._call_first(lane, lane_process.prepare, setup)
                if self._initializer is not None:
                    self._call_first(lane, lane_process.initialize, self._initializer)
                return lane
            except LaneLostError:
                ending = lane.ending()
                if task.future.stop is not None:
                    raise task.future.stop.new_error() from None
                if not lane.was_killed:
                    ending += (
                        ". A program that makes the pool without `if __name__ == '__main__':` makes it in each of its "
                        "processes too; else see what the process has printed"
                    )
                    break
            except BaseException:
                lane.close()
                lane.join()
                raise
            finally:
                self._forget(task)
        raise WorkerLostError(f"{task} on {device} has not run: the process that was started for it {ending}")

    def _call_first(self, lane: Lane, function: Callable[[bytes], bytes], content: object) -> None:
        """Make one of the calls by which *lane* becomes ready."""
        parcel = pack(content)
        try:
            failure = lane.call(function, parcel).failure
        finally:
            parcel.close()
        if failure is None:
            return
        error = raised_in(failure)
        if function is not lane_process.initialize:
            raise error
        _log.critical("Exception in initializer:", exc_info=error)
        self._on_broken()
        raise stock.BrokenThreadPool("the initializer failed in the process for this task") from error

    def _put_back(self, lane: Lane) -> None:
        with self._lock:
            self._idle.setdefault(lane.device, []).append(lane)

    def _ended(self, lane: Lane) -> str:
        """Forget *lane*, which nobody else has, and return how its process has ended."""
        with self._lock:
            self._existing[lane.device] -= 1
        return lane.ending()

    def _end(self, *lanes: Lane) -> None:
        """End *lanes*, which nobody else has."""
        with self._lock:
            self._existing.subtract(lane.device for lane in lanes)
        for lane in lanes:
            lane.close()
        deadline = time.monotonic() + END_GRACE_S
        for lane in lanes:
            lane.join(deadline)

    def _end_idle(self, device: torch.device | None = None, but: int = 0) -> None:
        """End the idle lanes of *device*, or of all; leave on each as many as *but*."""
        with self._lock:
            ended = []
            for lanes in self._idle.values() if device is None else [self._idle.get(device, [])]:
                ended += lanes[: max(0, len(lanes) - but)]
                del lanes[: max(0, len(lanes) - but)]
        self._end(*ended)


def _limited(policy: MemoryPolicy | None, total_bytes: int) -> int:
    return total_bytes if policy is None else min(total_bytes, policy.limit_bytes(total_bytes))


def _shared_policy(policy: MemoryPolicy, lanes_on_device: int, lanes: int) -> MemoryPolicy:
    """Return *policy* for one of that many lanes: together they keep to what it says of a device and of the host."""
    limit = policy.limit
    if isinstance(limit, float):
        limit = limit / lanes_on_device
    elif limit is not None:
        limit = max(1, policy.limit_bytes(0) // lanes_on_device)

    def shared(n_bytes: int | None) -> int | None:
        return None if n_bytes is None else max(1, n_bytes // lanes)

    return replace(
        policy, limit=limit, host_limit=shared(policy.host_limit_bytes), disk_limit=shared(policy.disk_limit_bytes)
    )
