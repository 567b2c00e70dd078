"""The same operands on another device.

Covers tensors (strided ones with their strides, offset, overlap, conjugate and negative bit; operands that share a
storage go on sharing it), generators and device arguments. Sparse operands are copied with ``.to``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

# Entries with an operand that torch wants on the CPU whatever the device; of these, integer tensors stay there.
STAYS_ON_CPU = {"tensor_split": "tensor_indices_or_sections is read on the CPU, on CUDA as well"}


def walk(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Rebuild nested tuples, lists and dictionaries with ``leaf`` applied to what they hold."""
    if isinstance(value, dict):
        return {k: walk(v, leaf) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        items = [walk(v, leaf) for v in value]
        if type(value) in (tuple, list):
            return type(value)(items)
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return leaf(value)


def leaves(value: Any) -> list[Any]:
    """Return what nested tuples, lists and dictionaries hold, in order."""
    found: list[Any] = []
    walk(value, found.append)
    return found


class Placement:
    """Copies the operands of one call; remembers storages, so that aliases stay aliases."""

    def __init__(
        self,
        device_of: Callable[[int], torch.device],
        ready: Callable[[torch.Tensor], torch.Tensor] = lambda t: t,
        *,
        integers_stay: bool = False,
    ) -> None:
        """Take the device of the n-th distinct storage, and what is done to an operand that has arrived.

        Device arguments and generators become those of the 0-th. ``ready`` sees a tensor that wants no gradient yet,
        and may return another one.
        """
        self._device_of = device_of
        self._ready = ready
        self._integers_stay = integers_stay
        self.used = False  # whether anything was placed; otherwise the call does not know of the device
        self._bases: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self._tensors: dict[int, torch.Tensor] = {}
        self._count = 0

    def __call__(self, value: Any) -> Any:
        """Return the counterpart of one leaf."""
        if isinstance(value, torch.Tensor):
            if self._integers_stay and not value.is_floating_point():
                return value
            self.used = True
            if id(value) not in self._tensors:
                # Below autograd the copy is not recorded as a view: nothing but the operand refers to its storage.
                with torch._C._AutoDispatchBelowAutograd():
                    placed = self._copy(value.detach())
                self._tensors[id(value)] = self._ready(placed).requires_grad_(value.requires_grad)
            return self._tensors[id(value)]
        if isinstance(value, torch.Generator):
            return torch.Generator(self._device_of(0)).manual_seed(value.initial_seed())
        if isinstance(value, torch.device) or (isinstance(value, str) and value == "cpu"):
            self.used = True
            return type(value)(self._device_of(0))
        return value

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided or tensor.is_nested:
            return tensor.to(self._next_device(), copy=True)
        if tensor.is_conj():
            return self._copy(tensor.conj()).conj()
        if tensor.is_neg():
            return torch._neg_view(self._copy(torch._neg_view(tensor)))
        storage = tensor.untyped_storage()
        key = (storage._cdata, tensor.dtype)
        if key not in self._bases:
            whole = torch.as_strided(tensor, (storage.nbytes() // tensor.itemsize,), (1,), 0)
            self._bases[key] = whole.to(self._next_device(), copy=True)
        return torch.as_strided(self._bases[key], tensor.shape, tensor.stride(), tensor.storage_offset())

    def _next_device(self) -> torch.device:
        device = self._device_of(self._count)
        self._count += 1
        return device
