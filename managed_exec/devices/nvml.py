"""Readings from NVIDIA's management library, by UUID.

NVML numbers cards by PCI bus and knows nothing of ``CUDA_VISIBLE_DEVICES``; CUDA numbers the visible ones, by default
fastest first. So a CUDA index is translated to a UUID, and everything is read by that.

Where there is no driver, or a query fails, a reading is ``None``: telemetry guides placement, it never fails a task.
One NVML session a process, opened on first use; ``session.cache_clear()`` forgets it.
"""

from __future__ import annotations

import functools
import logging
import os
from typing import Any, NamedTuple

import torch

_log = logging.getLogger(__name__)


class NvmlMemory(NamedTuple):
    """Memory of one card as the driver sees it, every process counted, in bytes."""

    free_bytes: int
    total_bytes: int


@functools.lru_cache(maxsize=1)
def session() -> Any | None:
    """Return the initialised ``pynvml`` module; None, with the reason in the log, where NVML cannot be used.

    Safe from several threads: NVML counts its own initialisations, and the library stays loaded until the process ends.
    """
    try:
        import pynvml
    except ImportError as error:
        _log.info("no NVML readings: %s; pip install nvidia-ml-py", error)
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        _log.info("no NVML readings: %s", error)
        return None
    return pynvml


def cuda_uuid(index: int) -> str | None:
    """Return the NVML UUID of what CUDA calls device *index* in this process; None where that cannot be known."""
    if torch.cuda.is_available() and index < torch.cuda.device_count():
        # CUDA's own answer is right whatever CUDA_DEVICE_ORDER says.
        uuid = str(torch.cuda.get_device_properties(index).uuid)
        return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
    uuids = visible_uuids(os.environ.get("CUDA_VISIBLE_DEVICES"))
    return uuids[index] if index < len(uuids) else None


def visible_uuids(cuda_visible_devices: str | None) -> list[str]:
    """Return the UUIDs of the cards that CUDA shows under a value of ``CUDA_VISIBLE_DEVICES``, in CUDA's order.

    As the CUDA programming guide has it: indices or unambiguous UUID prefixes, cut off at the first that is invalid;
    a card named twice leaves none. ``None`` (the variable is not set) shows all.
    """
    nvml = session()
    if nvml is None:
        return []
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        uuids = [_text(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]
    except nvml.NVMLError as error:
        _log.info("NVML could not list the cards: %s", error)
        return []
    if cuda_visible_devices is None:
        return uuids
    visible: list[str] = []
    for token in cuda_visible_devices.split(","):
        name = token.strip()
        if name.isdecimal():
            matches = uuids[int(name) : int(name) + 1]
        elif name.startswith("MIG-"):
            matches = [name]  # an instance is not among the cards; NVML finds it by its UUID
        else:
            matches = [uuid for uuid in uuids if name.startswith("GPU-") and uuid.startswith(name)]
        if len(matches) != 1:
            break
        visible.append(matches[0])
    return visible if len(set(visible)) == len(visible) else []


def memory(uuid: str) -> NvmlMemory | None:
    """Read the memory of the card or MIG instance *uuid*; None when NVML cannot tell."""
    info = _query("nvmlDeviceGetMemoryInfo", uuid)
    return None if info is None else NvmlMemory(int(info.free), int(info.total))


def utilization(uuid: str) -> float | None:
    """Read in what share of the last sampling period a kernel ran on *uuid*, 0 to 1; None when NVML cannot tell."""
    rates = _query("nvmlDeviceGetUtilizationRates", uuid)
    return None if rates is None else float(rates.gpu) / 100


def _query(function: str, uuid: str) -> Any | None:
    nvml = session()
    if nvml is None:
        return None
    try:
        return getattr(nvml, function)(nvml.nvmlDeviceGetHandleByUUID(uuid))
    except nvml.NVMLError as error:
        _log.debug("%s of %s: %s", function, uuid, error)
        return None


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name
