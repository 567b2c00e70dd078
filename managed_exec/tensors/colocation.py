"""Operands on several devices: noticed below autograd, resolved above it.

Torch itself decides whether a kernel takes operands of several devices (copies do, and so do indices on the CPU). Only
if it raises are the operands brought together, by ``to()`` above autograd, so that gradients flow back to where each
operand was. They meet on the device of an operand that the kernel writes to; else of a pinned one; else on the
accelerator that holds most of their bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass

from managed_exec.memory.record import Record
from managed_exec.tensors.writes import was_written, write_count


class DeviceMismatchError(RuntimeError):
    """A kernel refused operands of several devices; ``target`` is where they should meet."""

    def __init__(self, target: torch.device, text: str) -> None:
        super().__init__(text)
        self.target = target


def tensors_of(values: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors among a call's arguments, those in lists and tuples included."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [element for element in value if isinstance(element, torch.Tensor)]
    return found


def meeting_device(
    tensors: Sequence[torch.Tensor], records: Sequence[Record], written: Sequence[torch.Tensor]
) -> torch.device | None:
    """Return where *tensors* should meet; None where they are together already.

    Raises:
        ValueError: operands are pinned to different devices.
    """
    bytes_on: dict[torch.device, int] = {}
    for tensor in tensors:
        if not _is_cpu_number(tensor):
            bytes_on[tensor.device] = bytes_on.get(tensor.device, 0) + tensor.element_size() * tensor.numel()
    if len(bytes_on) == 1 and all(device.type != "cpu" for device in bytes_on) and any(map(_is_cpu_number, tensors)):
        bytes_on[torch.device("cpu")] = 0  # not every kernel takes a number of the CPU for one of any device
    if len(bytes_on) < 2:
        return None
    if written:
        return written[0].device
    pinned = {record.device for record in records if record.pins}
    if len(pinned) > 1:
        raise ValueError(f"operands are pinned to {' and '.join(sorted(map(str, pinned)))}; unpin those of all but one")
    if pinned:
        return pinned.pop()
    return max(bytes_on, key=lambda device: (device.type != "cpu", bytes_on[device]))


class Colocated:
    """A call's arguments, brought together on one device, and the way back for those that the call writes to."""

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        target: torch.device,
        to: Callable[[torch.Tensor, torch.device], torch.Tensor],
    ) -> None:
        self._target = target
        self._to = to
        # Numbers stay on the CPU, as most kernels want them, unless there is nothing else to be moved.
        everything = tensors_of((*args, *kwargs.values()))
        self._with_numbers = all(t.device == target or _is_cpu_number(t) for t in everything)
        self._moved: list[tuple[torch.Tensor, torch.Tensor]] = []  # the original and what stands for it
        self.args = tuple(self._move(value) for value in args)
        self.kwargs = {name: self._move(value) for name, value in kwargs.items()}

    def call(self, func: Callable[..., Any]) -> Any:
        """Call *func* and write back what it wrote to operands that were moved."""
        before = write_count()
        result = func(*self.args, **self.kwargs)
        for original, moved in self._moved:
            if was_written(moved, before):
                with DisableTorchFunctionSubclass():  # copies take operands of several devices as they are
                    original.copy_(moved)
            if result is moved:
                result = original
        return result

    def _move(self, value: Any) -> Any:
        """Return *value* with every tensor on the target; the moves are part of the autograd graph."""
        if isinstance(value, torch.Tensor):
            if value.device == self._target or (_is_cpu_number(value) and not self._with_numbers):
                return value
            moved = self._to(value, self._target)
            self._moved.append((value, moved))
            return moved
        if isinstance(value, (list, tuple)) and any(isinstance(element, torch.Tensor) for element in value):
            return type(value)([self._move(element) for element in value])
        return value


def _is_cpu_number(tensor: torch.Tensor) -> bool:
    """Return whether *tensor* is a single number of the CPU, which most kernels of other devices take by value."""
    return tensor.dim() == 0 and tensor.device.type == "cpu"
