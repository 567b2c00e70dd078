"""Plain tensors of a managed tensor's memory or values."""

from __future__ import annotations

import torch
from torch._C import DisableTorchFunctionSubclass, _DisableTorchDispatch


def plain_alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor of the same memory, outside the autograd graph. While it lives the memory does not move."""
    with _DisableTorchDispatch(), DisableTorchFunctionSubclass(), torch.no_grad():
        return torch.ops.aten.detach.default(tensor)  # type: ignore[no-any-return]


def plain_copy(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the values of *tensor* as a plain tensor of its own memory on *device*, outside the autograd graph."""
    with torch.no_grad(), DisableTorchFunctionSubclass():
        copied = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        copied.copy_(tensor)
    return copied
