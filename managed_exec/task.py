"""What is submitted, and what a running task can know of itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import Context
from time import perf_counter
from typing import Any, NamedTuple
from weakref import ref

import torch

from managed_exec.context import current_context
from managed_exec.future import Stop, TaskFuture
from managed_exec.inheritance import SubmitterModes, SubmitterStreams
from managed_exec.options import ANY, NO_OPTIONS, Need, TaskOptions, name_of


class Task:
    """One submitted call, from ``submit`` until its future is done.

    A hundred thousand of these wait in a queue, so it holds what the call needs and nothing else.
    """

    __slots__ = (
        "args",
        "attempts",
        "context",
        "fn",
        "former_run",
        "future",
        "id",
        "kwargs",
        "modes",
        "need",
        "options",
        "started_s",
        "streams",
        "submitted_s",
    )

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
        self.future: TaskFuture[Any] = TaskFuture()
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
        self.submitted_s = perf_counter()
        self.started_s: float | None = None  # the last time
        # Of one that waits to run again: the device of its last run, and when that ended.
        self.former_run: tuple[torch.device, float] | None = None

    @property
    def name(self) -> str:
        """The name of its function; that of its class where it has none."""
        return name_of(self.fn)

    def __str__(self) -> str:
        return f"task {self.id} ({self.name})"

    def drop_call(self) -> None:
        """Let go of the function and its arguments."""
        self.fn = self.args = self.kwargs = self.context = None


class _Facts(NamedTuple):
    """What does not change while a task runs, but for a call of it that is made on another device."""

    device: torch.device
    stream: torch.Stream | None
    id: int


class CurrentTask(_Facts):
    """The task that the calling thread runs.

    Attributes:
        device: where a bare ``"cuda"`` goes.
        stream: the task's stream there; None on the CPU.
        id: a number unique in the pool, in order of submission.
    """

    # Weak: a task may return this, and its future would otherwise refer to itself.
    _future: ref[TaskFuture[Any]] | None = None

    @property
    def cancelled(self) -> bool:
        """Whether the task is to stop: ``cancel()`` of its future was called, or its timeout is over.

        A task that has seen this can finish what it has to: no operation of it raises for that reason any more.
        """
        if self._stop is None:
            return False
        self._note_told()
        return True

    def checkpoint(self) -> None:
        """Stop the task here if it is to stop.

        Raises:
            TaskCancelledError: ``cancel()`` of the task's future was called while it ran.
            TaskTimeoutError: its timeout is over.
        """
        stop = self._stop
        if stop is not None:
            self._note_told()
            raise stop.new_error()

    @property
    def _stop(self) -> Stop | None:
        future = None if self._future is None else self._future()
        return None if future is None else future.stop

    def _note_told(self) -> None:
        future = None if self._future is None else self._future()
        if future is not None:
            future.is_told = True

    def __getstate__(self) -> None:
        """Pickle the facts alone: the flag belongs to this process."""


def current_task() -> CurrentTask | None:
    """Return the task that the calling thread runs; None outside a task, in threads a task starts included."""
    context = current_context()
    if context is None:
        return None
    task = CurrentTask(context.device, context.stream, context.task_id)
    if context.future is not None:
        task._future = ref(context.future)
    return task
