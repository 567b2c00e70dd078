"""Control over the simulator's streams and engines, for tests that make races happen instead of waiting for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from managed_exec.sim.build import enabled_backend

__all__ = ["hold_stream", "kernel_time", "run_kernel"]


@contextmanager
def hold_stream(stream: torch.Stream) -> Iterator[None]:
    """Stop a stream's queue for the body: what is queued on it starts when the body ends.

    Held are queued items: copies, waits for events, and frees behind them. A kernel is run by its caller and waits for
    the items queued before it, so a kernel on a held stream with queued items blocks until another thread releases it.
    Holds of one stream nest.
    """
    backend = enabled_backend()
    backend.hold_stream(stream.device_index, stream.stream_id)
    try:
        yield
    finally:
        backend.release_stream(stream.device_index, stream.stream_id)


@contextmanager
def kernel_time(seconds: float) -> Iterator[None]:
    """Let each kernel that the calling thread runs in the body take *seconds* of its device's time.

    Other threads keep theirs; that includes autograd's threads, which run the backward pass of a device unless
    ``torch.autograd.set_multithreading_enabled(False)`` is in force.

    Raises:
        ValueError: *seconds* is negative.
    """
    if seconds < 0:
        raise ValueError(f"seconds: expected 0 or more, got {seconds!r}")
    backend = enabled_backend()
    before = backend.exchange_kernel_seconds(seconds)
    try:
        yield
    finally:
        backend.exchange_kernel_seconds(before)


def run_kernel(seconds: float) -> None:
    """Occupy the current device's compute engine for *seconds*, in the order of the current stream, and wait for it.

    Raises:
        ValueError: *seconds* is negative.
        torch.AcceleratorError: the device is broken.
    """
    if seconds < 0:
        raise ValueError(f"seconds: expected 0 or more, got {seconds!r}")
    enabled_backend().run_kernel(seconds)
