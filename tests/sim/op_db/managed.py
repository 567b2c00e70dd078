"""Modes with managed operands: resident, spilled before the call, spilled before the backward pass, under failing
allocations, and dealt out over four devices.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from .modes import AgainstCpu, Backward


class Managed(AgainstCpu):
    """Operands are managed and resident."""

    name = "managed"
    min_bytes = 1

    def prepare(self, device: str) -> None:
        """Enable the device, with a manager to which tensors below ``min_bytes`` are too small."""
        super().prepare(device)
        from managed_exec.memory.manager import configure
        from managed_exec.memory.policy import MemoryPolicy

        self._manager = configure(MemoryPolicy(min_bytes=self.min_bytes))

    def ready(self, tensor: torch.Tensor) -> torch.Tensor:
        """Manage the operand."""
        from managed_exec.tensors.managed import manage

        return manage(tensor)

    def spill_all(self) -> None:
        """Spill whatever is movable."""
        from managed_exec.errors import NotMovableError

        for record in self._manager.table.movable():
            # One may have been movable only as long as its neighbour, which shares something with it, was there.
            with contextlib.suppress(NotMovableError):
                self._manager.spill(record, "host")


class Spilled(Managed):
    """All operands are spilled before the call."""

    name = "spilled"

    @contextlib.contextmanager
    def around_call(self, operands: list[torch.Tensor]) -> Iterator[None]:
        """Spill first."""
        self.spill_all()
        yield


class SpilledBackward(Spilled, Backward):
    """Everything is spilled before the call, and everything again before the backward pass."""

    name = "spilled-backward"

    @contextlib.contextmanager
    def around_backward(self, outputs: list[torch.Tensor]) -> Iterator[None]:
        """Spill first."""
        self.spill_all()
        yield


class _InTask(Managed):
    """Can be in a task."""

    @contextlib.contextmanager
    def task(self) -> Iterator[None]:
        """Be in one."""
        from managed_exec.devices import AcceleratorDevice
        from managed_exec.managed_context import ManagedContext

        context = ManagedContext([AcceleratorDevice(torch.device("sim", 0))], self._manager)
        context.enter(0, 0, None)
        try:
            yield
        finally:
            context.leave()


class FirstTriesFail(_InTask):
    """Every allocation fails the first time it is tried, in a task: where plain factories are run again too."""

    name = "first-tries"

    @contextlib.contextmanager
    def around_call(self, operands: list[torch.Tensor]) -> Iterator[None]:
        """Let allocations fail for the call."""
        from managed_exec import sim

        with self.task():
            sim.faults.fail_first_tries()
            try:
                yield
            finally:
                sim.faults.clear()


class PartlyManaged(_InTask, SpilledBackward):
    """Small tensors are plain, large ones managed and spilled before the call and the backward pass, both in tasks."""

    name = "partly-managed"
    min_bytes = 64

    def ready(self, tensor: torch.Tensor) -> torch.Tensor:
        """Manage what is large."""
        return super().ready(tensor) if tensor.numel() * tensor.itemsize >= self.min_bytes else tensor

    @contextlib.contextmanager
    def around_call(self, operands: list[torch.Tensor]) -> Iterator[None]:
        """Spill, in a task."""
        with super().around_call(operands), self.task():
            yield

    @contextlib.contextmanager
    def around_backward(self, outputs: list[torch.Tensor]) -> Iterator[None]:
        """Spill, in another task."""
        with super().around_backward(outputs), self.task():
            yield


class Split(Managed):
    """The operands are dealt out over four devices."""

    name = "split"

    def device_of(self, index: int) -> torch.device:
        """Return the devices in turn."""
        return torch.device("sim", index % 4)
