"""Calls of torch that are the memory manager's own, and nobody else's business."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch._C import DisableTorchFunction, DispatchKey, DispatchKeySet, _ExcludeDispatchKeyGuard

# What a thread can have switched on between a call and its kernel, besides autograd: modes and classes with a dispatch
# of their own, tracing before autograd, the transforms of torch.func.
_LAYERS = DispatchKeySet(DispatchKey.Python)
for _key in (
    DispatchKey.PythonTLSSnapshot,
    DispatchKey.PreDispatch,
    DispatchKey.Functionalize,
    DispatchKey.FuncTorchDynamicLayerFrontMode,
    DispatchKey.FuncTorchDynamicLayerBackMode,
):
    _LAYERS = _LAYERS | DispatchKeySet(_key)


@contextmanager
def unseen() -> Iterator[None]:
    """Have torch make the block's calls as if the thread had no mode and no transform on.

    A move can begin anywhere: a mode that counts operators must not count its copies, one that makes fake tensors must
    not fake the bytes.
    """
    with DisableTorchFunction(), _ExcludeDispatchKeyGuard(_LAYERS):
        yield
