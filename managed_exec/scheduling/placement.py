"""Which device a task gets, decided when it starts.

A placement is a pure function: it is given snapshots of the devices that have room for one more task, in the pool's
order, and a few facts about the request, and returns the ``position`` of one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import torch


class DeviceSnapshot(NamedTuple):
    """One device of the pool as it is at this moment.

    Memory and utilisation are sampled a few times a second and may be that old; ``running`` is exact.

    Attributes:
        device: the device.
        position: its place among the pool's devices, which is what a placement returns.
        running: tasks of this pool on it.
        free_bytes: None until first sampled.
        total_bytes: likewise.
        utilization: busy share of the last sampling period, 0 to 1; None where nothing tells.
        reserved_bytes: what the running tasks have said they need.
        expected_bytes: likewise, and for those that have not, what earlier tasks of their functions have needed.
        limit_bytes: what tasks may use of it; None until one is expected to need any.
    """

    device: torch.device
    position: int
    running: int
    free_bytes: int | None = None
    total_bytes: int | None = None
    utilization: float | None = None
    reserved_bytes: int = 0
    expected_bytes: int = 0
    limit_bytes: int | None = None

    @property
    def free_share(self) -> float:
        """Free share of the device's memory, 0 to 1; 1 until it is known."""
        return 1.0 if not self.total_bytes or self.free_bytes is None else self.free_bytes / self.total_bytes

    @property
    def expected_share(self) -> float:
        """Share of the device's memory that the running tasks are expected to need; it may be more than 1."""
        return self.expected_bytes / self.limit_bytes if self.limit_bytes else 0.0

    def has_room_for(self, n_bytes: int) -> bool:
        """Return whether *n_bytes* are left beside what the running tasks are expected to need."""
        return self.limit_bytes is None or self.expected_bytes + n_bytes <= self.limit_bytes


class PlacementRequest(NamedTuple):
    """What is known of the task to place.

    Attributes:
        sequence: tasks placed before it.
        last_position: where the worker that will run it ran its last one; None: it has run none.
        expected_bytes: what it says it needs, else what earlier tasks of its function have needed; 0: unknown.
        local_bytes: of the tensors it is given, by the position of the device that they are on.
    """

    sequence: int
    last_position: int | None
    expected_bytes: int = 0
    local_bytes: Mapping[int, int] = MappingProxyType({})


# Fewer bytes are moved in the time that it takes to start a task, so where they are does not matter.
MIN_LOCAL_BYTES = 2**20

Placement: TypeAlias = Callable[[Sequence[DeviceSnapshot], PlacementRequest], int]


def least_loaded(devices: Sequence[DeviceSnapshot], request: PlacementRequest) -> int:
    """Choose the fewest running tasks, then the fewest bytes reserved, then the fewest expected to be needed, the most
    free memory, the lowest utilisation.

    The last three count in steps, eighths of the device and a quarter: a few stray bytes are no reason to leave the
    device on which the worker already has its stream, workspaces and cached blocks.

    Of a task of which more is known, a device without room for what it is expected to need counts as having one task
    more, and so does one to which all of the task's arguments would have to move; to which a share of them would, as
    having that share of a task more. So a device is preferred for these, by at most two running tasks.
    """

    def load(snapshot: DeviceSnapshot) -> tuple[int, int, int, int, bool]:
        busy = 0 if snapshot.utilization is None else round(snapshot.utilization * 4)
        return (
            snapshot.reserved_bytes,
            round(snapshot.expected_share * 8) if snapshot.expected_bytes else 0,
            -round(snapshot.free_share * 8),
            busy,
            snapshot.position != request.last_position,
        )

    if request.expected_bytes or request.local_bytes:
        equals = _best_suited(devices, request)
    else:
        fewest = min([snapshot.running for snapshot in devices])
        equals = [snapshot for snapshot in devices if snapshot.running == fewest]
    return equals[0].position if len(equals) == 1 else min(equals, key=load).position


def _best_suited(devices: Sequence[DeviceSnapshot], request: PlacementRequest) -> list[DeviceSnapshot]:
    """Return the devices with the fewest running tasks and handicaps together, and of these the fewest handicaps."""
    local_bytes = sum(request.local_bytes.values())
    is_local = local_bytes >= MIN_LOCAL_BYTES
    loads = []
    for snapshot in devices:
        handicap = 0.0 if snapshot.has_room_for(request.expected_bytes) else 1.0
        if is_local:
            handicap += 1 - request.local_bytes.get(snapshot.position, 0) / local_bytes
        loads.append((snapshot.running + handicap, handicap))
    best = min(loads)
    return [snapshot for snapshot, load in zip(devices, loads, strict=True) if load == best]


def round_robin(devices: Sequence[DeviceSnapshot], request: PlacementRequest) -> int:
    """Choose the devices in turn, whatever their load."""
    return devices[request.sequence % len(devices)].position


def pack(devices: Sequence[DeviceSnapshot], request: PlacementRequest) -> int:
    """Choose the busiest device that still has an eighth of its memory free, so that others stay empty.

    Useful with ``tasks_per_device``, or to leave whole devices to other programs.
    """
    roomy = [snapshot for snapshot in devices if snapshot.free_share >= 1 / 8]
    if not roomy:
        return least_loaded(devices, request)
    return max(roomy, key=lambda snapshot: (snapshot.running, -snapshot.position)).position


PLACEMENTS: dict[str, Placement] = {"least-loaded": least_loaded, "round-robin": round_robin, "pack": pack}
