"""``gpu_task``: what a function's tasks ask of the pool that runs them.

What it returns is an ordinary function with the signature of the one it was given, and no keyword is taken from it.
Options live on it alone: the same function can be a task of several kinds, for several threads.
"""

from __future__ import annotations

import difflib
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from contextvars import Context
from dataclasses import dataclass, fields, replace
from types import FunctionType, MappingProxyType
from typing import Any, Concatenate, Literal, NamedTuple, ParamSpec, Protocol, TypeAlias, TypeVar, cast, overload

import torch

from managed_exec.sizes import parse_bytes

P = ParamSpec("P")
Q = ParamSpec("Q")
R_co = TypeVar("R_co", covariant=True)

DeviceChoice: TypeAlias = "int | str | torch.device | Callable[[torch.device], bool]"
OnOom: TypeAlias = Literal["raise", "retry", "cpu"]
_ON_OOM = ("raise", "retry", "cpu")
_ATTRIBUTE = "__gpu_task_options__"
_OF_OBJECTS = ("__module__", "__doc__")


@dataclass(frozen=True)
class TaskOptions:
    """What ``gpu_task`` was given.

    Args:
        memory: bytes, or text such as ``"3GiB"``, that the task needs of its device. It starts when that much can be
            reserved there; reservations of running tasks together are never more than the device has. None: unknown.
        device: where it may run: an index or name of one of the pool's devices, or a function that says yes or no to
            each. None: anywhere.
        priority: tasks with a higher one start first.
        retries: how often a task may be run again: because its process was lost (``workers="processes"``), or because
            it ran out of device memory and *on_oom* is ``"retry"``. Only for tasks that may run twice.
        timeout: seconds that a run of the task may take, from its start; then it is told to stop, with
            ``TaskTimeoutError``. None: as long as it takes.
        on_oom: what to do when a task runs out of device memory: ``"raise"``; ``"retry"``: run it again, alone on a
            device; ``"cpu"``: run it again on the CPU.

    Raises:
        TypeError, ValueError: a value is of the wrong type, or out of range.
    """

    memory: int | str | None = None
    device: DeviceChoice | None = None
    priority: int = 0
    retries: int = 0
    timeout: float | None = None
    on_oom: OnOom = "raise"

    def __post_init__(self) -> None:
        _ = self.memory_bytes
        for name in ("priority", "retries"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name}: expected an int, got {value!r}")
        if self.retries < 0:
            raise ValueError(f"retries: expected 0 or more, got {self.retries}")
        if self.timeout is not None:
            if isinstance(self.timeout, bool) or not isinstance(self.timeout, (int, float)):
                raise TypeError(f"timeout: expected seconds or None, got {self.timeout!r}")
            if not self.timeout > 0:
                raise ValueError(f"timeout: expected more than 0 seconds, or None for no end, got {self.timeout}")
            if self.timeout > sys.float_info.max and not isinstance(self.timeout, float):
                raise ValueError("timeout: expected a number of seconds that a float can hold, or None for no end")
        if self.on_oom not in _ON_OOM:
            raise ValueError(f"on_oom: expected one of {', '.join(_ON_OOM)}, got {self.on_oom!r}")
        if self.on_oom == "retry" and not self.retries:
            raise ValueError("on_oom: 'retry' runs the task again, so it needs retries=1 or more, for tasks that may")
        is_place = isinstance(self.device, (int, str, torch.device)) and not isinstance(self.device, bool)
        if self.device is not None and not is_place and not callable(self.device):
            raise TypeError(f"device: expected an index, a name, a torch.device or a function, got {self.device!r}")

    @property
    def memory_bytes(self) -> int:
        return 0 if self.memory is None else parse_bytes(self.memory, name="memory")


NO_OPTIONS = TaskOptions()


class Need(NamedTuple):
    """What a task asks of the device it will run on. Each task that asks for anything has one of its own."""

    n_bytes: int = 0  # to be reserved there
    allowed: frozenset[int] | None = None  # positions among the pool's devices; None for all
    alone: bool = False  # no other task beside it
    # The function, if what its tasks need has still to be learned and they are held back by it: such a task reserves
    # all that its device has.
    unknown: str | None = None
    # Guesses, for the placement alone: nothing is held back for these.
    expected_bytes: int = 0  # what earlier tasks of the function have needed
    local_bytes: Mapping[int, int] = MappingProxyType({})  # of the arguments, by the position of their device

    @property
    def reserves(self) -> bool:
        """Whether any memory is reserved for it."""
        return self.n_bytes > 0 or self.unknown is not None

    @property
    def asks(self) -> bool:
        """Whether there may be devices that do not take it, but for their number of tasks."""
        return self.reserves or self.alone or self.allowed is not None

    def takes(self, position: int) -> bool:
        """Return whether the device at *position* is one that was asked for."""
        return self.allowed is None or position in self.allowed


ANY = Need()


class GpuTask(Protocol[P, R_co]):
    """A function that carries options."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...

    # As functions do: in a class it is a method.
    @overload
    def __get__(self, instance: None, owner: type, /) -> GpuTask[P, R_co]: ...
    @overload
    def __get__(
        self: GpuTask[Concatenate[Any, Q], R_co], instance: object, owner: type | None = None, /
    ) -> Callable[Q, R_co]: ...

    def options(
        self,
        *,
        memory: int | str | None = ...,
        device: DeviceChoice | None = ...,
        priority: int = ...,
        retries: int = ...,
        timeout: float | None = ...,
        on_oom: OnOom = ...,
    ) -> GpuTask[P, R_co]:
        """Return a variant with other options, for one call; what is not named stays."""


@overload
def gpu_task(fn: Callable[P, R_co], /) -> GpuTask[P, R_co]: ...
@overload
def gpu_task(
    *,
    memory: int | str | None = None,
    device: DeviceChoice | None = None,
    priority: int = 0,
    retries: int = 0,
    timeout: float | None = None,
    on_oom: OnOom = "raise",
) -> Callable[[Callable[P, R_co]], GpuTask[P, R_co]]: ...
def gpu_task(fn: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Return a function that does what *fn* does and says what its tasks need; *fn* itself stays as it is.

    It goes above other decorators: a variant by ``options`` calls *fn*, and so is without what is above the mark. What
    else *fn* has, such as the ``cache_clear`` of a cached function, ``__wrapped__`` has.

    Args:
        fn: the function, or whatever else can be called; of a class, a function that makes an instance.
        options: see ``TaskOptions``. ``function.options(...)`` returns a variant for one call; of a method, it is
            ``Class.method.options(...)``, and the instance is the first argument.

    Raises:
        TypeError: what is decorated cannot be called, or is a class; or an option is of the wrong type.
        ValueError: an option is out of range.
    """
    _check_names(options)
    mark = functools.partial(_with_options, TaskOptions(**options))
    return mark if fn is None else mark(fn)


def _check_names(options: Mapping[str, Any]) -> None:
    known = [field.name for field in fields(TaskOptions)]
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            meant = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"gpu_task: unknown option {name!r}, expected some of {', '.join(known)}{meant}")


def options_of(function: Callable[..., Any]) -> TaskOptions:
    """Return the options that *function* carries; if it is a ``functools.partial`` without, those of what it calls."""
    while True:
        try:
            options = getattr(function, _ATTRIBUTE, None)
        except Exception:  # noqa: BLE001 what is the user's may raise anything
            options = None
        if isinstance(options, TaskOptions):  # a proxy answers with anything
            return options
        if not isinstance(function, functools.partial):
            return NO_OPTIONS
        function = called_by(function)


def called_by(function: functools.partial[Any]) -> Callable[..., Any]:
    """Return what a partial calls; of ``asyncio.to_thread``'s, which runs a function in a context, that function."""
    inner = function.func
    if function.args and isinstance(getattr(inner, "__self__", None), Context) and callable(function.args[0]):
        return cast("Callable[..., Any]", function.args[0])
    return inner


def name_of(function: Any) -> str:
    """Return the name of what *function* calls in the end; that of its class where it has none."""
    while isinstance(function, functools.partial):
        function = called_by(function)
    try:
        return str(function.__qualname__)
    except Exception:  # noqa: BLE001 many callables have no name, and what is the user's may raise anything
        return type(function).__qualname__


def _with_options(options: TaskOptions, function: Any) -> Any:
    if isinstance(function, (staticmethod, classmethod)):
        return type(function)(_with_options(options, function.__func__))
    if isinstance(function, type):
        raise TypeError(f"gpu_task: {function!r} is a class, and stays one; mark a function that makes an instance")
    if not callable(function):
        raise TypeError(f"gpu_task: expected a callable, got {function!r}; options are keywords")

    def task(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        finally:
            del args, kwargs  # or the traceback of an error would keep them

    # Of an object that can be called, its attributes are none of the function's.
    updated = functools.WRAPPER_UPDATES if isinstance(function, FunctionType) else ()
    functools.update_wrapper(task, function, _given_by(function), updated)
    task.__qualname__ = name_of(function)
    setattr(task, _ATTRIBUTE, options)
    # Refers to the function and not to the task: a cycle would keep what a lambda closes over until it is collected.
    task.options = functools.partial(_variant, function, options)  # type: ignore[attr-defined]  # a function takes any
    return task


def _given_by(function: Any) -> Sequence[str]:
    """Return which attributes a wrapper of *function* takes from it."""
    try:
        # An object has no name of its own, and a proxy answers with anything.
        if isinstance(getattr(function, "__name__", None), str):
            return functools.WRAPPER_ASSIGNMENTS
        for name in _OF_OBJECTS:
            getattr(function, name, None)
        return _OF_OBJECTS
    except Exception:  # noqa: BLE001 what is the user's may raise anything
        return ()


def _variant(function: Any, options: TaskOptions, /, **changes: Any) -> Any:
    _check_names(changes)
    return _with_options(replace(options, **changes), function)
