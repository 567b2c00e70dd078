"""How many tasks run on each device of a pool, and what the last sample said of its memory.

Guarantees:

- A device never has more than ``tasks_per_device`` tasks, whatever the placement answers.
- Two tasks never choose by the same state: each choice sees all bookings before it, whatever the telemetry lag. (A
  placement of the user's runs without the lock; after it was overtaken many times in a row, its choice is taken.)
- What ``book`` took, ``give_back`` returns; the caller pairs them in ``try``/``finally``.
- What running tasks have said they need, together, is never more than a device has. A task that was given up no longer
  counts as running, but what it has reserved stays reserved until its thread has really ended.
- A device that is out of service gets no task any more. A task that only such devices would take is refused, not held.
- ``book`` never waits for a task to end. A task that asks for nothing finds a device at once, unless all are being
  drained: a pool has no more workers than its devices take tasks, and each worker books once at a time.
"""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable, Sequence

from managed_exec.devices import Device, DeviceMemory
from managed_exec.errors import DeviceOutOfServiceError, PlacementError
from managed_exec.options import ANY, Need
from managed_exec.scheduling.placement import PLACEMENTS, DeviceSnapshot, Placement, PlacementRequest

# What a device is kept for that is out of service: no task's need is this one.
_NOBODY = Need(allowed=frozenset())

# How often a placement that is not ours is asked again because the state it saw has changed meanwhile.
_MAX_STALE_CHOICES = 8


class DeviceLoads:
    """The bookings of one pool."""

    def __init__(
        self,
        devices: Sequence[Device],
        tasks_per_device: int | None,
        placement: Placement,
        capacity_bytes: Callable[[int], int] = lambda position: 0,
    ) -> None:
        self._capacity_bytes = functools.cache(capacity_bytes)  # by position; asked for only if a task says its need
        self._tasks_per_device = tasks_per_device
        self._placement = placement
        # Our own placements are short and call nothing else, so they run under the lock. A user's may do anything.
        self._trusted = placement in PLACEMENTS.values()
        # Guards all fields below. A leaf: nothing is called under it but trusted placements.
        self._lock = threading.Lock()
        self._running = [0] * len(devices)  # tasks, by position
        self._reserved = [0] * len(devices)  # bytes, by position
        # By position, the need that a device takes no other tasks for: one that waits for it, or runs there alone, or
        # nobody's, if it is out of service.
        self._kept_for: dict[int, Need] = {}
        self._out_of_service: dict[int, str] = {}  # by position: which device, since when and why
        # The state of each device, by position: replaced when a task is booked or ends there, or a sample comes. So a
        # booking makes one record, however many devices there are.
        self._snapshots = [DeviceSnapshot(device.torch_device, i, 0) for i, device in enumerate(devices)]
        self._placed = 0  # bookings ever made among several devices; also the version of the state a choice was made by
        self._used: set[int] = set()  # positions ever booked; the only device of a pool is not noted
        self.on_busy: Callable[[], None] | None = None  # called, without the lock, when a first task starts

    def snapshots(self) -> list[DeviceSnapshot]:
        """Return the state of every device, in the pool's order."""
        with self._lock:
            return list(self._snapshots)

    def was_used(self, position: int) -> bool:
        """Return whether a task was ever booked on the device at *position*."""
        with self._lock:
            return position in self._used or len(self._running) == 1

    @property
    def running(self) -> int:
        """Tasks that run now, on all devices."""
        return sum(self._running)

    @property
    def placed(self) -> int:
        """Bookings ever made where there was a choice of devices."""
        return self._placed

    def largest_bytes(self, need: Need) -> int:
        """Return how much the largest device has that *need* takes."""
        return max(self._capacity_bytes(i) for i in range(len(self._running)) if need.takes(i))

    def has_room(self, need: Need) -> bool:
        """Return whether it is no use to wait: a device would take a task with this *need* now, or none ever will."""
        self._know_capacities(need)
        with self._lock:
            return bool(self._candidates(need)) or self._is_hopeless(need)

    def book(self, last_position: int | None, need: Need = ANY) -> int | None:
        """Choose a device for one more task, book the task there and return the device's position.

        Args:
            last_position: the device of the calling worker's last task.
            need: what the task asks for.

        Returns:
            None if no device takes the task now.

        Raises:
            PlacementError: the placement raised, or did not return the position of a device it was offered.
            DeviceOutOfServiceError: only devices would take it that are out of service.
        """
        self._know_capacities(need)
        if self._trusted:
            with self._lock:
                if len(self._running) == 1 and need is ANY and not self._kept_for:  # nothing to choose
                    self._set_running(0, self._running[0] + 1)
                    return 0
                candidates = self._candidates(need)
                if not candidates:
                    self._check_hope(need)
                    return None
                position = self._placement(candidates, PlacementRequest(self._placed, last_position))
                first = self._note_booking(position, need)
        else:
            found = self._book_unlocked_choice(last_position, need)
            if found is None:
                return None
            position, first = found
        if first and self.on_busy is not None:
            self.on_busy()
        return position

    def give_back(self, position: int, need: Need = ANY) -> None:
        """Undo one ``book`` of *position*."""
        with self._lock:
            self._reserved[position] -= need.n_bytes
            self._set_running(position, self._running[position] - 1)
            if need.alone:
                self._forget_kept(need)

    def give_back_place(self, position: int, need: Need) -> None:
        """Undo a ``book`` but for the bytes it has reserved: the task was given up, and may still hold them."""
        with self._lock:
            self._set_running(position, self._running[position] - 1)
            if need.alone:
                self._forget_kept(need)

    def give_back_bytes(self, position: int, need: Need) -> None:
        """Undo the rest of a ``book``: the thread of the task that was given up has ended."""
        with self._lock:
            self._reserved[position] -= need.n_bytes
            self._set_running(position, self._running[position])

    def take_out(self, position: int, reason: str) -> bool:
        """Let no task start any more on the device at *position*; return False if it was out of service before.

        Args:
            reason: which device, since when and why.
        """
        with self._lock:
            if position in self._out_of_service:
                return False
            self._out_of_service[position] = reason
            self._kept_for[position] = _NOBODY
            return True

    def is_out(self, position: int) -> bool:
        """Return whether the device at *position* is out of service."""
        return position in self._out_of_service

    def keep_for(self, need: Need) -> None:
        """Let no other tasks start on the device that will soonest have room for *need*, until it is booked."""
        with self._lock:
            if not any(kept is need for kept in self._kept_for.values()):
                free = [i for i in range(len(self._running)) if need.takes(i) and i not in self._kept_for]
                large = [i for i in free if self._capacity(i, need) >= need.n_bytes]
                if large:
                    self._kept_for[min(large, key=lambda i: (self._reserved[i], self._running[i]))] = need

    def keep_no_longer(self, need: Need) -> None:
        """Undo ``keep_for``; does nothing where there is nothing to undo."""
        with self._lock:
            self._forget_kept(need)

    def move(self, position: int, to_position: int, need: Need = ANY) -> bool:
        """Book a running task on another device than it has; return False, and do nothing, if that takes no more."""
        self._know_capacities(need)
        with self._lock:
            if need.alone or not any(candidate.position == to_position for candidate in self._candidates(need)):
                return False
            self._reserved[position] -= need.n_bytes
            self._reserved[to_position] += need.n_bytes
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

    def _book_unlocked_choice(self, last_position: int | None, need: Need) -> tuple[int, bool] | None:
        """Book by a placement that runs without the lock: a choice counts if the state it saw still holds."""
        stale = 0
        while True:
            with self._lock:
                candidates = self._candidates(need)
                request = PlacementRequest(self._placed, last_position)
                if not candidates:
                    self._check_hope(need)
                    return None
            position = self._checked_choice(candidates, request)
            with self._lock:
                # A slow placement among many workers might never see a still state; after a while any choice with
                # room is taken. Each retry means that another worker has booked, so the loop as a whole advances.
                has_room = any(candidate.position == position for candidate in self._candidates(need))
                if has_room and (self._placed == request.sequence or stale >= _MAX_STALE_CHOICES):
                    return position, self._note_booking(position, need)
            stale += 1

    def _candidates(self, need: Need) -> list[DeviceSnapshot]:
        """Return the devices that take one more task with this *need*. The lock is held."""
        if need is ANY and not self._kept_for:
            if self._tasks_per_device is None:
                return list(self._snapshots)
            return [snapshot for snapshot in self._snapshots if snapshot.running < self._tasks_per_device]
        return [snapshot for i, snapshot in enumerate(self._snapshots) if self._takes(i, need)]

    def _takes(self, position: int, need: Need) -> bool:
        """Return whether the device at *position* takes one more task with this *need*. The lock is held."""
        running = self._running[position]
        return (
            need.takes(position)
            and self._kept_for.get(position, need) is need
            and (self._tasks_per_device is None or running < self._tasks_per_device)
            and not (need.alone and running)
            and (need.n_bytes == 0 or self._reserved[position] + need.n_bytes <= self._capacity(position, need))
        )

    def _is_hopeless(self, need: Need) -> bool:
        """Return whether no device that is in service will ever take a task with this *need*. The lock is held."""
        return bool(self._out_of_service) and not any(
            need.takes(i) and i not in self._out_of_service and need.n_bytes <= self._capacity(i, need)
            for i in range(len(self._running))
        )

    def _check_hope(self, need: Need) -> None:
        """Raise if a task with this *need* would wait for ever. The lock is held."""
        if self._is_hopeless(need):
            raise DeviceOutOfServiceError(
                "no device that would take the task is in service. Out of service: "
                f"{'; '.join(self._out_of_service.values())}. Make a new pool of the devices that work; a broken GPU "
                "is back in a new process"
            )

    def _forget_kept(self, need: Need) -> None:
        """Keep no device for *need* any more. The lock is held."""
        for position in [position for position, kept in self._kept_for.items() if kept is need]:
            del self._kept_for[position]

    def _know_capacities(self, need: Need) -> None:
        """Ask, without the lock, for what will be looked up under it."""
        if need.n_bytes:
            for position in range(len(self._running)):
                self._capacity_bytes(position)

    def _capacity(self, position: int, need: Need) -> int:
        """Return what the device has. The lock is held, and the answer known, if *need* is for any bytes."""
        return self._capacity_bytes(position) if need.n_bytes else 0

    def _set_running(self, position: int, running: int) -> None:
        """Note how many tasks run on the device at *position*. The lock is held."""
        self._running[position] = running
        device, _, _, free_bytes, total_bytes, utilization, _ = self._snapshots[position]
        self._snapshots[position] = DeviceSnapshot(
            device, position, running, free_bytes, total_bytes, utilization, self._reserved[position]
        )

    def _note_booking(self, position: int, need: Need) -> bool:
        """Count one more task on *position*; return whether it is the only one. The lock is held."""
        first = not any(self._running)
        self._reserved[position] += need.n_bytes
        if self._kept_for:
            self._forget_kept(need)
        if need.alone:
            self._kept_for[position] = need
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
