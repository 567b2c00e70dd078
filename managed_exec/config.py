"""Checks of arguments of the constructor and of ``gpu_task``, so that a wrong one fails there and not in a worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import torch

from managed_exec.devices import Device
from managed_exec.memory.policy import MemoryPolicy
from managed_exec.options import DeviceChoice, Need, TaskOptions
from managed_exec.scheduling.placement import PLACEMENTS, Placement
from managed_exec.sizes import format_bytes


def checked_max_workers(max_workers: int | None) -> int | None:
    """Return *max_workers* if it is None or a positive ``int``."""
    # The standard pool's words: programs and its own tests know them.
    return _positive(max_workers, "max_workers must be greater than 0", "max_workers")


def checked_tasks_per_device(tasks_per_device: int | None) -> int | None:
    """Return *tasks_per_device* if it is None or a positive ``int``."""
    return _positive(tasks_per_device, "tasks_per_device must be greater than 0", "tasks_per_device")


def checked_placement(placement: str | Placement) -> Placement:
    """Return the placement function of that name, or *placement* itself if it is one."""
    if isinstance(placement, str):
        if placement not in PLACEMENTS:
            raise ValueError(f"placement: expected one of {', '.join(PLACEMENTS)} or a function, got {placement!r}")
        return PLACEMENTS[placement]
    if not callable(placement):
        raise TypeError(f"placement: expected a name or a function, got {placement!r}")
    return placement


def checked_memory(memory: MemoryPolicy | Literal[False] | None) -> MemoryPolicy | Literal[False] | None:
    """Return *memory* if it is None, False or a policy."""
    if memory is not None and memory is not False and not isinstance(memory, MemoryPolicy):
        raise TypeError(
            f"memory: expected a MemoryPolicy, None for the default one or False for none, got {memory!r}; to bound "
            "what is used of each device, write MemoryPolicy(limit='12GiB')"
        )
    return memory


def checked_workers(workers: str) -> str:
    """Return *workers* if it names one of the two kinds."""
    if workers not in ("threads", "processes"):
        raise ValueError(f"workers: expected 'threads' or 'processes', got {workers!r}")
    return workers


def checked_flag(flag: bool, name: str) -> bool:
    """Return *flag* if it is a ``bool``."""
    if not isinstance(flag, bool):
        raise TypeError(f"{name}: expected True or False, got {flag!r}")
    return flag


def allowed_positions(choice: DeviceChoice | None, devices: Sequence[Device]) -> frozenset[int] | None:
    """Return the positions among a pool's *devices* that ``gpu_task(device=choice)`` means; None for all.

    On the CPU, where there is nothing to choose, a number means it too.

    Raises:
        ValueError: none of the devices is meant.
    """
    if choice is None:
        return None
    places = [device.torch_device for device in devices]
    there_are = f"the pool's devices, {', '.join(map(str, places))}"
    if callable(choice):
        try:
            found = [i for i, place in enumerate(places) if choice(place)]
        except Exception as error:
            raise ValueError(
                f"device: expected a function that is given a torch.device and says yes or no, but {choice!r} raised "
                f"{error!r}"
            ) from error
        if not found:
            raise ValueError(f"device: the function {choice!r} says no to each of {there_are}")
    elif places[0].type == "cpu":
        return None
    else:
        try:
            wanted = torch.device("cuda", choice) if isinstance(choice, int) else torch.device(choice)
        except RuntimeError:
            raise ValueError(f"device: expected an index or name of one of {there_are}, got {choice!r}") from None
        kinds = ("cuda", places[0].type)
        found = [i for i, p in enumerate(places) if wanted.type in kinds and wanted.index in (None, p.index)]
    if not found:
        raise ValueError(f"device: {choice!r} is none of {there_are}")
    return frozenset(found)


def _positive(number: int | None, too_small: str, name: str) -> int | None:
    if number is None:
        return None
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"{name}: expected an int or None, got {number!r}")
    if number <= 0:
        raise ValueError(f"{too_small}, got {number}")
    return number


class Sizes(Protocol):
    """Where the largest device that a need takes is known, and what tasks may use of it."""

    def largest_bytes(self, need: Need) -> int: ...


def checked_need(options: TaskOptions, devices: Sequence[Device], loads: Sizes, lanes: Sizes | None) -> Need:
    """Return what a task with *options* asks of a pool's *devices*.

    Args:
        loads: knows the devices' sizes.
        lanes: knows what each process may use of them, if tasks run in processes.

    Raises:
        ValueError: it asks for more than there is, or for none of the devices.
    """
    need = Need(options.memory_bytes, allowed_positions(options.device, devices))
    if need.n_bytes and need.n_bytes > (largest := loads.largest_bytes(need)):
        raise ValueError(
            f"memory: the task needs {format_bytes(need.n_bytes)}, and the largest device it may run on has "
            f"{format_bytes(largest)}"
        )
    if need.n_bytes and lanes and need.n_bytes > (largest := lanes.largest_bytes(need)):
        raise ValueError(
            f"memory: the task needs {format_bytes(need.n_bytes)}, and the limit of the memory policy leaves each "
            f"of the processes on a device {format_bytes(largest)}; have fewer tasks there at once"
        )
    return need
