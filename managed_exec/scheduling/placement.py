"""Which device a task gets, decided when it starts.

A placement is a pure function: it is given snapshots of the devices that have room for one more task, in the pool's
order, and a few facts about the request, and returns the ``position`` of one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch


class DeviceSnapshot(NamedTuple):
    """One device of the pool as it is at this moment.

    Memory and utilisation are sampled a few times a second and may be that old; ``running`` is exact.
    """

    device: torch.device
    position: int  # in the pool's devices
    running: int  # tasks of this pool
    free_bytes: int | None = None  # None until first sampled, as the next
    total_bytes: int | None = None
    utilization: float | None = None  # busy share of the last sampling period, 0 to 1; None where nothing tells
    reserved_bytes: int = 0  # what the running tasks have said they need

    @property
    def free_share(self) -> float:
        """Free share of the device's memory, 0 to 1; 1 until it is known."""
        return 1.0 if not self.total_bytes or self.free_bytes is None else self.free_bytes / self.total_bytes


class PlacementRequest(NamedTuple):
    """What is known of the task to place."""

    sequence: int  # tasks placed before it
    last_position: int | None  # where the worker that will run it ran its last one


Placement: TypeAlias = Callable[[Sequence[DeviceSnapshot], PlacementRequest], int]


def least_loaded(devices: Sequence[DeviceSnapshot], request: PlacementRequest) -> int:
    """Choose the fewest running tasks, then the fewest bytes reserved, the most free memory, the lowest utilisation.

    Memory and utilisation count in steps, an eighth of the device and a quarter: a few stray bytes are no reason to
    leave the device on which the worker already has its stream, workspaces and cached blocks.
    """

    def load(snapshot: DeviceSnapshot) -> tuple[int, int, int, bool]:
        busy = 0 if snapshot.utilization is None else round(snapshot.utilization * 4)
        return (
            snapshot.reserved_bytes,
            -round(snapshot.free_share * 8),
            busy,
            snapshot.position != request.last_position,
        )

    fewest = min([snapshot.running for snapshot in devices])
    equals = [snapshot for snapshot in devices if snapshot.running == fewest]
    return equals[0].position if len(equals) == 1 else min(equals, key=load).position


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
