"""``pool.statistics()``: one frozen snapshot of what a pool has done and does.

Nothing is counted twice for it: the parts of a pool know how much they do, and the snapshot adds it up when somebody
asks. Only locks that are held for moments are taken, so it never waits for a task.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from managed_exec.devices import Device, DeviceMemory
from managed_exec.memory.manager import MemoryManager
from managed_exec.memory.statistics import MemoryStatistics
from managed_exec.scheduling.lanes import Lanes
from managed_exec.scheduling.loads import DeviceLoads
from managed_exec.scheduling.outcomes import Outcomes
from managed_exec.scheduling.queue import TaskQueue
from managed_exec.sizes import format_bytes
from managed_exec.telemetry.display import used_text

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TaskStatistics:
    """Tasks since the pool began. Submitted are as many as finished, failed, cancelled, running and queued together.

    Args:
        submitted: taken by ``submit`` and ``map``.
        queued: waiting for their first run or another one. One that is cancelled there counts until a worker comes to
            it; one on its way from the queue to its device, or from there to its future, counts here as well.
        running: being called now.
        finished: ended with a result.
        failed: ended with an error; by their timeout, too.
        cancelled: before they started, or while they ran and they did stop.
        retries: runs but the first of tasks that have ended.
        waited_s: seconds from ``submit`` to the last start, of all that have run and ended.
        ran_s: seconds of their last runs.
    """

    submitted: int
    queued: int
    running: int
    finished: int
    failed: int
    cancelled: int
    retries: int
    waited_s: float
    ran_s: float

    @property
    def ended(self) -> int:
        """Tasks that are done with, whatever became of them."""
        return self.finished + self.failed + self.cancelled


@dataclass(frozen=True)
class DeviceStatistics:
    """One device of the pool now.

    Args:
        device: which.
        running: tasks of the pool that are booked there.
        reserved_bytes: for these tasks, who said so, or had it learned.
        expected_bytes: the same and what others are guessed to need.
        limit_bytes: what may be used of the device; the next three are None, too, where to ask would cost memory of
            the device, or it does not answer.
        free_bytes: of these, what an allocation can still get.
        allocated_bytes: what tensors of this process hold; None with processes. On the CPU, the memory of the process.
        managed_bytes: what the memory manager knows of, and is there; of all pools of the process, as the next two.
        pinned_bytes: of these.
        spilled_bytes: what has left the device and can come back, by the tier where it is.
        utilization: share of the last sampling period in which it was busy, 0 to 1; None where nobody measures it.
        out_of_service: since when and why no task starts there; None: it works.
    """

    device: torch.device
    running: int
    reserved_bytes: int
    expected_bytes: int
    limit_bytes: int | None
    free_bytes: int | None
    allocated_bytes: int | None
    managed_bytes: int
    pinned_bytes: int
    spilled_bytes: Mapping[str, int]
    utilization: float | None
    out_of_service: str | None

    @property
    def used_bytes(self) -> int | None:
        """What of the limit is used, by whomever; None if that is not known."""
        if self.limit_bytes is None or self.free_bytes is None:
            return None
        return self.limit_bytes - self.free_bytes

    @property
    def memory_text(self) -> str:
        """Used and usable memory as people read it."""
        return used_text(self.used_bytes, self.limit_bytes)

    @property
    def spilled_text(self) -> str:
        """What is in which tier, as people read it; empty if nothing is."""
        return ", ".join(f"{tier} {format_bytes(n_bytes)}" for tier, n_bytes in self.spilled_bytes.items() if n_bytes)


@dataclass(frozen=True)
class PoolStatistics:
    """A pool at one time.

    Args:
        at_s: when, of ``time.perf_counter()``.
        tasks: since the pool began.
        workers: its threads now.
        max_workers: most threads.
        devices: in the pool's order.
        memory: what the memory manager of the process has done, for all pools; None where nothing is managed: on the
            CPU, with ``memory=False`` and with processes, each of which has its own.
    """

    at_s: float
    tasks: TaskStatistics
    workers: int
    max_workers: int
    devices: tuple[DeviceStatistics, ...]
    memory: MemoryStatistics | None

    def __str__(self) -> str:
        tasks = self.tasks
        lines = [
            f"tasks: {tasks.submitted} submitted, {tasks.queued} queued, {tasks.running} running, {tasks.finished} "
            f"finished, {tasks.failed} failed, {tasks.cancelled} cancelled; {tasks.retries} retries",
            f"seconds: waited {tasks.waited_s:.3f}, ran {tasks.ran_s:.3f}; workers: {self.workers} of "
            f"{self.max_workers}",
        ]
        for device in self.devices:
            line = f"{device.device}: {device.running} running, memory {device.memory_text}"
            for name, n_bytes in (
                ("managed", device.managed_bytes),
                ("pinned", device.pinned_bytes),
                ("reserved", device.reserved_bytes),
            ):
                line += f", {name} {format_bytes(n_bytes)}" if n_bytes else ""
            line += f", spilled to {device.spilled_text}" if device.spilled_text else ""
            line += "" if device.utilization is None else f", busy {device.utilization:.0%}"
            line += "" if device.out_of_service is None else f"; OUT OF SERVICE: {device.out_of_service}"
            lines.append(line)
        return "\n".join([*lines, *([] if self.memory is None else [str(self.memory)])])


class Census:
    """Adds up what the parts of a pool know. Refers to none that refers to the pool."""

    def __init__(
        self,
        devices: Sequence[Device],
        loads: DeviceLoads,
        tasks: TaskQueue,
        running: Collection[Any],
        threads: set[threading.Thread],
        max_threads: int,
        manager: MemoryManager | None,
        lanes: Lanes | None,
    ) -> None:
        """
        Args:
            running: the tasks that run.
            threads: the workers.
            manager: of the pool's memory, where it is this process's.
            lanes: the processes in which tasks run, if they do.
        """
        self._devices = devices
        self._loads = loads
        self._tasks = tasks
        self._running = running
        self._threads = threads
        self._max_threads = max_threads
        self._manager = manager
        self._lanes = lanes
        # Of whoever ends tasks. Grows with each, and is read as a copy: both are single steps.
        self.outcomes: list[Outcomes] = []

    def take(self) -> PoolStatistics:
        """Return the snapshot."""
        memory = None if self._manager is None else self._manager.statistics()
        snapshots = self._loads.snapshots()
        devices = tuple(
            DeviceStatistics(
                device.torch_device,
                snapshot.running,
                snapshot.reserved_bytes,
                snapshot.expected_bytes,
                *self._memory(position, device),
                *_managed(memory, str(device.torch_device)),
                snapshot.utilization,
                self._loads.out_of_service(position),
            )
            for position, (device, snapshot) in enumerate(zip(self._devices, snapshots, strict=True))
        )
        return PoolStatistics(
            time.perf_counter(),
            self._count(),
            sum(thread.is_alive() for thread in self._threads.copy()),
            self._max_threads,
            devices,
            memory,
        )

    def load_text(self) -> str:
        """Return what each device does, in a few words; asks for nothing else, for it is asked many times a second."""
        return ", ".join(
            f"{each.device} {each.running if self._loads.out_of_service(each.position) is None else 'out'}"
            for each in self._loads.snapshots()
        )

    def _count(self) -> TaskStatistics:
        # The last stage of a task's life first: one that goes on to the next stage meanwhile is seen in neither, and
        # counts as queued, but none is seen twice.
        outcomes = self.outcomes.copy()
        finished = sum(each.finished for each in outcomes)
        failed = sum(each.failed for each in outcomes)
        cancelled = sum(each.cancelled for each in outcomes)
        running = len(self._running)
        submitted = self._tasks.n_put
        return TaskStatistics(
            submitted,
            submitted - running - finished - failed - cancelled,
            running,
            finished,
            failed,
            cancelled,
            sum(each.retries for each in outcomes),
            sum(each.waited_s for each in outcomes),
            sum(each.ran_s for each in outcomes),
        )

    def _memory(self, position: int, device: Device) -> tuple[int | None, int | None, int | None]:
        """Return what may be used of a device, what of it is free, and what this process's tensors hold."""
        # Elsewhere the answer would take a context, hundreds of megabytes, that this process may never need.
        if not (device.read_leaves_no_trace or (self._lanes is None and self._loads.was_used(position))):
            return None, None, None
        try:
            memory = self._read(device)
            if self._lanes is None:
                return memory.total_bytes, memory.free_bytes, memory.allocated_bytes
            limit = self._lanes.capacity_bytes(position)
            return limit, min(memory.free_bytes, limit), None
        except Exception as error:  # noqa: BLE001 a device that broke: the rest of the snapshot is wanted all the more
            _log.debug("cannot read %r: %s", device, error)
            return None, None, None

    def _read(self, device: Device) -> DeviceMemory:
        return device.memory() if self._manager is None else self._manager.limits.memory(device.torch_device)


def _managed(memory: MemoryStatistics | None, device: str) -> tuple[int, int, Mapping[str, int]]:
    """Return what of *device* is managed and there, what of that is pinned, and what is away."""
    if memory is None:
        return 0, 0, {}
    return memory.managed_bytes.get(device, 0), memory.pinned_bytes.get(device, 0), memory.away_bytes.get(device, {})
