"""The simulated accelerator as a whole: how many devices there are, of what size and speed."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import threading
from typing import NamedTuple

import torch
from torch.utils.backend_registration import generate_methods_for_privateuse1_backend, rename_privateuse1_backend

from managed_exec.errors import SimulatorBusyError, SimulatorUnavailableError
from managed_exec.sim.build import Backend, enabled_backend, load_backend, loaded_backend
from managed_exec.sizes import format_bytes, parse_bytes

__all__ = [
    "Configuration",
    "configuration",
    "disable",
    "enable",
    "enable_from_environment",
    "is_enabled",
    "set_capacity",
]

_BACKEND_NAME = "sim"
_VARIABLE = "MANAGED_EXEC_SIM"
_FORM = re.compile(r"\s*(\d+)\s*x\s*(\S.*?)\s*")

# Held while the configuration changes, so that of two threads one finds the other's work done.
_lock = threading.Lock()


class Configuration(NamedTuple):
    """What ``enable`` was given, by the names of its arguments."""

    devices: int
    memory: int | str
    host_bandwidth: float | None
    peer_bandwidth: float | None
    kernel_s: float


class _Process:
    """What the process's simulator is now; None while there are no simulated devices. Changed under the lock."""

    configuration: Configuration | None = None


def enable(
    devices: int = 1,
    memory: int | str = "1GiB",
    *,
    host_bandwidth: float | None = None,
    peer_bandwidth: float | None = None,
    kernel_s: float = 0.0,
) -> None:
    """Make *devices* simulated devices, ``sim:0`` and on, and let ``torch.accelerator`` mean them.

    The first call in a process builds the backend if need be and registers it with torch. Later calls change the
    configuration, clear all faults and forget statistics; random generators keep their state.

    Args:
        devices: how many, from 1 to 64.
        memory: capacity of each device, in bytes or as text (``"1GiB"``).
        host_bandwidth: bytes per second of each device's link to the host, in each direction; ``None``: no time.
        peer_bandwidth: bytes per second from each device to each other; ``None``: no time.
        kernel_s: seconds that each kernel occupies its device's engine; see also ``sim.kernel_time``.

    Raises:
        TypeError, ValueError: an argument is of the wrong type, or out of range.
        SimulatorUnavailableError: the backend cannot be built here, or torch has another backend of this kind.
        SimulatorBusyError: simulated memory is in use; nothing was changed.
    """
    capacity = parse_bytes(memory, name="memory")
    for name, bandwidth in (("host_bandwidth", host_bandwidth), ("peer_bandwidth", peer_bandwidth)):
        if bandwidth is not None and _number(bandwidth, name, "bytes per second, such as 10e9, or None") <= 0:
            raise ValueError(f"{name}: expected more than 0 bytes per second, or None for no time, got {bandwidth!r}")
    if _number(kernel_s, "kernel_s", "seconds, such as 1e-3") < 0:
        raise ValueError(f"kernel_s: expected 0 or more seconds, got {kernel_s!r}")
    if isinstance(devices, bool) or not isinstance(devices, int):
        raise TypeError(f"devices: expected how many, an int from 1 to 64, got {devices!r}")
    if devices < 1 or devices > 64:
        raise ValueError(f"devices: expected 1 to 64, got {devices!r}")
    with _lock:
        backend = _registered_backend()
        _check_nothing_live(backend)
        backend.configure(devices, capacity, host_bandwidth or 0.0, peer_bandwidth or 0.0, kernel_s)
        _Process.configuration = Configuration(devices, capacity, host_bandwidth, peer_bandwidth, kernel_s)


def _number(value: object, name: str, expected: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: expected {expected}, got {value!r}")
    return value


def disable() -> None:
    """Hide the simulated devices: there are none, and ``torch.accelerator.is_available()`` is false.

    torch cannot forget a backend. Once enabled, the name ``sim`` stays registered for the rest of the process, and so,
    on a machine with a real accelerator, ``torch.accelerator`` keeps meaning the simulator; use another process for the
    real one.

    Raises:
        SimulatorBusyError: simulated memory is in use; nothing was changed.
    """
    with _lock:
        backend = loaded_backend()
        if backend is not None:
            _check_nothing_live(backend)
            backend.configure(0, 0, 0.0, 0.0, 0.0)
            _Process.configuration = None


def is_enabled() -> bool:
    """Return whether there are simulated devices."""
    backend = loaded_backend()
    return backend is not None and backend.device_count() > 0


def configuration() -> Configuration | None:
    """Return what ``enable`` was given, so that another process can be given the same; None if not enabled.

    Capacities changed since, and faults, are not part of it.
    """
    return _Process.configuration


def enable_from_environment() -> bool:
    """Enable what the environment variable ``MANAGED_EXEC_SIM`` says, such as ``4x1GiB``; return whether it is set.

    Raises:
        ValueError: the variable cannot be read.
        SimulatorUnavailableError, SimulatorBusyError: as `enable`.
    """
    text = os.environ.get(_VARIABLE, "").strip()
    if not text:
        return False
    match = _FORM.fullmatch(text)
    try:
        if match is None:
            raise ValueError("not of the form DEVICESxMEMORY")
        devices, memory = int(match[1]), parse_bytes(match[2], name="memory")
        if devices < 1 or devices > 64:
            raise ValueError(f"expected 1 to 64 devices, got {devices}")
    except ValueError as error:
        raise ValueError(
            f"{_VARIABLE}: expected devices and the memory of each, like '4x1GiB', got {text!r} ({error})"
        ) from None
    enable(devices, memory)
    return True


def set_capacity(device: int, memory: int | str) -> None:
    """Change a device's capacity. Below what is in use, only further allocations fail.

    Args:
        device: index.
        memory: in bytes or as text (``"1GiB"``).
    """
    enabled_backend().set_capacity(device, parse_bytes(memory, name="memory"))


def _registered_backend() -> Backend:
    """Return the backend, registered with torch. The lock is held."""
    backend = loaded_backend()
    if backend is not None:
        return backend
    name = torch._C._get_privateuse1_backend_name()
    if name != "privateuseone":
        raise SimulatorUnavailableError(
            f"torch has one place for a backend from outside, and {name!r} has taken it in this process"
        )
    backend = load_backend()
    backend.register_backend()
    from managed_exec.sim import module

    rename_privateuse1_backend(_BACKEND_NAME)
    torch._register_device_module(_BACKEND_NAME, module)  # type: ignore[no-untyped-call]  # torch's is not annotated
    generate_methods_for_privateuse1_backend(
        for_tensor=True, for_module=True, for_packed_sequence=True, for_storage=True
    )
    return backend


def _check_nothing_live(backend: Backend) -> None:
    if any(backend.live_bytes()):
        gc.collect()  # tensors in reference cycles (exceptions hold frames) are no longer anyone's
        for device in range(backend.device_count()):
            _finish_queued_frees(backend, device)
    live = backend.live_bytes()
    if any(live):
        held = ", ".join(f"sim:{i} {format_bytes(n)} ({n} bytes)" for i, n in enumerate(live) if n)
        raise SimulatorBusyError(
            f"the simulator cannot be changed while simulated memory is in use: {held}; drop those tensors first, "
            "also those in results, futures and exceptions that you hold"
        )


def _finish_queued_frees(backend: Backend, device: int) -> None:
    with contextlib.suppress(torch.AcceleratorError):  # a broken device's queued work ends as well
        backend.synchronize(device)
