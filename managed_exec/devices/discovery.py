"""Which devices there are, and which of them the user asked for.

``devices=`` takes None (every visible accelerator, else the CPU), a count, an index, a string, a ``torch.device``, or
a sequence of the last three. Everything that cannot be had is a ``ValueError`` naming what is there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import torch

from managed_exec import sim
from managed_exec.devices.device import AcceleratorDevice, CpuDevice, Device

DeviceLike: TypeAlias = "int | str | torch.device"


def available_devices() -> tuple[torch.device, ...]:
    """Return every visible accelerator device, first index first; the CPU alone where there is none.

    Turns the simulator on first where the environment variable ``MANAGED_EXEC_SIM`` asks for it.
    """
    if not sim.is_enabled():
        sim.enable_from_environment()
    # A CUDA build of torch on a machine without a driver names an accelerator that is not available.
    if torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is not None and torch.accelerator.device_count() > 0:
            return tuple(torch.device(accelerator.type, i) for i in range(torch.accelerator.device_count()))
    return (torch.device("cpu"),)


def resolve_devices(devices: int | DeviceLike | Iterable[DeviceLike] | None = None) -> tuple[Device, ...]:
    """Return the devices that *devices* asks for, in its order.

    Args:
        devices: None for all there are; an ``int`` for the first that many; a string or ``torch.device``, where a bare
            accelerator name such as ``"cuda"`` means all of that kind; or an iterable of indices, strings and
            ``torch.device`` objects. ``"cuda"`` names simulated devices while the simulator is enabled.

    Raises:
        TypeError: *devices* is none of these.
        ValueError: no device at all, one that does not exist, one named twice, or accelerators mixed with the CPU.
    """
    available = available_devices()
    if devices is None:
        chosen = list(available)
    elif isinstance(devices, bool):
        raise TypeError(f"devices: expected a count, indices, strings or torch.devices, got {devices!r}")
    elif isinstance(devices, int):
        if not 1 <= devices <= len(available):
            raise ValueError(f"devices: asked for {devices}, expected 1 to {len(available)}; {_there_is(available)}")
        chosen = list(available[:devices])
    elif isinstance(devices, (str, torch.device)):
        chosen = _matching(devices, available)
    elif isinstance(devices, Iterable):
        chosen = [found for wanted in devices for found in _matching(wanted, available)]
    else:
        raise TypeError(f"devices: expected a count, indices, strings or torch.devices, got {devices!r}")

    if not chosen:
        raise ValueError(f"devices: asked for none, expected at least one; {_there_is(available)}")
    kinds = sorted({device.type for device in chosen})
    if len(kinds) > 1:
        raise ValueError(f"devices: a pool has devices of one kind, got {' and '.join(kinds)}; {_there_is(available)}")
    twice = sorted({str(device) for device in chosen if chosen.count(device) > 1})
    if twice:
        raise ValueError(f"devices: {', '.join(twice)} named more than once; {_there_is(available)}")
    return tuple(CpuDevice() if device.type == "cpu" else AcceleratorDevice(device) for device in chosen)


def _matching(wanted: DeviceLike, available: tuple[torch.device, ...]) -> list[torch.device]:
    """Return the devices that one element of ``devices=`` names."""
    if isinstance(wanted, bool) or not isinstance(wanted, (int, str, torch.device)):
        raise TypeError(f"devices: expected an index, a string or a torch.device, got {wanted!r}")
    if isinstance(wanted, int):
        if not 0 <= wanted < len(available):
            raise ValueError(f"devices: there is no device {wanted}; {_there_is(available)}")
        return [available[wanted]]
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        hint = "; call managed_exec.sim.enable() first" if str(wanted).startswith("sim") else ""
        raise ValueError(f"devices: {wanted!r} is not a device{hint}; {_there_is(available)}") from error
    if device.type == "cpu":
        if device.index not in (None, 0):
            raise ValueError(f"devices: there is one CPU device, got {wanted!r}; {_there_is(available)}")
        return [torch.device("cpu")]
    if device.type == "cuda" and sim.is_enabled():
        device = torch.device("sim") if device.index is None else torch.device("sim", device.index)
    found = [there for there in available if there == device or (device.index is None and there.type == device.type)]
    if not found:
        raise ValueError(f"devices: there is no device {wanted!s}; {_there_is(available)}")
    return found


def _there_is(available: tuple[torch.device, ...]) -> str:
    names = ", ".join(str(device) for device in available)
    hint = "; managed_exec.sim.enable(devices=4) simulates more" if available[0].type == "cpu" else ""
    return f"there is {names}{hint}"
