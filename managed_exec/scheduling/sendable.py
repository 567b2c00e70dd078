"""What cannot be sent to another process, and where in a task it is."""

from __future__ import annotations

import functools
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from types import CodeType, FunctionType, MethodType

from managed_exec.errors import NotSendableError
from managed_exec.tensors.parcel import check_packs

_DEEPEST = 20  # parts of parts that are looked into
_CUSTOM = ("__getstate__", "__reduce__", "__reduce_ex__")


def check_sendable(name: str, fn: object, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
    """Raise an error that names the first part of a call that cannot be sent, if there is one.

    Args:
        name: of the call.
        fn: its function.
        args: its arguments.
        kwargs: likewise, by name.

    Raises:
        NotSendableError: the text has the way to the part, such as ``argument 1['callback'].logger``.
    """
    parts = [("function", fn), *((f"argument {i}", value) for i, value in enumerate(args, 1)), *kwargs.items()]
    for path, value in parts:
        error = _refusal(value)
        if error is not None:
            path, value, error = _innermost(path, value, error)
            raise NotSendableError(
                f"{name}: {path}, a {type(value).__qualname__}, cannot be sent to another process: {_text(error)}. "
                "Make it in the task, or use workers='threads'"
            ) from error


def _text(error: Exception) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 it may be the user's
        return type(error).__qualname__


def _refusal(value: object) -> Exception | None:
    """Return why *value* cannot be sent; None if it can."""
    try:
        check_packs(value)
    except Exception as error:  # noqa: BLE001 whatever the user's pickling raises is the reason
        return error
    return None


def _innermost(path: str, value: object, error: Exception) -> tuple[str, object, Exception]:
    """Follow what cannot be sent to the smallest part of it that cannot."""
    seen = {id(value)}  # by which the way would go round
    for _ in range(_DEEPEST):
        try:
            parts = [(step, part) for step, part in _parts(value) if id(part) not in seen]
        except Exception:  # noqa: BLE001 objects of the user's are looked at; what is known so far is said
            break
        for step, part in parts:
            refusal = _refusal(part)
            seen.add(id(part))
            if refusal is not None:
                path, value, error = path + step, part, refusal
                break
        else:
            break
    return path, value, error


def _parts(value: object) -> Iterable[tuple[str, object]]:
    """Return what *value* is pickled with, each with how it is reached."""
    if isinstance(value, dict):
        return [(f"[{reprlib.repr(key)}]", part) for key, part in value.items()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [(f"[{i}]", part) for i, part in enumerate(value)]
    if isinstance(value, functools.partial):
        return [(".func", value.func), *_parts(value.args), *_parts(value.keywords)]
    if isinstance(value, MethodType):
        return [(".__self__", value.__self__)]
    if isinstance(value, FunctionType):
        return [(f"'s variable {name!r}", part) for name, part in (*_closed_over(value), *_globals_of(value))]
    if any(getattr(type(value), name, None) is not getattr(object, name, None) for name in _CUSTOM):
        return []  # it says itself what it is pickled with
    return [(f".{name}", part) for name, part in getattr(value, "__dict__", {}).items()]


def _closed_over(function: FunctionType) -> Iterable[tuple[str, object]]:
    """Return the variables of the scopes around *function* that it uses, by name."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # it has no value yet
            continue


def _globals_of(function: FunctionType) -> Iterable[tuple[str, object]]:
    """Return the variables of its module that *function*, and what is defined in it, may use, by name."""
    pending = [function.__code__]
    for code in pending:  # which grows meanwhile
        yield from ((name, function.__globals__[name]) for name in code.co_names if name in function.__globals__)
        pending += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
