"""The tasks that no device took when it was their turn, and which of them is to be tried next.

Tasks that ask for the same are a group, for whether a device has room for them need be asked only once: to find the
task that starts next takes as long as there are groups, however many tasks they have.

The first task of a group may be passed by later ones, a bounded number of times; then a device is kept free for it,
until it has room (``DeviceLoads.keep_for``). Devices are kept for the first of a group only: nobody tries the others,
so they would block what is kept for them.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Hashable
from typing import TypeAlias

from managed_exec.options import ANY, Need
from managed_exec.scheduling.appraisal import Appraiser
from managed_exec.scheduling.loads import DeviceLoads
from managed_exec.task import Task

# How many tasks may start before one that was held when they came, on a device that it could run on.
MAX_PASSED = 16

# Of tasks: the negated priority, then the age. The smallest starts first.
Order: TypeAlias = "tuple[int, float]"


class HeldTask:
    """A task that no device took when it was its turn."""

    __slots__ = ("order", "passed", "task")

    def __init__(self, task: Task, age: float) -> None:
        self.task = task
        self.order: Order = (-task.options.priority, age)
        # Later tasks that have started on devices that it could have had; in a group, less than those of the group.
        self.passed = 0

    def __lt__(self, other: HeldTask) -> bool:
        return self.order < other.order


class _Group:
    """Tasks that ask for the same; at least one."""

    __slots__ = ("heap", "passed")

    def __init__(self) -> None:
        self.heap: list[HeldTask] = []
        self.passed = 0  # tasks started since that came after the first, on devices that it could have had


class HeldTasks:
    """The held tasks of a queue, whose lock guards them. Takes the lock of the loads."""

    def __init__(self, loads: DeviceLoads, appraiser: Appraiser | None) -> None:
        self._loads = loads
        self._appraiser = appraiser
        self._groups: dict[Hashable, _Group] = {}
        self._ages = itertools.count()
        self._ages_again = itertools.count(-(2**62))  # of tasks that have run: before all others
        self._count = 0  # read without the lock

    def __len__(self) -> int:
        return self._count

    def add(self, task: Task) -> None:
        """Hold a *task* that has not run."""
        self.put(HeldTask(task, next(self._ages)))

    def add_first(self, task: Task) -> None:
        """Hold a *task* that has run and is to run again, and keep a device for it."""
        self.put(HeldTask(task, next(self._ages_again)))
        self._loads.keep_for(task.need)

    def put(self, held: HeldTask) -> None:
        """Hold a task, in the place that it has had if it was held before."""
        need = held.task.need
        # What runs alone has run before. There are few of these, and each is told on its own when it is to stop.
        key = held if need.alone else (need.n_bytes, need.allowed, need.unknown)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group()
        before = group.heap[0] if group.heap else None
        held.passed -= group.passed
        heapq.heappush(group.heap, held)
        self._count += 1
        if before is not None:
            second = before if group.heap[0] is held else held
            self._loads.keep_no_longer(second.task.need)

    def take(self) -> HeldTask | None:
        """Remove and return the first task that a device would take, or that is not to run any more."""
        key: Hashable = None
        found: HeldTask | None = None
        for group_key, group in self._groups.items():
            first = group.heap[0]
            if (found is None or first < found) and (first.task.future.is_unwanted or self._may_start(first.task.need)):
                key, found = group_key, first
        if found is not None:
            self._remove_first(key)
            if found.task.future.is_unwanted:
                self._loads.keep_no_longer(found.task.need)
        return found

    def take_unstarted(self) -> Task | None:
        """Remove and return any task that has not run before."""
        for key, group in self._groups.items():
            task = group.heap[0].task
            if not task.attempts:
                self._remove_first(key)
                self._loads.keep_no_longer(task.need)
                return task
        return None

    def take_stranded(self) -> list[Task]:
        """Remove and return those that only what given-up tasks have reserved keeps from starting."""
        stranded = [
            key for key, group in self._groups.items() if not self._loads.fits_beside_reserved(group.heap[0].task.need)
        ]
        tasks = []
        for key in stranded:
            group = self._groups.pop(key)
            self._count -= len(group.heap)
            self._loads.keep_no_longer(group.heap[0].task.need)
            tasks += [held.task for held in sorted(group.heap)]
        return tasks

    def note_start(self, position: int, priority: int, held: HeldTask | None) -> None:
        """Count a task that has started on a device: those that are held and come before it were passed.

        Args:
            position: of the device.
            priority: of the task.
            held: what it was here; None if it was not.
        """
        order = (-priority, math.inf) if held is None else held.order
        for group in self._groups.values():
            first = group.heap[0]
            need = first.task.need
            if need is not ANY and need.takes(position) and first.order < order:
                group.passed += 1
                if first.passed + group.passed >= MAX_PASSED:
                    self._loads.keep_for(need)

    def _may_start(self, need: Need) -> bool:
        """Return whether a device would take a task with this *need*, or it is needed no longer as it was."""
        if need.unknown and self._appraiser is not None and self._appraiser.knows(need.unknown):
            return True
        return self._loads.has_room(need)

    def _remove_first(self, key: Hashable) -> None:
        group = self._groups[key]
        held = heapq.heappop(group.heap)
        held.passed += group.passed
        if not group.heap:
            del self._groups[key]
        self._count -= 1
