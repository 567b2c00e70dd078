"""What of the submitting thread holds in the task.

Two things, both taken at ``submit`` and both usually empty, for they are on the way of every task:

- ``SubmitterModes``: grad mode, inference mode and autocast (context variables travel beside it, as a ``Context``);
- ``SubmitterStreams``: the work the thread has queued on the pool's devices, which the task's own stream waits for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch
from torch._C import _is_any_autocast_enabled

from managed_exec.devices import Device


class SubmitterModes(NamedTuple):
    """Modes that differ from those of a fresh thread."""

    grad_enabled: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]  # device type and dtype, of each type that is enabled
    autocast_cache: bool

    @staticmethod
    def capture(device_type: str) -> SubmitterModes | None:
        """Return the calling thread's modes; None when they are those of a fresh thread, as nearly always.

        Args:
            device_type: the pool's; autocast is looked at for it, for the CPU and for CUDA.
        """
        grad_enabled = torch.is_grad_enabled()
        inference = torch.is_inference_mode_enabled()
        if grad_enabled and not inference and not _is_any_autocast_enabled():
            return None
        kinds = sorted({"cpu", "cuda", device_type})
        autocast = tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind))
        return SubmitterModes(grad_enabled, inference, autocast, torch.is_autocast_cache_enabled())

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Hold the modes in the calling thread."""
        with ExitStack() as stack:
            if self.inference is not torch.is_inference_mode_enabled():
                stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad_enabled))
            for device_type, dtype in self.autocast:
                stack.enter_context(torch.autocast(device_type, dtype=dtype, cache_enabled=self.autocast_cache))
            yield


FRESH_MODES = SubmitterModes(True, False, (), True)  # those of a thread in which nothing was changed yet


class SubmitterStreams(NamedTuple):
    """The submitting thread's current streams on the pool's devices, and how far the busy ones had come."""

    streams: tuple[torch.Stream, ...]
    pending: tuple[torch.Event, ...]

    @staticmethod
    def capture(devices: Sequence[Device]) -> SubmitterStreams:
        """Look at the calling thread's streams on *devices*, all of them accelerators.

        An event is recorded only in a stream that still has work: asking is far cheaper than recording.
        """
        streams = []
        pending = []
        for device in devices:
            stream = device.current_stream()
            if stream is None:
                continue
            streams.append(stream)
            try:
                if not stream.query():
                    pending.append(stream.record_event())
            except torch.AcceleratorError:
                # A broken device has no work worth waiting for; the task that is placed on it gets the error.
                continue
        return SubmitterStreams(tuple(streams), tuple(pending))
