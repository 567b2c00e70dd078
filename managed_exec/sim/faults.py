"""Faults of the simulated accelerator: allocations that fail, devices that break.

Every injected failure is the error that a real device raises: ``torch.OutOfMemoryError`` or
``torch.AcceleratorError``. Faults add up until `clear`; ``sim.enable`` and ``sim.disable`` clear them too. *device* is
an index; ``None`` stands for any device. All functions may be called from any thread, and raise ``RuntimeError``
before ``sim.enable``.
"""

from __future__ import annotations

from managed_exec.sim.build import enabled_backend

__all__ = [
    "break_device",
    "clear",
    "fail_allocation",
    "fail_first_tries",
    "fail_share",
    "injected",
]


def fail_allocation(n: int, device: int | None = None) -> None:
    """Let the *n*-th allocation from now (the next is 1) fail, once.

    Raises:
        ValueError: *n* is less than 1.
    """
    if n < 1:
        raise ValueError(f"n: expected the number of an allocation, 1 for the next, got {n!r}")
    enabled_backend().fail_allocation(n, _index(device))


def fail_share(share: float, seed: int, device: int | None = None) -> None:
    """Let each allocation fail with probability *share*, by a random sequence that *seed* (0 or more) decides.

    Raises:
        ValueError: *share* is not between 0 and 1.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share: expected a probability from 0 to 1, got {share!r}")
    enabled_backend().fail_share(share, seed, _index(device))


def fail_first_tries(device: int | None = None) -> None:
    """Let every allocation fail the first time that it is tried, and pass when it is tried again.

    An allocation is known by its kernel and its number of bytes. Each thread remembers the last 64 of its own.
    """
    enabled_backend().fail_first_tries(_index(device))


def break_device(device: int) -> None:
    """Break a device for good: whatever uses it from now on raises ``torch.AcceleratorError``.

    Copies that are queued end without writing. Freeing the device's memory still works.
    """
    enabled_backend().break_device(device)


def clear() -> None:
    """Remove all faults, mend broken devices and set the count of `injected` to 0."""
    enabled_backend().clear_faults()


def injected() -> int:
    """Return how many allocations faults have made fail since the last `clear`."""
    return enabled_backend().injected_faults()


def _index(device: int | None) -> int:
    return -1 if device is None else device
