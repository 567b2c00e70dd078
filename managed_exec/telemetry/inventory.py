"""Which devices a pool would use on this machine, and why not the rest: ``python -m managed_exec devices``.

Asking initialises CUDA, and may create a context on devices whose memory NVML does not tell.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from managed_exec import sim
from managed_exec.devices import Device, nvml, resolve_devices
from managed_exec.devices.visibility import Card, Visibility, visibility
from managed_exec.sizes import format_bytes


@dataclass(frozen=True)
class InventoryItem:
    """A device, or a kind of device, and what there is to say of it."""

    device: str  # torch's name; NVML's number, as in "NVIDIA 1", where torch has none
    name: str | None = None
    uuid: str | None = None
    free_bytes: int | None = None
    total_bytes: int | None = None
    reason: str | None = None  # why it is not used, or why its memory is not known

    def __str__(self) -> str:
        memory = None
        if self.free_bytes is not None and self.total_bytes is not None:
            memory = f"{format_bytes(self.free_bytes)} of {format_bytes(self.total_bytes)} free"
        return "  ".join(part for part in (self.device, self.name, self.uuid, memory, self.reason) if part)


@dataclass(frozen=True)
class Inventory:
    """The devices that ``GPUPoolExecutor()`` would use, and those that it would not."""

    used: tuple[InventoryItem, ...]
    not_used: tuple[InventoryItem, ...]

    def __str__(self) -> str:
        lines = ["GPUPoolExecutor() would use", *(f"  {item}" for item in self.used)]
        if self.not_used:
            lines += ["and would not use", *(f"  {item}" for item in self.not_used)]
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """Return it as what ``json`` writes."""
        return asdict(self)


def inventory() -> Inventory:
    """Look at the machine's devices.

    Raises:
        ValueError: ``MANAGED_EXEC_SIM`` cannot be read.
        SimulatorUnavailableError: it asks for a simulator that cannot be built.
    """
    used = tuple(map(_used, resolve_devices()))
    return Inventory(used, tuple(_not_used(used)))


def _used(device: Device) -> InventoryItem:
    place = device.torch_device
    uuid = nvml.cuda_uuid(place.index) if place.type == "cuda" else None
    try:
        memory = device.memory()
    except RuntimeError as error:  # torch's for a device that is broken, or has no room for a context
        return InventoryItem(str(place), _name(place), uuid, reason=f"its memory cannot be read: {_first_line(error)}")
    return InventoryItem(str(place), _name(place), uuid, memory.free_bytes, memory.total_bytes)


def _name(place: torch.device) -> str | None:
    if place.type == "cpu":
        return f"{os.cpu_count()} processors, {platform.machine()}"
    get_name = getattr(torch.get_device_module(place), "get_device_name", None)
    return None if get_name is None else str(get_name(place.index))


def _not_used(used: tuple[InventoryItem, ...]) -> Iterator[InventoryItem]:
    try:
        cards = nvml.cards()
    except nvml.NvmlError as error:
        yield InventoryItem("NVIDIA", reason=f"cards cannot be listed: {error}")
        cards = ()
    obstacle = _obstacle()
    if not cards and not used[0].device.startswith("cuda"):
        yield InventoryItem("CUDA", reason=obstacle or _cuda_problem() or "CUDA shows no device")
    seen = visibility(cards, os.environ.get("CUDA_VISIBLE_DEVICES"))
    used_uuids = {item.uuid for item in used}
    for card in cards:
        yield from _unused_of(card, used_uuids, obstacle, seen)
    if used[0].device != "cpu":
        yield InventoryItem("cpu", reason="used where there is no accelerator, and for devices='cpu'")


def _unused_of(
    card: Card, used_uuids: set[str | None], obstacle: str | None, seen: Visibility
) -> Iterator[InventoryItem]:
    """Yield a card and its instances, those that are not used, with what keeps each from being used."""
    device = f"NVIDIA {card.number}"
    if card.uuid is None:
        yield InventoryItem(device, reason=card.problem)
        return
    if card.is_mig and not card.instances:
        yield InventoryItem(device, card.name, card.uuid, reason="in MIG mode, but has no instance: create one")
        return
    devices = {i.uuid: f"{device} MIG {i.gpu_instance}/{i.compute_instance}" for i in card.instances}
    if not card.is_mig:
        devices = {card.uuid: device}
    for uuid, name in devices.items():
        if uuid not in used_uuids:
            free, total = nvml.memory(uuid) or (None, None)
            reason = obstacle or seen.why_hidden(uuid) or _cuda_problem() or card.problem
            yield InventoryItem(name, card.name, uuid, free, total, reason or "CUDA does not show it to this process")


def _obstacle() -> str | None:
    """Return what keeps every NVIDIA card from being used; None if that is a matter of each card, or of CUDA."""
    if sim.is_enabled():
        return "the simulated accelerator is enabled, and hides real ones from the process"
    if torch.version.cuda is None:
        return f"this torch, {torch.__version__}, is built without CUDA; install one that is, see https://pytorch.org"
    return None


def _cuda_problem() -> str | None:
    """Return what CUDA says when it cannot be used; None if it can."""
    try:
        torch.cuda.current_device()  # initialises it
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built with CUDA
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        setting = "" if visible is None else f"; CUDA_VISIBLE_DEVICES={visible!r}"
        return f"CUDA cannot be used: {_first_line(error)}{setting}"
    return None


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
