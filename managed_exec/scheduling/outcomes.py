"""What becomes of tasks: noted for their receipts, counted, and told to hooks."""

from __future__ import annotations

from concurrent.futures import CancelledError
from time import perf_counter
from typing import Literal

import torch

from managed_exec.errors import TaskCancelledError
from managed_exec.events import Hooks, TaskFinished, TaskRetried, TaskStarted
from managed_exec.memory.owner import Owner
from managed_exec.receipt import NOTHING_MOVED, RunFacts
from managed_exec.scheduling.loads import DeviceLoads
from managed_exec.task import Task

_CPU = torch.device("cpu")


class Outcomes:
    """Notes what a worker of a pool reports.

    Each worker has its own, or shares it with the one whose place it took, which reports no more. So the counts are
    changed by one thread at a time, without a lock; whoever wants those of the pool adds them up.
    """

    def __init__(self, loads: DeviceLoads, hooks: Hooks) -> None:
        self._loads = loads
        self._hooks = hooks
        self.finished = self.failed = self.cancelled = self.retries = 0  # tasks; the last: runs but the first
        self.waited_s = self.ran_s = 0.0  # of all tasks that have run, as in their receipts

    @property
    def are_told(self) -> bool:
        """Whether anybody listens."""
        return bool(self._hooks.hooks)

    def device_at(self, position: int | None) -> torch.device:
        """Return the device at *position*; the CPU if that is None."""
        return _CPU if position is None else self._loads.devices[position]

    def tell_start(self, task: Task, position: int | None, worker: str) -> None:
        """Tell that *task* is about to be called on the device at *position*; on the CPU if that is None."""
        started_s = perf_counter() if task.started_s is None else task.started_s
        start = TaskStarted(task.id, task.name, self.device_at(position), worker, task.attempts, started_s)
        self._hooks.emit(start)

    def tell_retry(self, task: Task, worker: str, reason: Literal["out of memory", "process lost"]) -> None:
        """Tell that a run of *task* is over for that *reason*, and another will come."""
        self._hooks.emit(TaskRetried(task.id, task.name, worker, perf_counter(), reason))

    def note_end(
        self,
        task: Task,
        position: int | None,
        end: int | None,
        owner: Owner | None,
        error: BaseException | None,
        worker: str,
    ) -> None:
        """Note what became of *task*, and tell those who listen, before its future is done.

        Args:
            position: of the device that it was booked on; None if on none, in the end.
            end: of the device that it ended on: a call of it may have been made elsewhere.
            owner: the task to the memory manager; None where nothing was counted.
            error: what it has raised, or why it was not run.
            worker: the name of the worker's thread.
        """
        now = perf_counter()
        ended_s = now if task.former_run is None else task.former_run[1]
        if task.started_s is not None:
            self.waited_s += task.started_s - task.submitted_s
            self.ran_s += ended_s - task.started_s
        if error is None:
            self.finished += 1
        elif isinstance(error, TaskCancelledError):
            self.cancelled += 1
        else:
            self.failed += 1
        self.retries += task.attempts
        device: torch.device | None = None
        if task.started_s is None:
            reason = "it has not run"
        elif task.former_run is not None:
            device, reason = task.former_run[0], "it was to run again after a run there, and has not"
        elif position is None or end is None:
            device, reason = _CPU, "it ran out of device memory, and on_oom='cpu'"
        else:
            device, reason = self._loads.devices[end], self._loads.reason(task.need, position)
            if end != position:
                reason += f"; moved from {self._loads.devices[position]}, which had no room for a call of it"
        task.future.facts = RunFacts(
            device,
            reason,
            task.submitted_s,
            task.started_s,
            ended_s,
            task.attempts,
            task.need.n_bytes or task.need.expected_bytes,
            None if owner is None else owner.peak_bytes,
            dict(owner.moved_bytes) if owner is not None and owner.moved_bytes else NOTHING_MOVED,
            0 if owner is None else owner.migrated,
            None if error is None else type(error),
        )
        if self._hooks.hooks:
            times = task.submitted_s, task.started_s, now
            self._hooks.emit(TaskFinished(task.id, task.name, device, worker, *times, error, task.attempts))

    def note_cancelled(self, task: Task, thread: str) -> None:
        """Note that *task*, which was cancelled while it waited, has left the queue."""
        self.cancelled += 1
        tell_not_run(self._hooks, task, CancelledError(), thread)


def tell_not_run(hooks: Hooks, task: Task, error: BaseException, thread: str) -> None:
    """Tell that *task*, whose submission was told, ends in *thread* without having run."""
    if hooks.hooks:
        times = task.submitted_s, None, perf_counter()
        hooks.emit(TaskFinished(task.id, task.name, None, thread, *times, error))
