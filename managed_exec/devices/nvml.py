"""Readings from NVIDIA's management library, by UUID.

NVML numbers cards by PCI bus and knows nothing of ``CUDA_VISIBLE_DEVICES``; CUDA numbers the visible ones, by default
fastest first. So a CUDA index is translated to a UUID, and everything is read by that.

Where there is no driver, or a query fails, a reading is ``None``: telemetry guides placement, it never fails a task.
``unavailable`` and ``reading`` say why. A card that is lost does not keep the others from being read.

One NVML session a process, opened on first use; ``reset`` forgets it. NVML's own functions may be called from several
threads at once, and nothing here holds a lock while they are, but for the one that opens the session.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch

from managed_exec.devices.visibility import Card, Instance, visibility

_log = logging.getLogger(__name__)

T = TypeVar("T")

# Return codes of nvml.h, whose numbers never change, and what to do about those that users meet.
_NOT_SUPPORTED, _NOT_FOUND, _FUNCTION_NOT_FOUND = 3, 6, 13
_ADVICE = {
    4: "only some users of this machine may read that",
    9: "load the NVIDIA driver (nvidia-smi does), if there is an NVIDIA device",
    12: "there is no NVIDIA driver, or this container was started without it",
    13: "the NVIDIA driver is too old for that",
    15: "it no longer answers on its bus; reset it or reboot",
    18: "the NVIDIA driver's library and its kernel module differ in version, as after an update; reboot",
}


class NvmlMemory(NamedTuple):
    """Memory of one card as the driver sees it, every process counted, in bytes."""

    free_bytes: int
    total_bytes: int


class Process(NamedTuple):
    """A process that uses a card. NVML sees all users' processes, and counts as the host does."""

    pid: int
    name: str | None  # None: NVML does not say
    used_bytes: int | None  # None: NVML does not say


class Reading(NamedTuple):
    """All there is to read of one card or MIG instance; None is what NVML does not tell, and ``problems`` say why."""

    memory: NvmlMemory | None
    utilization: float | None  # 0 to 1
    processes: tuple[Process, ...] | None
    problems: tuple[str, ...]


class NvmlError(Exception):
    """NVML does not answer; the text says why. Nothing has changed, and other questions may be answered."""

    def __init__(self, reason: str, code: int | None = None) -> None:
        super().__init__(reason)
        self.code = code  # of nvml.h; None where NVML was not reached


class _Session(NamedTuple):
    """What came of opening NVML: the initialised ``pynvml``, or the reason why there is none."""

    pynvml: Any | None
    reason: str | None


# Written once, under the lock, which a thread holds while it imports pynvml and initialises NVML. That waits for no
# other thread, and takes no lock of this package: it is a leaf.
_session: _Session | None = None
_lock = threading.Lock()


def session() -> Any | None:
    """Return the initialised ``pynvml`` module; None, with the reason in the log, where NVML cannot be used."""
    return _open().pynvml


def unavailable() -> str | None:
    """Return why NVML cannot be used in this process, and what to do; None if it can."""
    return _open().reason


def reset() -> None:
    """Forget the session; the next use opens one. For tests."""
    global _session
    with _lock:
        if _session is not None and _session.pynvml is not None:
            _session.pynvml.nvmlShutdown()  # NVML counts its initialisations
        _session = None


def _open() -> _Session:
    global _session
    found = _session
    if found is not None:
        return found
    with _lock:
        is_first = _session is None
        found = _session = _session or _opened()
    if is_first and found.reason is not None:
        _log.info("no NVML readings: %s", found.reason)
    return found


def _opened() -> _Session:
    try:
        import pynvml
    except ImportError as error:
        return _Session(None, f"{error}; pip install nvidia-ml-py")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return _Session(None, str(_explained(error)))
    return _Session(pynvml, None)


def cards() -> tuple[Card, ...]:
    """List all cards and their MIG instances, visible to CUDA or not.

    Raises:
        NvmlError: NVML cannot be used, or not even count them.
    """
    return tuple(_card(index) for index in range(_call("nvmlDeviceGetCount")))


def visible_uuids(cuda_visible_devices: str | None) -> list[str]:
    """Return the UUIDs of what CUDA shows under a value of ``CUDA_VISIBLE_DEVICES``, in CUDA's order.

    ``None`` means that the variable is not set. Empty where the cards cannot be listed.
    """
    return list(visibility(_known_cards(), cuda_visible_devices).uuids)


def cuda_uuid(index: int) -> str | None:
    """Return the NVML UUID of what CUDA calls device *index* in this process; None where that cannot be known."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if torch.cuda.is_available() and index < torch.cuda.device_count():
        # CUDA's own answer is right whatever CUDA_DEVICE_ORDER says.
        return _as_nvml_writes(str(torch.cuda.get_device_properties(index).uuid), visible)
    uuids = visible_uuids(visible)
    return uuids[index] if index < len(uuids) else None


def memory(uuid: str) -> NvmlMemory | None:
    """Read the memory of the card or MIG instance *uuid*; None when NVML cannot tell."""
    return _or_none(lambda: _memory(_handle(uuid)))


def utilization(uuid: str) -> float | None:
    """Read in what share of the last sampling period a kernel ran on *uuid*, 0 to 1; None when NVML cannot tell."""
    return _or_none(lambda: _utilization(_handle(uuid)))


def reading(uuid: str) -> Reading:
    """Read all there is of the card or MIG instance *uuid*, and the reasons for what is missing."""
    try:
        handle = _handle(uuid)
    except NvmlError as error:
        return Reading(None, None, None, (str(error),))
    answers: dict[str, Any] = {}
    refused: dict[str, list[str]] = {}  # what is missing, by reason: a lost card has one for all
    for what, read in (("memory", _memory), ("utilization", _utilization), ("processes", _processes)):
        try:
            answers[what] = read(handle)
        except NvmlError as error:
            refused.setdefault(str(error), []).append(what)
    problems = tuple(f"{', '.join(whats)}: {reason}" for reason, whats in refused.items())
    return Reading(answers.get("memory"), answers.get("utilization"), answers.get("processes"), problems)


def _memory(handle: Any) -> NvmlMemory:
    info = _call("nvmlDeviceGetMemoryInfo", handle)
    return NvmlMemory(int(info.free), int(info.total))


def _utilization(handle: Any) -> float:
    return float(_call("nvmlDeviceGetUtilizationRates", handle).gpu) / 100


def _processes(handle: Any) -> tuple[Process, ...]:
    """Return the processes that compute on a device, then those that only draw."""
    # Devices for computing alone do not list what draws.
    running = [*_running("Compute", handle), *(_or_none(_running, "Graphics", handle) or ())]
    used_bytes: dict[int, int | None] = {}
    for process in running:
        used_bytes.setdefault(process.pid, process.usedGpuMemory)  # one that does both is listed twice
    return tuple(
        # NVML does not name another user's process, nor one that has just ended.
        Process(pid, _or_none(_call, "nvmlSystemGetProcessName", pid), n_bytes)
        for pid, n_bytes in used_bytes.items()
    )


def _running(kind: str, handle: Any) -> list[Any]:
    try:
        return list(_call(f"nvmlDeviceGet{kind}RunningProcesses_v3", handle))
    except NvmlError as error:
        if error.code != _FUNCTION_NOT_FOUND:
            raise
        return list(_call(f"nvmlDeviceGet{kind}RunningProcesses_v2", handle))  # drivers before 510


def _known_cards() -> tuple[Card, ...]:
    return _or_none(cards) or ()


def _card(index: int) -> Card:
    try:
        handle = _call("nvmlDeviceGetHandleByIndex", index)
        uuid = _call("nvmlDeviceGetUUID", handle)
    except NvmlError as error:
        return Card(index, None, problem=str(error))
    name = _or_none(_call, "nvmlDeviceGetName", handle)
    try:
        instances = tuple(map(_instance, _instance_handles(handle)))
        return Card(index, uuid, name, _is_mig(handle), instances)
    except NvmlError as error:
        return Card(index, uuid, name, problem=f"MIG: {error}")


def _instance(handle: Any) -> Instance:
    return Instance(
        _call("nvmlDeviceGetUUID", handle),
        _call("nvmlDeviceGetGpuInstanceId", handle),
        _call("nvmlDeviceGetComputeInstanceId", handle),
    )


def _is_mig(card: Any) -> bool:
    try:
        current, _pending = _call("nvmlDeviceGetMigMode", card)
    except NvmlError as error:
        if error.code in (_NOT_SUPPORTED, _FUNCTION_NOT_FOUND):  # by the card; by a driver from before MIG
            return False
        raise
    return bool(current)


def _instance_handles(card: Any) -> list[Any]:
    handles = []
    for index in range(_call("nvmlDeviceGetMaxMigDeviceCount", card) if _is_mig(card) else 0):
        try:
            handles.append(_call("nvmlDeviceGetMigDeviceHandleByIndex", card, index))
        except NvmlError as error:
            if error.code != _NOT_FOUND:  # the numbers of instances have gaps
                raise
    return handles


def _handle(uuid: str) -> Any:
    try:
        return _call("nvmlDeviceGetHandleByUUID", uuid)
    except NvmlError:
        # While a card is lost NVML may refuse every UUID, for it asks all cards. By number it asks one.
        for handle in _all_handles():
            if _or_none(_call, "nvmlDeviceGetUUID", handle) == uuid:
                return handle
        raise


def _all_handles() -> Iterator[Any]:
    for index in range(_or_none(_call, "nvmlDeviceGetCount") or 0):
        card = _or_none(_call, "nvmlDeviceGetHandleByIndex", index)
        if card is not None:
            yield card
            yield from _or_none(_instance_handles, card) or ()


def _as_nvml_writes(uuid: str, visible: str | None) -> str:
    """Return NVML's name for CUDA's *uuid*, which has no prefix, and may be the card's where an instance is meant."""
    bare = uuid.removeprefix("GPU-").removeprefix("MIG-")
    listed = _known_cards()
    for card in listed:
        instances = [instance.uuid for instance in card.instances]
        if f"MIG-{bare}" in instances:
            return f"MIG-{bare}"
        if card.uuid == f"GPU-{bare}" and instances:
            return next((shown for shown in visibility(listed, visible).uuids if shown in instances), instances[0])
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


def _or_none(ask: Callable[..., T], *args: Any) -> T | None:
    """Return an answer that is not indispensable; None, with the reason in the log, where NVML refuses it."""
    try:
        return ask(*args)
    except NvmlError as error:
        _log.debug("NVML: %s", error)
        return None


def _call(function: str, *args: Any) -> Any:
    """Call a function of ``pynvml``.

    Raises:
        NvmlError: NVML cannot be used, does not have the function, or refuses.
    """
    pynvml, reason = _open()
    if pynvml is None:
        raise NvmlError(str(reason))
    if not hasattr(pynvml, function):
        raise NvmlError(f"this pynvml has no {function}; pip install --upgrade nvidia-ml-py", _FUNCTION_NOT_FOUND)
    try:
        answer = getattr(pynvml, function)(*args)
    except pynvml.NVMLError as error:
        raise _explained(error) from error
    except UnicodeDecodeError as error:  # the name of a process, which can be any bytes
        raise NvmlError(f"{function} returned {error.object!r}, which is no text") from error
    return answer.decode(errors="replace") if isinstance(answer, bytes) else answer  # pynvml before 11.5


def _explained(error: Exception) -> NvmlError:
    code = getattr(error, "value", None)
    advice = _ADVICE.get(code) if isinstance(code, int) else None
    return NvmlError(f"{error}: {advice}" if advice else str(error), code)
