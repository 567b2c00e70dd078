"""How many bytes of tensors a call is given, and where they are.

Covers tensors, managed or plain, in lists, tuples, mappings and modules, in a ``functools.partial`` and in the object
that a method belongs to; the first few hundred things at that, for this is looked at before a task starts. Does not
look into other objects, nor at tensors with a class of their own, which alone knows where its memory is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from itertools import islice
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass

from managed_exec.memory.record import RESIDENT
from managed_exec.tensors.managed import ManagedTensor

_MAX_LOOKED_AT = 512
_CPU = torch.device("cpu")
_PLAIN = (torch.Tensor, torch.nn.Parameter)
# What has no tensors in it, though looking would do no harm: most arguments, and most of what is called.
_EMPTY = frozenset(
    {int, float, complex, bool, str, bytes, type(None), range, slice, type, FunctionType, BuiltinFunctionType}
    | {torch.device, torch.dtype}
)


def may_have_tensors(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether there may be tensors in a call, by a glance at the types."""
    for value in args:
        if type(value) not in _EMPTY:
            return True
    if kwargs:
        for value in kwargs.values():
            if type(value) not in _EMPTY:
                return True
    return type(fn) not in _EMPTY


def argument_bytes(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Mapping[torch.device, int]:
    """Return the bytes of the tensors in a call, by device; what is spilled counts as on the CPU."""
    found: dict[torch.device, int] = {}
    if not may_have_tensors(fn, args, kwargs):
        return found
    pending: list[Any] = [*args, *kwargs.values()]
    while isinstance(fn, functools.partial):
        pending += [*fn.args, *fn.keywords.values()]
        fn = fn.func
    pending.append(fn.__self__ if isinstance(fn, MethodType) else fn)
    with DisableTorchFunctionSubclass():
        for value in islice(pending, _MAX_LOOKED_AT):  # which grows meanwhile
            _look_at(value, found, pending)
    return found


def _look_at(value: Any, found: dict[torch.device, int], pending: list[Any]) -> None:
    kind = type(value)
    if kind in _PLAIN or kind is ManagedTensor:
        if value.layout is torch.strided:
            place = _place_of(value)
            found[place] = found.get(place, 0) + value.nbytes
    elif kind is list or isinstance(value, tuple):
        pending += value[:_MAX_LOOKED_AT]
    elif kind is dict:
        pending += list(value.values())[:_MAX_LOOKED_AT]
    elif isinstance(value, torch.nn.Module):
        pending += [*value._parameters.values(), *value._buffers.values(), *value._modules.values()]


def _place_of(tensor: torch.Tensor) -> torch.device:
    record = tensor._record if isinstance(tensor, ManagedTensor) else None
    # Read without the table's lock: it may be on its way, and this is a hint.
    return tensor.device if record is None or record.residency is RESIDENT else _CPU
