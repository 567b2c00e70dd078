"""What becomes ``torch.sim``: the functions that torch and programs look for in a device's module.

Registered by ``sim.enable``. A *device* is an index, text such as ``"sim:1"``, a ``torch.device``, or ``None`` for the
current device.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import torch

from managed_exec.sim.build import enabled_backend as _backend

_Device: TypeAlias = torch.device | str | int | None


class _Indices:
    """Where ``torch.load`` looks for the index that a location stands for."""

    @staticmethod
    def _get_device_index(device: _Device, optional: bool = False, allow_cpu: bool = False) -> int:
        return _index(device)


_utils = _Indices


def _index(device: _Device) -> int:
    if isinstance(device, int):
        return current_device() if device < 0 else device
    if device is None:
        return current_device()
    device = torch.device(device)
    if device.type != "sim":
        raise ValueError(f"expected a sim device, got {device}")
    return current_device() if device.index is None else device.index


# Devices


def is_available() -> bool:
    """Return whether there are simulated devices."""
    return device_count() > 0


def is_initialized() -> bool:
    """Return whether there are simulated devices; there is nothing else to initialise."""
    return is_available()


def init() -> None:
    """Do nothing: ``sim.enable`` has done it."""


def _lazy_init() -> None:
    """Do nothing: ``sim.enable`` has done it."""


def _is_in_bad_fork() -> bool:
    """Return whether this process was forked while copies were queued, so that it cannot use the simulator."""
    return _backend().in_bad_fork()


def device_count() -> int:
    """Return the number of simulated devices."""
    return _backend().device_count()


def current_device() -> int:
    """Return the index of the calling thread's current device."""
    return _backend().current_device()


def set_device(device: _Device) -> None:
    """Change the calling thread's current device."""
    _backend().set_device(_index(device))


def _exchange_device(device: int) -> int:
    return _backend().exchange_device(device)


def _maybe_exchange_device(device: int) -> int:
    return _backend().exchange_device(device)


def get_device_name(device: _Device = None) -> str:
    """Return a device's name."""
    return f"Simulated accelerator {_index(device)}"


def get_device_capability(device: _Device = None) -> dict[str, Any]:
    """Return what ``torch.accelerator.get_device_capability`` returns."""
    return torch.accelerator.get_device_capability(_index(device))


def can_device_access_peer(device: _Device, peer_device: _Device) -> bool:
    """Return whether a device reads another one's memory directly: any two do."""
    return _index(device) != _index(peer_device)


class device:  # noqa: N801  # the name that torch looks for
    """Context manager: the calling thread's current device is another one in the body."""

    def __init__(self, device: _Device) -> None:
        self.idx = _index(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = _backend().exchange_device(self.idx)

    def __exit__(self, *exception: object) -> None:
        _backend().exchange_device(self.prev_idx)


class device_of(device):  # noqa: N801  # the name that torch looks for
    """Context manager: the current device is a tensor's in the body; nothing changes for tensors elsewhere."""

    def __init__(self, obj: torch.Tensor) -> None:
        super().__init__(obj.device.index if obj.device.type == "sim" else -1)


def synchronize(device: _Device = None) -> None:
    """Wait for all queued work of a device.

    Raises:
        torch.AcceleratorError: the device is broken.
    """
    _backend().synchronize(_index(device))


# Streams and events


class Stream(torch.Stream):
    """A stream of a simulated device."""

    def __new__(cls, device: _Device = None, priority: int = 0, **ids: int) -> Stream:
        if ids:
            return super().__new__(cls, priority=priority, **ids)
        return super().__new__(cls, device=torch.device("sim", _index(device)), priority=priority)


class Event(torch.Event):
    """An event of a simulated device; with *enable_timing* it knows when it was reached."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Event:
        return super().__new__(cls, device="sim", enable_timing=enable_timing, blocking=blocking)


def current_stream(device: _Device = None) -> torch.Stream:
    """Return the calling thread's current stream of a device."""
    return torch.accelerator.current_stream(_index(device))


def default_stream(device: _Device = None) -> torch.Stream:
    """Return a device's default stream."""
    index = _index(device)
    return torch.Stream(stream_id=0, device_index=index, device_type=_device_type())


def set_stream(stream: torch.Stream) -> None:
    """Make a stream the calling thread's current one of its device, and its device the current device."""
    torch.accelerator.set_stream(stream)


class stream:  # noqa: N801  # the name that torch looks for
    """Context manager: a stream is the current one of its device, and its device the current one, in the body."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> torch.Stream | None:
        if self.stream is not None:
            self.prev_idx = current_device()
            self.prev_stream = current_stream(self.stream.device_index)
            set_stream(self.stream)
        return self.stream

    def __exit__(self, *exception: object) -> None:
        if self.stream is not None:
            set_stream(self.prev_stream)
            set_device(self.prev_idx)


def _device_type() -> int:
    return int(torch.accelerator.current_stream(0).device_type)


# Memory, in bytes


def empty_cache() -> None:
    """Release freed memory that is kept for reuse."""
    torch.accelerator.empty_cache()


def memory_stats(device: _Device = None) -> dict[str, Any]:
    """Return the allocator's statistics under CUDA's names."""
    return torch.accelerator.memory_stats(_index(device))


def memory_allocated(device: _Device = None) -> int:
    """Return the bytes of live tensors."""
    return torch.accelerator.memory_allocated(_index(device))


def max_memory_allocated(device: _Device = None) -> int:
    """Return the most bytes of live tensors since the last reset."""
    return torch.accelerator.max_memory_allocated(_index(device))


def memory_reserved(device: _Device = None) -> int:
    """Return the bytes that the allocator holds: live, waiting for a stream, and kept for reuse."""
    return torch.accelerator.memory_reserved(_index(device))


def max_memory_reserved(device: _Device = None) -> int:
    """Return the most bytes that the allocator held since the last reset."""
    return torch.accelerator.max_memory_reserved(_index(device))


def reset_peak_memory_stats(device: _Device = None) -> None:
    """Let the peaks begin at what is in use now."""
    torch.accelerator.reset_peak_memory_stats(_index(device))


def reset_accumulated_memory_stats(device: _Device = None) -> None:
    """Set the accumulated counts to 0."""
    torch.accelerator.reset_accumulated_memory_stats(_index(device))


def mem_get_info(device: _Device = None) -> tuple[int, int]:
    """Return the bytes that the allocator does not hold, and the capacity."""
    return _backend().memory_info(_index(device))


# Random numbers


def _default_generators() -> Iterable[torch.Generator]:
    return (_backend().default_generator(index) for index in range(device_count()))


def __getattr__(name: str) -> Any:
    if name == "default_generators":
        return tuple(_default_generators())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def manual_seed(seed: int) -> None:
    """Seed the current device's generator."""
    _backend().default_generator(-1).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seed all devices' generators."""
    for generator in _default_generators():
        generator.manual_seed(seed)


def seed() -> int:
    """Seed the current device's generator at random; return the seed."""
    return _backend().default_generator(-1).seed()


def seed_all() -> None:
    """Seed all devices' generators with one random seed."""
    if device_count():
        manual_seed_all(seed())


def initial_seed() -> int:
    """Return the seed of the current device's generator."""
    return _backend().default_generator(-1).initial_seed()


def get_rng_state(device: _Device = "sim") -> torch.Tensor:
    """Return the state of a device's generator, a uint8 tensor on the host."""
    return _backend().default_generator(_index(device)).get_state()


def set_rng_state(new_state: torch.Tensor, device: _Device = "sim") -> None:
    """Set the state of a device's generator."""
    _backend().default_generator(_index(device)).set_state(new_state.cpu())


def get_rng_state_all() -> list[torch.Tensor]:
    """Return the states of all devices' generators."""
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """Set the states of all devices' generators."""
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


# Mixed precision


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return the types that ``torch.autocast("sim")`` may lower to."""
    return [torch.bfloat16, torch.float16]


def is_autocast_enabled() -> bool:
    """Return whether autocast is on for simulated devices in the calling thread."""
    return torch.is_autocast_enabled("sim")


def set_autocast_enabled(enabled: bool) -> None:
    """Turn autocast on or off for simulated devices in the calling thread."""
    torch.set_autocast_enabled("sim", enabled)


def get_autocast_dtype() -> torch.dtype:
    """Return the type that autocast lowers to on simulated devices."""
    return torch.get_autocast_dtype("sim")


def set_autocast_dtype(dtype: torch.dtype) -> None:
    """Set the type that autocast lowers to on simulated devices."""
    torch.set_autocast_dtype("sim", dtype)


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Return true: kernels are the CPU's."""
    return True
