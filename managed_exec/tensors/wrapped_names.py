"""Pickling of functions by name where that name is of a wrapper: a decorator's, say.

A function pickled by value takes copies of what it uses of its module: of a counter, and of a lock it fails. One whose
module has a wrapper under its name, which refers to it by ``__wrapped__``, as ``functools.wraps`` sees to, need not be.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from operator import attrgetter
from types import FunctionType
from typing import Any

import cloudpickle

_MOST_WRAPPERS = 20  # around each other; a proxy has a ``__wrapped__`` however often it is asked
_CACHED: Any = functools._lru_cache_wrapper


def reduce_wrapped(function: Any) -> tuple[Callable[..., Any], tuple[str, str, int]] | None:
    """Return how to reach *function* from the wrapper that has its name, in the form of ``__reduce__``.

    None: it is not that, or goes by value whatever its name: what ``__main__`` defines, and the modules that
    ``cloudpickle.register_pickle_by_value`` was told of. A cached function of ``functools`` always goes by name.
    """
    if not isinstance(function, (FunctionType, _CACHED)):
        return None
    module, name = function.__module__, function.__qualname__
    if isinstance(function, FunctionType) and _goes_by_value(module):
        return None
    try:
        found = attrgetter(name)(sys.modules[module])
        for n_wrappers in range(_MOST_WRAPPERS):
            if found is function:
                return (_unwrapped, (module, name, n_wrappers)) if n_wrappers else None
            found = found.__wrapped__
    except Exception:  # noqa: BLE001 the way ends here; what is met on it is the user's, and may raise anything
        return None
    return None


def _goes_by_value(module: str) -> bool:
    by_value = {"__main__", *cloudpickle.list_registry_pickle_by_value()}
    return any(module == name or module.startswith(f"{name}.") for name in by_value)


def _unwrapped(module: str, name: str, n_wrappers: int) -> Any:
    found = attrgetter(name)(importlib.import_module(module))
    for _ in range(n_wrappers):
        found = found.__wrapped__
    return found
