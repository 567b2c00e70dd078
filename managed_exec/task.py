"""What is submitted, and what a running task can know of itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextvars import Context
from typing import Any, NamedTuple, TypeVar, overload

import torch

from managed_exec.context import current_context
from managed_exec.inheritance import SubmitterModes, SubmitterStreams

F = TypeVar("F", bound=Callable[..., Any])


class Task:
    """One submitted call, from ``submit`` until its future is done.

    A hundred thousand of these wait in a queue, so it holds what the call needs and nothing else.
    """

    __slots__ = ("args", "context", "fn", "future", "id", "kwargs", "modes", "streams")

    def __init__(
        self,
        task_id: int,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        context: Context | None,
        modes: SubmitterModes | None,
        streams: SubmitterStreams | None,
    ) -> None:
        self.future: Future[Any] = Future()
        self.id = task_id
        self.fn: Any = fn  # None once the task has run, as the next three
        self.args: Any = args
        self.kwargs: Any = kwargs
        self.context: Any = context  # a Context, or None where nothing is inherited
        self.modes = modes
        self.streams = streams

    def drop_call(self) -> None:
        """Let go of the function and its arguments."""
        self.fn = self.args = self.kwargs = self.context = None


class CurrentTask(NamedTuple):
    """The task that the calling thread runs.

    ``device`` is where a bare ``"cuda"`` goes, ``stream`` its stream there (None on the CPU), ``id`` a number unique
    in the pool, in order of submission.
    """

    device: torch.device
    stream: torch.Stream | None
    id: int


def current_task() -> CurrentTask | None:
    """Return the task that the calling thread runs; None outside a task, in threads a task starts included."""
    context = current_context()
    return None if context is None else CurrentTask(context.device, context.stream, context.task_id)


@overload
def gpu_task(fn: F, /) -> F: ...
@overload
def gpu_task() -> Callable[[F], F]: ...
def gpu_task(fn: Callable[..., Any] | None = None, /) -> Callable[..., Any]:
    """Mark a function as a task, with or without parentheses. It stays the ordinary callable it was.

    Raises:
        TypeError: what is decorated is not callable.
    """

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        if not callable(function):
            raise TypeError(f"gpu_task: expected a callable, got {function!r}; options are keywords")
        return function

    return mark if fn is None else mark(fn)
