"""Calls of torch that are the memory manager's own, and nobody else's business."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch._C import (
    DisableTorchFunction,
    DispatchKey,
    DispatchKeySet,
    _ExcludeDispatchKeyGuard,
    _len_torch_dispatch_stack,
    _pop_torch_dispatch_stack,
    _push_on_torch_dispatch_stack,
)

# What a thread can have switched on between a call and its kernel, besides autograd and modes: tracing before autograd
# and the transforms of torch.func.
_LAYERS = DispatchKeySet(DispatchKey.PreDispatch)
for _key in (
    DispatchKey.Functionalize,
    DispatchKey.FuncTorchDynamicLayerFrontMode,
    DispatchKey.FuncTorchDynamicLayerBackMode,
):
    _LAYERS = _LAYERS | DispatchKeySet(_key)


@contextmanager
def unseen() -> Iterator[None]:
    """Have torch make the block's calls as if the thread had no mode and no transform on.

    A move can begin anywhere: a mode that counts operators must not count its copies, one that makes fake tensors must
    not fake the bytes. The dispatch of managed tensors stays on, for the collector or a signal may run code that uses
    some in the middle of the block.
    """
    modes = [_pop_torch_dispatch_stack(None) for _ in range(_len_torch_dispatch_stack())]
    try:
        with DisableTorchFunction(), _ExcludeDispatchKeyGuard(_LAYERS):
            yield
    finally:
        for mode in reversed(modes):
            _push_on_torch_dispatch_stack(mode)
