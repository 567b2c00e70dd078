"""Pickling of functions by name where that name is of a wrapper: a decorator's, say.

A function pickled by value takes copies of what it uses of its module: of a counter, and of a lock it fails. One whose
module has a wrapper under its name, which refers to it by ``__wrapped__``, as ``functools.wraps`` sees to, need not be.

What has the name may differ between two processes, if a program has put a wrapper there as it ran. So what travels
besides is where the code of the function was defined, and that of each that it wraps in turn.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from itertools import islice
from operator import attrgetter
from types import FunctionType
from typing import Any, NamedTuple

import cloudpickle

_MOST_WRAPPERS = 20  # around each other; a proxy has a ``__wrapped__`` however often it is asked
_CACHED: Any = functools._lru_cache_wrapper


class _Origin(NamedTuple):
    """Where a function was defined; of another callable its type."""

    file: str
    line: int
    name: str


def reduce_wrapped(function: Any) -> tuple[Callable[..., Any], tuple[str, str, tuple[_Origin, ...]]] | None:
    """Return how to reach *function* from the wrapper that has its name, in the form of ``__reduce__``.

    None: it is not that, or goes by value whatever its name: what ``__main__`` defines, and the modules that
    ``cloudpickle.register_pickle_by_value`` was told of. A cached function of ``functools`` always goes by name.
    """
    if not isinstance(function, (FunctionType, _CACHED)):
        return None
    try:
        module, name = function.__module__, function.__qualname__
        if isinstance(function, FunctionType) and _goes_by_value(module):
            return None
        chain = _chain(attrgetter(name)(sys.modules[module]))
        if not any(found is function for found in chain[1:]):
            return None
        return _unwrapped, (module, name, _origins(_chain(function)))
    except Exception:  # noqa: BLE001 the way ends here; what is met on it is the user's, and may raise anything
        return None


def _goes_by_value(module: str) -> bool:
    by_value = {"__main__", *cloudpickle.list_registry_pickle_by_value()}
    return any(module == name or module.startswith(f"{name}.") for name in by_value)


def _chain(function: Any) -> list[Any]:
    """Return *function*, what it wraps, what that wraps, and so on."""

    def each(found: Any) -> Any:
        while found is not None:
            yield found
            found = getattr(found, "__wrapped__", None)

    return list(islice(each(function), _MOST_WRAPPERS))


def _origins(chain: list[Any]) -> tuple[_Origin, ...]:
    def origin(found: Any) -> _Origin:
        if not isinstance(found, FunctionType):
            return _Origin("", 0, type(found).__qualname__)
        return _Origin(found.__code__.co_filename, found.__code__.co_firstlineno, found.__code__.co_name)

    return tuple(map(origin, chain))


def _unwrapped(module: str, name: str, origins: tuple[_Origin, ...]) -> Any:
    chain = _chain(attrgetter(name)(importlib.import_module(module)))
    for i, found in enumerate(chain):
        if _origins(chain[i:]) == origins:
            return found
    raise AttributeError(f"{module}.{name} is no wrapper of the function that was sent: expected one of {origins[0]}")
