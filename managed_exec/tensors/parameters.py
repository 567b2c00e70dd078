"""Change what a parameter is and where its memory is, and not which object it is.

Optimizers hold the object, and so do the modules that share it. torch itself keeps it where the old and the new memory
are of kinds that it takes for compatible (``param.data = ...``: the CPU and CUDA are, the CPU and the simulator not),
and elsewhere replaces it; ``become`` keeps it in both cases.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._C import DisableTorchFunction

from managed_exec.tensors.managed import ManagedTensor, manage

is_lazy: Any = torch.nn.parameter.is_lazy  # torch's own annotation lacks None, which it takes


def become(parameter: torch.Tensor, other: Any, *, force: bool) -> str | None:
    """Give *parameter* the class and the innards of *other*, a managed parameter without a gradient.

    Hooks and attributes stay its own.

    Args:
        parameter: a leaf; its gradient is gone afterwards.
        other: is used up.
        force: whether to do it although a graph has the parameter. A backward pass through that graph then raises.

    Returns:
        Why it cannot be done, in which case nothing has changed but the gradient; None if it was.
    """
    if weakref.getweakrefcount(parameter):
        return "there are weak references to it"
    hooks = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    with torch.inference_mode(False), DisableTorchFunction():  # the function level has nothing to do here
        if parameter._use_count() > 1 and not force:  # type: ignore[attr-defined]
            return "a graph has it"
        own = {name: value for name, value in parameter.__dict__.items() if name not in other.__dict__}
        other.__dict__.update(own)
        try:
            torch.utils.swap_tensors(parameter, other)  # type: ignore[no-untyped-call]
        except RuntimeError:
            return "a graph, or code in C++, has it"
        # Of the object, but registered with its innards.
        if hooks[0] is not None:
            parameter._backward_hooks = hooks[0]
        if hooks[1] is not None:
            parameter._post_accumulate_grad_hooks = hooks[1]
    return None


@contextmanager
def without_own_references(part: torch.nn.Module) -> Iterator[None]:
    """Have *part* drop, in the block, the weak references to its parameters that it keeps for itself."""
    if isinstance(part, torch.nn.RNNBase):
        part._flat_weight_refs = []
    try:
        yield
    finally:
        if isinstance(part, torch.nn.RNNBase):
            part._flat_weights = [getattr(part, name, None) for name in part._flat_weights_names]
            part._flat_weight_refs = [None if w is None else weakref.ref(w) for w in part._flat_weights]


class Conversion:
    """One conversion of a module's tensors, such as a move to a device: each object once, whoever shares it.

    Afterwards the object is a function as ``Module._apply`` takes it, which leaves what was converted as it is.
    """

    def __init__(self, module: torch.nn.Module, fn: Callable[[Any], Any], recurse: bool) -> None:
        self._fn = fn
        self._results: dict[int, tuple[Any, Any]] = {}  # by id: the tensor, kept so that the id stays its own; the new
        with torch.no_grad():
            for part in module.modules() if recurse else (module,):
                with without_own_references(part):
                    for tensors, convert in (
                        (part._parameters, self._convert_parameter),
                        (part._buffers, self._convert_buffer),
                    ):
                        for key, tensor in tensors.items():
                            if isinstance(tensor, ManagedTensor) or is_lazy(tensor):
                                tensors[key] = self._once(tensor, convert)

    def __call__(self, tensor: Any) -> Any:
        return self._once(tensor, self._fn)

    def _once(self, tensor: Any, convert: Callable[[Any], Any]) -> Any:
        if id(tensor) not in self._results:
            result = convert(tensor)
            self._results[id(tensor)] = tensor, result
            self._results[id(result)] = result, result
        return self._results[id(tensor)][1]

    def _convert_buffer(self, buffer: Any) -> Any:
        converted = self._fn(buffer)
        return converted if is_lazy(converted) or not is_lazy(buffer) else _lazy_like(buffer, converted)

    def _convert_parameter(self, parameter: Any) -> Any:
        """Convert *parameter* and its gradient; return itself unless somebody holds it in a way that forbids that."""
        converted = self._fn(parameter)
        if is_lazy(parameter):
            return _lazy_like(parameter, converted)
        gradient, parameter.grad = parameter.grad, None
        result = parameter
        if converted is not parameter:
            if torch._has_compatible_shallow_copy_type(parameter, converted):
                parameter.data = converted
            else:
                new = torch.nn.Parameter(manage(converted), parameter.requires_grad)
                if become(parameter, new, force=True) is not None:
                    result = new  # as torch does it everywhere, for such devices
        if gradient is not None:
            result.grad = self._once(gradient, self._fn)
        return result


def _lazy_like(tensor: Any, converted: torch.Tensor) -> Any:
    """Return what *tensor*, not initialised yet, is with the device and type of *converted*."""
    if is_lazy(converted):
        return converted
    return type(tensor)(requires_grad=tensor.requires_grad, device=converted.device, dtype=converted.dtype)
