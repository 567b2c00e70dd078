"""How many tasks run on each device of a pool, and what the last sample said of its memory.

Guarantees:

- A device never has more than ``tasks_per_device`` tasks, whatever the placement answers.
- Two tasks never choose by the same state: each choice sees all bookings before it, whatever the telemetry lag. (A
  placement of the user's runs without the lock; after it was overtaken many times in a row, its choice is taken.)
- What ``book`` took, ``give_back`` returns; the caller pairs them in ``try``/``finally``.
- What is reserved for running tasks, for they say so or it was learned, is never more than a device has. A task that
  was given up no longer counts as running, but what it has reserved stays reserved until its thread has really ended.
- A device that is out of service gets no task any more. A task that only such devices would take is refused, not held.
- ``book`` never waits for a task to end. A task that asks for nothing finds a device at once, unless all are being
  drained: a pool has no more workers than its devices take tasks, and each worker books once at a time.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Sequence

from managed_exec.devices import Device, DeviceMemory
from managed_exec.errors import DeviceOutOfServiceError, PlacementError
from managed_exec.options import ANY, Need
from managed_exec.scheduling.placement import PLACEMENTS, DeviceSnapshot, Placement, PlacementRequest
from managed_exec.scheduling.short_section import ShortSection
from managed_exec.sizes import format_bytes

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
        self._capacity_bytes = capacity_bytes
        self._tasks_per_device = tasks_per_device
        self.devices = tuple(device.torch_device for device in devices)
        self._placement = placement
        names = [name for name, known in PLACEMENTS.items() if known is placement]
        # Why a task that asks for nothing runs where it does.
        self._usual_reason = "the pool's only device" if len(devices) == 1 else (names[0] if names else "placement")
        # Our own placements are short and call nothing else, so they run under the lock. A user's may do anything.
        self._trusted = placement in PLACEMENTS.values()
        # Guards all fields below. A leaf: nothing is called under it but trusted placements.
        self._lock = threading.Lock()
        # For what each task does: in workers, so not in the main thread. Where there is nothing to choose, hardly
        # anybody finds the lock taken.
        self._section = self._lock if len(devices) == 1 else ShortSection(self._lock)
        self._running = [0] * len(devices)  # tasks, by position
        self._reserved = [0] * len(devices)  # bytes, by position
        self._expected = [0] * len(devices)  # bytes, by position: the reserved ones and guesses
        # Bytes, by position; asked for once, without the lock, when the need of a task is known or guessed.
        self._capacities: list[int] | None = None
        # By position, the need that a device takes no other tasks for: one that waits for it, or runs there alone, or
        # nobody's, if it is out of service.
        self._kept_for: dict[int, Need] = {}
        self._out_of_service: dict[int, str] = {}  # by position: which device, since when and why
        # The state of each device, by position, but for the tasks and reservations that have changed since: these are
        # filled in when a choice needs them. Whether any have is said by ``_changed``.
        self._snapshots = [DeviceSnapshot(device.torch_device, i, 0) for i, device in enumerate(devices)]
        self._changed: set[int] = set()  # positions
        self._placed = 0  # bookings ever made among several devices; also the version of the state a choice was made by
        self._used: set[int] = set()  # positions ever booked; the only device of a pool is not noted
        self.on_busy: Callable[[], None] | None = None  # called, without the lock, when a first task starts

    def snapshots(self) -> list[DeviceSnapshot]:
        """Return the state of every device, in the pool's order."""
        with self._lock:
            return list(self._current_snapshots())

    def reason(self, need: Need, position: int) -> str:
        """Return why a task with this *need* was booked at *position*."""
        if need is ANY:
            return self._usual_reason
        if need.alone:
            return "alone there, after it had run out of memory"
        reasons = [self._usual_reason]
        if need.allowed is not None:
            reasons.append(f"device= allows {', '.join(str(self.devices[i]) for i in sorted(need.allowed))}")
        if need.n_bytes:
            reasons.append(f"{format_bytes(need.n_bytes)} could be reserved")
        local = need.local_bytes.get(position)
        if local:
            reasons.append(f"{format_bytes(local)} of its arguments were there")
        return "; ".join(reasons)

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
        capacities = self._known_capacities()
        return max(capacity for i, capacity in enumerate(capacities) if need.takes(i))

    def has_room(self, need: Need) -> bool:
        """Return whether it is no use to wait: a device would take a task with this *need* now, or none ever will."""
        self._know_capacities(need)
        with self._lock:
            return bool(self._candidates(need)) or self._is_hopeless(need)

    def fits_beside_reserved(self, need: Need) -> bool:
        """Return whether what *need* reserves would fit a device now, or none ever."""
        self._know_capacities(need)
        with self._lock:
            return self._is_hopeless(need) or any(
                need.takes(i) and i not in self._out_of_service and self._fits(i, need, reserved)
                for i, reserved in enumerate(self._reserved)
            )

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
        if need is not ANY:
            self._know_capacities(need)
        if self._trusted:
            with self._section:
                if len(self._running) == 1 and need is ANY and not self._kept_for:  # nothing to choose
                    self._running[0] += 1
                    self._changed.add(0)
                    return 0
                candidates = self._candidates(need)
                if not candidates:
                    self._check_hope(need)
                    return None
                position = self._placement(candidates, self._request(last_position, need))
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
        with self._section:
            self._running[position] -= 1
            self._changed.add(position)
            if need is not ANY:
                self._reserve(position, need, -1)
                if need.alone:
                    self._forget_kept(need)

    def give_back_place(self, position: int, need: Need) -> None:
        """Undo a ``book`` but for the bytes it has reserved: the task was given up, and may still hold them."""
        with self._lock:
            self._running[position] -= 1
            self._changed.add(position)
            if need.alone:
                self._forget_kept(need)

    def give_back_bytes(self, position: int, need: Need) -> None:
        """Undo the rest of a ``book``: the thread of the task that was given up has ended."""
        with self._lock:
            self._reserve(position, need, -1)
            self._changed.add(position)

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

    def out_of_service(self, position: int) -> str | None:
        """Return why the device at *position* is out of service; None if it is not."""
        return self._out_of_service.get(position)

    def keep_for(self, need: Need) -> None:
        """Let no other tasks start on the device that will soonest have room for *need*, until it is booked."""
        with self._lock:
            if not any(kept is need for kept in self._kept_for.values()):
                free = [i for i in range(len(self._running)) if need.takes(i) and i not in self._kept_for]
                large = [i for i in free if self._fits(i, need, 0)]
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
            self._reserve(position, need, -1)
            self._reserve(to_position, need, +1)
            self._running[position] -= 1
            self._running[to_position] += 1
            self._changed |= {position, to_position}
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
                request = self._request(last_position, need)
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
        if not self._kept_for and (need is ANY or not need.asks):
            if self._tasks_per_device is None:
                return list(self._current_snapshots())
            return [snapshot for snapshot in self._current_snapshots() if snapshot.running < self._tasks_per_device]
        return [snapshot for i, snapshot in enumerate(self._current_snapshots()) if self._takes(i, need)]

    def _takes(self, position: int, need: Need) -> bool:
        """Return whether the device at *position* takes one more task with this *need*. The lock is held."""
        running = self._running[position]
        return (
            need.takes(position)
            and self._kept_for.get(position, need) is need
            and (self._tasks_per_device is None or running < self._tasks_per_device)
            and not (need.alone and running)
            and self._fits(position, need, self._reserved[position])
        )

    def _fits(self, position: int, need: Need, reserved: int) -> bool:
        """Return whether what *need* reserves fits the device beside *reserved* bytes. The lock is held."""
        if not need.reserves:
            return True
        return reserved == 0 if need.unknown else reserved + need.n_bytes <= self._capacity(position)

    def _is_hopeless(self, need: Need) -> bool:
        """Return whether no device that is in service will ever take a task with this *need*. The lock is held."""
        return bool(self._out_of_service) and not any(
            need.takes(i) and i not in self._out_of_service and self._fits(i, need, 0)
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

    def _reserve(self, position: int, need: Need, sign: int) -> None:
        """Reserve the bytes of *need* on a device, or give them back with *sign* -1. The lock is held."""
        n_bytes = self._capacity(position) if need.unknown else need.n_bytes
        self._reserved[position] += sign * n_bytes
        self._expected[position] += sign * max(n_bytes, need.expected_bytes)

    def _request(self, last_position: int | None, need: Need) -> PlacementRequest:
        """Return what a placement is told of a task. The lock is held."""
        return PlacementRequest(self._placed, last_position, max(need.n_bytes, need.expected_bytes), need.local_bytes)

    def _know_capacities(self, need: Need) -> None:
        """Ask, without the lock, for what will be looked up under it."""
        if need is not ANY and (need.reserves or need.expected_bytes):
            self._known_capacities()

    def _known_capacities(self) -> list[int]:
        """Return what each device has. The lock is not held."""
        capacities = self._capacities
        if capacities is None:
            capacities = [self._capacity_bytes(position) for position in range(len(self._running))]
            with self._lock:
                self._capacities = capacities
                self._snapshots = [
                    snapshot._replace(limit_bytes=capacity)
                    for snapshot, capacity in zip(self._snapshots, capacities, strict=True)
                ]
        return capacities

    def _capacity(self, position: int) -> int:
        """Return what the device has. The lock is held, and the answer known."""
        assert self._capacities is not None, "asked for before the lock was taken"
        return self._capacities[position]

    def _current_snapshots(self) -> list[DeviceSnapshot]:
        """Return the state of every device, the list itself. The lock is held."""
        while self._changed:
            position = self._changed.pop()
            device, _, _, free_bytes, total_bytes, utilization, _, _, limit_bytes = self._snapshots[position]
            self._snapshots[position] = DeviceSnapshot(
                device,
                position,
                self._running[position],
                free_bytes,
                total_bytes,
                utilization,
                self._reserved[position],
                self._expected[position],
                limit_bytes,
            )
        return self._snapshots

    def _note_booking(self, position: int, need: Need) -> bool:
        """Count one more task on *position*; return whether it is the only one. The lock is held."""
        first = not any(self._running)
        if need is not ANY:
            self._reserve(position, need, +1)
            self._forget_kept(need)
            if need.alone:
                self._kept_for[position] = need
        self._running[position] += 1
        self._changed.add(position)
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
