"""Make the tensors of a module managed, where they are.

A parameter stays the object that it is, for optimizers and tied modules hold it: it is given the class and the innards
of a managed tensor of the same memory (``parameters.become``). Gradient, hooks and attributes go with it. A
buffer is replaced by a managed tensor of the same memory, as ``Module.to`` replaces it.

What has a class of its own (a quantised or a distributed tensor) is left alone. A parameter that is not initialised yet
is made managed in the forward pass that does it.
"""

from __future__ import annotations

import threading

import torch
from torch._C import DisableTorchFunction
from torch._C._functorch import peek_interpreter_stack

from managed_exec.tensors.managed import ManagedTensor, manage
from managed_exec.tensors.parameters import become, is_lazy, without_own_references

# Held while tensors are swapped, so that of two threads with one module the second finds the work done. No kernel runs
# under it, and no code of the user's but what the collector runs, so it is reentrant.
_lock = threading.RLock()


def adopt(module: torch.nn.Module, *, recurse: bool = True, strict: bool = False) -> None:
    """Make all parameters and buffers of *module* and its submodules managed.

    Args:
        module: changed in place.
        recurse: whether to look into submodules.
        strict: whether a parameter that cannot be changed now is an error. Otherwise it stays plain until next time.

    Raises:
        TypeError: a part is scripted.
        RuntimeError: somebody holds a parameter in a way that it cannot be changed under them.
    """
    if torch.compiler.is_compiling() or peek_interpreter_stack() is not None:
        return  # what the module holds now is not its own
    parts = list(module.named_modules()) if recurse else [("", module)]
    for name, part in parts:
        if isinstance(part, torch.jit.ScriptModule):
            raise TypeError(
                f"{name or 'the module'} is a {type(part).__name__}: TorchScript keeps its tensors in C++, where they "
                "cannot be made managed; make the module managed that it was scripted from, or leave this one plain "
                "and pass it managed inputs"
            )
    parts = [(name, part) for name, part in parts if _has_plain(part)]
    if not parts:
        return
    # An inference tensor could never be trained, and the function level has nothing to do here.
    with _lock, torch.inference_mode(False), DisableTorchFunction():
        managed_buffers: dict[int, torch.Tensor] = {}
        for name, part in parts:
            _adopt_own(name, part, strict, managed_buffers)


def _has_plain(part: torch.nn.Module) -> bool:
    return any(type(p) is torch.nn.Parameter or is_lazy(p) for p in part._parameters.values()) or any(
        type(b) is torch.Tensor or is_lazy(b) for b in part._buffers.values()
    )


def _adopt_own(name: str, part: torch.nn.Module, strict: bool, managed_buffers: dict[int, torch.Tensor]) -> None:
    """Make the tensors of *part* itself managed."""
    with without_own_references(part):
        for key, parameter in part._parameters.items():
            if type(parameter) is torch.nn.Parameter:
                obstacle = _adopt_parameter(parameter, force=strict)
                if obstacle is not None and strict:
                    raise RuntimeError(
                        f"parameter {f'{name}.{key}'.lstrip('.')} cannot be made managed in place: {obstacle}; do it "
                        "before the module is used, or drop what holds it (a graph with its loss, a wrapper)"
                    )
    for key, buffer in part._buffers.items():
        if type(buffer) is torch.Tensor:
            if id(buffer) not in managed_buffers:
                managed_buffers[id(buffer)] = _managed_buffer(buffer)
            part._buffers[key] = managed_buffers[id(buffer)]
    lazy = any(is_lazy(t) for t in (*part._parameters.values(), *part._buffers.values()))
    if lazy and _adopt_initialised not in part._forward_pre_hooks.values():
        part.register_forward_pre_hook(_adopt_initialised)  # behind the one that initialises


def _adopt_parameter(parameter: torch.nn.Parameter, force: bool) -> str | None:
    """Make *parameter* managed; return why it cannot be, in which case nothing has changed."""
    managed = torch.nn.Parameter(manage(parameter.detach()), parameter.requires_grad)
    gradient, parameter.grad = parameter.grad, None
    obstacle = become(parameter, managed, force=force)
    if gradient is not None:
        parameter.grad = gradient if obstacle is not None else manage(gradient)
    return obstacle


def _managed_buffer(buffer: torch.Tensor) -> ManagedTensor:
    managed = manage(buffer)
    managed.__dict__.update(buffer.__dict__)
    return managed


def _adopt_initialised(module: torch.nn.Module, args: object) -> None:
    """Make managed what was not initialised before; a forward hook, which goes when its work is done."""
    for key, hook in list(module._forward_pre_hooks.items()):
        if hook is _adopt_initialised:
            del module._forward_pre_hooks[key]
    adopt(module)
