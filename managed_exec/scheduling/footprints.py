"""What the tasks of each function have needed of their device's memory: its *footprint*.

Measured is the most bytes that the managed device storages made in a task's thread had at once, wherever they were at
that time: what was spilled counts, for with room the task would have had it on the device. Not seen are storages below
``min_bytes``, plain tensors, workspaces of libraries, and arguments that were on the device before.

A footprint is kept with the bytes of the tensors that the task was given. Between tasks it is carried over by two
assumptions, which give an upper bound from each task known: that larger arguments need no less, and that the need grows
no faster than they do.
"""

from __future__ import annotations

import functools
import json
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MethodType
from typing import Any, NamedTuple, TypeAlias

from managed_exec.options import called_by

_MAX_FUNCTIONS = 1024
_MAX_SIZES = 16  # of a function: classes of argument bytes, a factor of two each
_MAX_RECENT = 8  # tasks of a class
_FORMAT = "managed_exec footprints"
_VERSION = 1


class Footprint(NamedTuple):
    """What one task has needed.

    Attributes:
        argument_bytes: of the tensors it was given, on whatever device.
        peak_bytes: of device memory, at most at once.
    """

    argument_bytes: int
    peak_bytes: int

    def bound(self, argument_bytes: int) -> int:
        """Return what a task with arguments of that size may need by this one."""
        if 0 < self.argument_bytes < argument_bytes:
            return self.peak_bytes * argument_bytes // self.argument_bytes
        return self.peak_bytes


# By class of argument bytes (their number of binary digits), the least recently seen first.
_Sizes: TypeAlias = "dict[int, deque[Footprint]]"


class Footprints:
    """The footprints that a pool has learned: of a bounded number of functions, the recent tasks of each.

    May be used from any thread. ``enabled = False`` stops both learning and guessing; what is known is kept.
    """

    def __init__(self) -> None:
        self.enabled = True
        self.is_empty = True
        # Guards the dictionary and what is in it; a leaf. Nothing else is called, and no file touched, under it.
        self._lock = threading.Lock()
        self._functions: dict[str, _Sizes] = {}  # the least recently noted first

    def __len__(self) -> int:
        """Return the number of functions known."""
        return len(self._functions)

    def __contains__(self, name: str) -> bool:
        return name in self._functions

    def estimate(self, name: str, argument_bytes: int) -> int | None:
        """Return the bytes that a task of the function *name* may need; None if nothing is known of it."""
        with self._lock:
            sizes = self._functions.get(name)
            if sizes is None:
                return None
            same = sizes.get(argument_bytes.bit_length())
            if same is not None:
                return max(footprint.bound(argument_bytes) for footprint in same)
            # Each class bounds it; the tightest counts. Tasks without tensors say nothing of how a need grows.
            with_tensors = [size for size in sizes if size] or list(sizes)
            return min(max(footprint.bound(argument_bytes) for footprint in sizes[size]) for size in with_tensors)

    def note(self, name: str, argument_bytes: int, peak_bytes: int) -> None:
        """Note what a task of the function *name* has needed."""
        with self._lock:
            self._note(name, Footprint(argument_bytes, peak_bytes))

    def _note(self, name: str, footprint: Footprint) -> None:
        """Note a footprint; forget what was not seen for longest. The lock is held."""
        sizes = self._functions.pop(name, {})
        self._functions[name] = sizes
        self.is_empty = False
        size = footprint.argument_bytes.bit_length()
        recent = sizes.pop(size, None)
        sizes[size] = deque(maxlen=_MAX_RECENT) if recent is None else recent
        sizes[size].append(footprint)
        if len(sizes) > _MAX_SIZES:
            del sizes[next(iter(sizes))]
        if len(self._functions) > _MAX_FUNCTIONS:
            del self._functions[next(iter(self._functions))]

    def snapshot(self) -> Mapping[str, tuple[Footprint, ...]]:
        """Return what is known now, by the function's module and qualified name."""
        with self._lock:
            return MappingProxyType(
                {
                    name: tuple(footprint for recent in sizes.values() for footprint in recent)
                    for name, sizes in self._functions.items()
                }
            )

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._functions.clear()
            self.is_empty = True

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write what is known to the file *path*, as JSON. The file is replaced as a whole, or not at all."""
        text = json.dumps(
            {"format": _FORMAT, "version": _VERSION, "functions": dict(self.snapshot())}, indent=1, ensure_ascii=False
        )
        target = Path(path)
        new = target.with_name(f".{target.name}.{os.getpid()}.{threading.get_ident()}")
        try:
            with open(new, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, target)
        finally:
            new.unlink(missing_ok=True)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Add what ``save`` has written to *path*, as if it had been seen just now.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is not such a file. Nothing was changed.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:  # neither JSON nor text
            raise _wrong_file(path, "JSON", repr(error)) from error
        functions = _checked_content(path, content)
        with self._lock:
            for name, footprints in functions.items():
                for footprint in footprints:
                    self._note(name, footprint)


def function_name(fn: Callable[..., Any]) -> str:
    """Return the module and qualified name of the function that *fn* calls in the end.

    The same for all variants of a ``gpu_task``, every ``functools.partial`` and all instances of a class. Functions
    made in the same place of a program, lambdas in one function say, share theirs.
    """
    while isinstance(fn, (functools.partial, MethodType)):
        fn = called_by(fn) if isinstance(fn, functools.partial) else fn.__func__
    if not isinstance(fn, (FunctionType, BuiltinFunctionType, type)) and "__qualname__" not in getattr(
        fn, "__dict__", ()
    ):
        fn = type(fn)
    return f"{fn.__module__}.{fn.__qualname__}"


def _checked_content(path: str | os.PathLike[str], content: Any) -> dict[str, list[Footprint]]:
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise _wrong_file(path, f"an object with 'format': {_FORMAT!r}", _shown(content))
    if content.get("version") != _VERSION:
        raise _wrong_file(path, f"version {_VERSION}", f"version {_shown(content.get('version'))}")
    functions = content.get("functions")
    if not isinstance(functions, dict):
        raise _wrong_file(path, "'functions' by name", _shown(functions))
    return {name: _checked_footprints(path, name, footprints) for name, footprints in functions.items()}


def _checked_footprints(path: str | os.PathLike[str], name: str, footprints: Any) -> list[Footprint]:
    expected = f"of {name!r} pairs of bytes, of arguments and peak, in whole numbers from 0"
    if not isinstance(footprints, list):
        raise _wrong_file(path, expected, _shown(footprints))
    for pair in footprints:
        is_pair = isinstance(pair, list) and len(pair) == 2
        if not is_pair or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in pair):
            raise _wrong_file(path, expected, _shown(pair))
    return [Footprint(*pair) for pair in footprints]


def _wrong_file(path: str | os.PathLike[str], expected: str, got: str) -> ValueError:
    return ValueError(
        f"footprints: {os.fspath(path)!r}: expected {expected}, got {got}; give a file that save() of this version has "
        "written, or remove it and have the footprints learned again"
    )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
