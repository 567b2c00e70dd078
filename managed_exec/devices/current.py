"""What ``"cuda"`` means on the calling thread: the device of its task; outside a task, the thread's current one."""

from __future__ import annotations

import threading
from typing import Any

import torch

from managed_exec.devices.discovery import available_devices


class _Thread(threading.local):
    """The device of the task that the calling thread runs. Set and unset by the device context."""

    device: torch.device | None = None


thread = _Thread()


def current_device() -> torch.device:
    """Return the device of the thread's task, else its current accelerator device, else the CPU."""
    if thread.device is not None:
        return thread.device
    devices = available_devices()
    return devices[0] if devices[0].type == "cpu" else devices[torch.accelerator.current_device_index()]


def resolve_cuda(device: int | str | torch.device | None = None) -> torch.device:
    """Return the device that ``.cuda(device)`` means: the current one for None and a bare ``"cuda"``.

    An index, and ``"cuda:1"``, name devices of the current one's kind. On the CPU there are none to number, and torch
    says so better than an index silently dropped would.
    """
    wanted = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
    if wanted.type != "cuda":
        return wanted
    current = current_device()
    if wanted.index is None:
        return current
    return wanted if current.type == "cpu" else torch.device(current.type, wanted.index)


def resolve_to(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call of ``to`` with what ``"cuda"`` means in its place."""
    if args and isinstance(args[0], (str, torch.device)):
        return (resolve_cuda(args[0]), *args[1:]), kwargs
    if isinstance(kwargs.get("device"), (str, torch.device)):
        return args, {**kwargs, "device": resolve_cuda(kwargs["device"])}
    return args, kwargs
