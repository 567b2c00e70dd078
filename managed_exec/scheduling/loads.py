"""How many tasks run on each device of a pool, and what the last sample said of its memory.

Guarantees:

- A device never has more than ``tasks_per_device`` tasks, whatever the placement answers.
- Two tasks never choose by the same state: each choice sees all bookings before it, whatever the telemetry lag. (A
  placement of the user's runs without the lock; after it was overtaken many times in a row, its choice is taken.)
- What ``book`` took, ``give_back`` returns; the caller pairs them in ``try``/``finally``.
- ``book`` never waits for a task to end. It need not: a pool has no more workers than its devices take tasks, and
  each worker books once at a time.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Sequence

from managed_exec.devices import Device, DeviceMemory
from managed_exec.errors import PlacementError
from managed_exec.scheduling.placement import PLACEMENTS, DeviceSnapshot, Placement, PlacementRequest

# How often a placement that is not ours is asked again because the state it saw has changed meanwhile.
_MAX_STALE_CHOICES = 8


class DeviceLoads:
    """The bookings of one pool."""

    def __init__(self, devices: Sequence[Device], tasks_per_device: int | None, placement: Placement) -> None:
        self._tasks_per_device = tasks_per_device
        self._placement = placement
        # Our own placements are short and call nothing else, so they run under the lock. A user's may do anything.
        self._trusted = placement in PLACEMENTS.values()
        # Guards all fields below. A leaf: nothing is called under it but trusted placements.
        self._lock = threading.Lock()
        self._running = [0] * len(devices)  # tasks, by position
        # The state of each device, by position: replaced when a task is booked or ends there, or a sample comes. So a
        # booking makes one record, however many devices there are.
        self._snapshots = [DeviceSnapshot(device.torch_device, i, 0) for i, device in enumerate(devices)]
        self._placed = 0  # bookings ever made among several devices; also the version of the state a choice was made by
        self._used: set[int] = set()  # positions ever booked
        self.on_busy: Callable[[], None] | None = None  # called, without the lock, when a first task starts

    def snapshots(self) -> list[DeviceSnapshot]:
        """Return the state of every device, in the pool's order."""
        with self._lock:
            return list(self._snapshots)

    def was_used(self, position: int) -> bool:
        """Return whether a task was ever booked on the device at *position*."""
        with self._lock:
            return position in self._used

    @property
    def running(self) -> int:
        """Tasks that run now, on all devices."""
        return sum(self._running)

    @property
    def placed(self) -> int:
        """Bookings ever made where there was a choice of devices."""
        return self._placed

    def book(self, last_position: int | None) -> int:
        """Choose a device for one more task, book the task there and return the device's position.

        Args:
            last_position: the device of the calling worker's last task.

        Raises:
            PlacementError: the placement raised, or did not return the position of a device it was offered.
        """
        if len(self._running) == 1 and self._trusted:  # nothing to choose, and no more workers than it takes tasks
            with self._lock:
                self._set_running(0, self._running[0] + 1)
            return 0
        if self._trusted:
            with self._lock:
                position = self._placement(self._candidates(), PlacementRequest(self._placed, last_position))
                first = self._note_booking(position)
        else:
            position, first = self._book_unlocked_choice(last_position)
        if first and self.on_busy is not None:
            self.on_busy()
        return position

    def give_back(self, position: int) -> None:
        """Undo one ``book`` of *position*."""
        with self._lock:
            self._set_running(position, self._running[position] - 1)

    def move(self, position: int, to_position: int) -> bool:
        """Book a running task on another device than it has; return False, and do nothing, if that takes no more."""
        with self._lock:
            if self._tasks_per_device is not None and self._running[to_position] >= self._tasks_per_device:
                return False
            self._set_running(position, self._running[position] - 1)
            self._set_running(to_position, self._running[to_position] + 1)
            self._used.add(to_position)
            return True

    def record_sample(self, position: int, memory: DeviceMemory, utilization: float | None) -> None:
        """Note what was just read of the device at *position*."""
        with self._lock:
            self._snapshots[position] = self._snapshots[position]._replace(
                free_bytes=memory.free_bytes, total_bytes=memory.total_bytes, utilization=utilization
            )

    def _book_unlocked_choice(self, last_position: int | None) -> tuple[int, bool]:
        """Book by a placement that runs without the lock: a choice counts if the state it saw still holds."""
        stale = 0
        while True:
            with self._lock:
                candidates = self._candidates()
                request = PlacementRequest(self._placed, last_position)
            position = self._checked_choice(candidates, request)
            with self._lock:
                has_room = self._tasks_per_device is None or self._running[position] < self._tasks_per_device
                # A slow placement among many workers might never see a still state; after a while any choice with
                # room is taken. Each retry means that another worker has booked, so the loop as a whole advances.
                if has_room and (self._placed == request.sequence or stale >= _MAX_STALE_CHOICES):
                    return position, self._note_booking(position)
            stale += 1

    def _candidates(self) -> list[DeviceSnapshot]:
        """Return the devices with room for one more task. The lock is held."""
        if self._tasks_per_device is None:
            return list(self._snapshots)
        return [snapshot for snapshot in self._snapshots if snapshot.running < self._tasks_per_device]

    def _set_running(self, position: int, running: int) -> None:
        """Note how many tasks run on the device at *position*. The lock is held."""
        self._running[position] = running
        device, _, _, free_bytes, total_bytes, utilization = self._snapshots[position]
        self._snapshots[position] = DeviceSnapshot(device, position, running, free_bytes, total_bytes, utilization)

    def _note_booking(self, position: int) -> bool:
        """Count one more task on *position*; return whether it is the only one. The lock is held."""
        first = not any(self._running)
        self._set_running(position, self._running[position] + 1)
        self._placed += 1
        self._used.add(position)
        return first

    def _checked_choice(self, candidates: list[DeviceSnapshot], request: PlacementRequest) -> int:
        try:
            position = self._placement(candidates, request)
        except BaseException as error:  # also sys.exit(): it would end the worker, which is not the placement's
            raise PlacementError(f"placement {self._placement!r} raised {error!r}") from error
        positions = [candidate.position for candidate in candidates]
        try:
            index = -1 if isinstance(position, bool) else operator.index(position)
        except TypeError:
            index = -1
        if index not in positions:
            raise PlacementError(
                f"placement {self._placement!r} returned {position!r}; expected the position of a device it was "
                f"offered, one of {positions}"
            )
        return index
