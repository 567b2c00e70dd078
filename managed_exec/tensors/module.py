"""``ManagedModule``: a module whose parameters and buffers are managed tensors.

Parameters and submodules become managed when they are assigned. What is added to a plain submodule later (by
``ModuleList.append``, say) is found when somebody asks for the module's parameters or buffers as a whole, which an
optimizer does, and when it moves. No object changes its identity: not the module, its submodules nor its parameters.
"""

from __future__ import annotations

import copy
import copyreg
import weakref
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, TypeVar, cast

import torch

from managed_exec.devices.current import resolve_cuda, resolve_to
from managed_exec.memory.manager import manager
from managed_exec.memory.record import Record
from managed_exec.memory.room import rooms, tensor_bytes
from managed_exec.tensors.managed import ManagedTensor
from managed_exec.tensors.module_adoption import adopt
from managed_exec.tensors.parameters import Conversion

M = TypeVar("M", bound=torch.nn.Module)
Self = TypeVar("Self", bound="ManagedModule")


class _Pins:
    """What each ``pin`` of a module has pinned. A copy of the module, or one from a file, is not pinned."""

    def __init__(self) -> None:
        self.calls: list[list[weakref.ref[Record]]] = []

    def __reduce__(self) -> Any:
        return _Pins, ()


class ManagedModule(torch.nn.Module):
    """A module whose parameters and buffers are managed: derive from it, or give ``from_module`` a module."""

    @staticmethod
    def from_module(module: M) -> M:
        """Make *module* managed in place and return it.

        Its class becomes one that derives from ``ManagedModule`` and from the class it had. It pickles as what it was.
        Optimizers that have its parameters go on working.

        Raises:
            TypeError: it is no module, or it, or a part of it, is of a kind that cannot be managed.
            RuntimeError: somebody holds a parameter in a way that it cannot be changed under them.
        """
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"from_module: expected a torch.nn.Module, got {type(module).__name__}")
        plain_class = type(module)
        if not isinstance(module, ManagedModule):
            _check_class(module)
            module.__class__ = _managed_class(plain_class)
        try:
            adopt(module, strict=True)
        except BaseException:
            module.__class__ = plain_class
            raise
        return module

    # -- what becomes managed, and when -----------------------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, torch.nn.Module):
            adopt(value)
        elif isinstance(value, torch.Tensor) and name in self._buffers:
            adopt(self, recurse=False)

    def add_module(self, name: str, module: torch.nn.Module | None) -> None:
        super().add_module(name, module)
        if module is not None:
            adopt(module)

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        adopt(self, recurse=False)

    def register_buffer(self, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
        super().register_buffer(name, tensor, persistent)
        adopt(self, recurse=False)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        adopt(self)
        return super().named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        adopt(self)
        return super().named_buffers(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        result = super().load_state_dict(state_dict, *args, **kwargs)
        adopt(self)  # with assign=True the state's tensors are the module's now
        return result

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        adopt(self)

    # -- moves ------------------------------------------------------------------------------------------------------

    def cuda(self, device: int | str | torch.device | None = None, *, disperse: bool = False) -> Any:
        """Move all parameters and buffers to the current device, or to *device*; in place.

        Args:
            device: None for the task's device; outside a task, the thread's current one, or the CPU if there is none.
            disperse: whether to choose the device with the most bytes free, for the module as a whole.

        Raises:
            ValueError: both are given.
        """
        if not disperse:
            return self.to(resolve_cuda(device))
        if device is not None:
            raise ValueError(f"cuda: expected a device or disperse=True, not both, got {device!r}")
        with rooms().booked(sum(tensor_bytes(tensor) for tensor in chain(self.parameters(), self.buffers()))) as target:
            return self.to(target)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = resolve_to(args, kwargs)
        return super().to(*args, **kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        adopt(self)
        n_pins = len(_pins_of(self).calls)
        for _ in range(n_pins):
            self.unpin()
        try:
            return super()._apply(Conversion(self, fn, recurse), recurse)  # type: ignore[no-untyped-call]
        finally:
            for _ in range(n_pins):
                self.pin()

    # -- pins -------------------------------------------------------------------------------------------------------

    def pin(self: Self) -> Self:
        """Keep all parameters and buffers on their device, wherever the module moves, until ``unpin``; pins count."""
        pinned: list[weakref.ref[Record]] = []
        _pins_of(self).calls.append(pinned)
        try:
            for tensor in chain(self.parameters(), self.buffers()):
                if isinstance(tensor, ManagedTensor):
                    record = tensor.pin()._record
                    if record is not None:
                        pinned.append(weakref.ref(record))
        except BaseException:
            self.unpin()
            raise
        return self

    def unpin(self: Self) -> Self:
        """Undo one ``pin``.

        Raises:
            ValueError: it is not pinned.
        """
        calls = _pins_of(self).calls
        if not calls:
            raise ValueError("unpin: the module is not pinned")
        for reference in calls.pop():
            record = reference()
            if record is not None:
                manager().unpin(record)
        return self


class _FromModule(ManagedModule):
    """What classes that ``from_module`` makes have in common: copies are of that class, pickles of the one before."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        custom = getattr(super(), "__deepcopy__", None)
        if custom is not None:
            return custom(memo)
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__setstate__(copy.deepcopy(_state_of(self), memo))
        return copied

    def __copy__(self) -> Any:
        copied = type(self).__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as the class that it was, so that a file can be read where this package is not installed."""
        reduced = super().__reduce_ex__(protocol)
        if type(self) not in reduced[1]:
            return reduced  # its class has a way of its own
        return copyreg._reconstructor, (_plain_class(type(self)), object, None), *reduced[2:]  # type: ignore[attr-defined]


def _state_of(module: torch.nn.Module) -> Any:
    """Return what a copy of *module* is made from."""
    get_state = getattr(module, "__getstate__", None)  # every object has one from Python 3.11 on
    return module.__dict__ if get_state is None else get_state()


def _pins_of(module: torch.nn.Module) -> _Pins:
    pins = module.__dict__.get("_pins")
    if pins is None:
        pins = module.__dict__["_pins"] = _Pins()
    return cast("_Pins", pins)


def _check_class(module: torch.nn.Module) -> None:
    """Raise if the class of *module* cannot be replaced by one that derives from it."""
    kind = type(module).__name__
    if torch.nn.utils.parametrize.is_parametrized(module):
        raise TypeError(
            f"from_module: {kind} is parametrized, which has replaced its class already; make the module managed "
            "first, register its parametrizations then"
        )
    if isinstance(module, torch.fx.GraphModule):
        raise TypeError(f"from_module: {kind} has a class of its own; make managed what it was traced from")
    if isinstance(module, torch.nn.modules.lazy.LazyModuleMixin) and module.has_uninitialized_params():
        raise TypeError(
            f"from_module: {kind} changes its class when it is initialised; call it once first (as a part of another "
            "module it needs no such call)"
        )


def _managed_class(cls: type[M]) -> type[M]:
    """Return the class of managed modules that derives from *cls*, the same one each time."""
    for derived in cls.__subclasses__():
        if _FromModule in derived.__bases__:
            return derived
    namespace = {"__module__": cls.__module__, "__doc__": cls.__doc__}
    metaclass: Any = type(cls)
    return cast("type[M]", metaclass(f"Managed{cls.__name__}", (_FromModule, cls), namespace))


def _plain_class(cls: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """Return the class that *cls* was made from, or that the class it derives from was."""
    made = next(base for base in cls.__mro__ if _FromModule in base.__bases__)
    return cast("type[torch.nn.Module]", made.__bases__[1])
