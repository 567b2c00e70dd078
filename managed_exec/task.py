"""What is submitted, and what a running task can know of itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextvars import Context
from typing import Any, NamedTuple

import torch

from managed_exec.context import current_context
from managed_exec.inheritance import SubmitterModes, SubmitterStreams
from managed_exec.options import ANY, NO_OPTIONS, Need, TaskOptions


class Task:
    """One submitted call, from ``submit`` until its future is done.

    A hundred thousand of these wait in a queue, so it holds what the call needs and nothing else.
    """

    __slots__ = ("args", "attempts", "context", "fn", "future", "id", "kwargs", "modes", "need", "options", "streams")

    def __init__(
        self,
        task_id: int,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        context: Context | None,
        modes: SubmitterModes | None,
        streams: SubmitterStreams | None,
        options: TaskOptions = NO_OPTIONS,
        need: Need = ANY,
    ) -> None:
        self.future: Future[Any] = Future()
        self.id = task_id
        self.fn: Any = fn  # None once the task has run, as the next three
        self.args: Any = args
        self.kwargs: Any = kwargs
        self.context: Any = context  # a Context, or None where nothing is inherited
        self.modes = modes
        self.streams = streams
        self.options = options
        self.need = need  # with which it is, or will be, booked
        self.attempts = 0  # runs that are over, of a task that may run again

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
