"""The future of a task: what the standard one is, and a flag by which the running task is told to stop.

The flag is set once, by ``cancel()`` or when the task's time is over, and read without a lock where the task can stop:
by ``checkpoint()`` and before each managed operation. It is never unset.
"""

from __future__ import annotations

from concurrent.futures import CancelledError, Future
from concurrent.futures._base import CANCELLED, CANCELLED_AND_NOTIFIED
from typing import Any, NamedTuple, Protocol, TypeVar

from managed_exec.errors import TaskCancelledError, TaskTimeoutError
from managed_exec.receipt import Receipt, RunFacts

T = TypeVar("T")

_CANCELLED = (CANCELLED, CANCELLED_AND_NOTIFIED)  # states of a future


class Stop(NamedTuple):
    """Why a running task is to stop."""

    kind: type[TaskCancelledError] | type[TaskTimeoutError]
    text: str

    def new_error(self) -> TaskCancelledError | TaskTimeoutError:
        """Return a new error to be raised in the task, or given to its future."""
        return self.kind(self.text)


class StopWatcher(Protocol):
    """Who sees to it that a task which is to stop does, or is given up."""

    def watch(self, future: TaskFuture[Any]) -> None: ...


class TaskFuture(Future[T]):
    """A future whose task can be told to stop while it runs."""

    # Of the class until they are set, so that a future nobody cancels costs what the standard one does.
    stop: Stop | None = None
    watcher: StopWatcher | None = None
    is_told = False  # whether the task knows that it is to stop, and may do what it has to before it does
    facts: RunFacts | None = None  # noted by the worker before the future is done; None: the task has not run

    def receipt(self) -> Receipt | None:
        """Return what became of the task; None until it is done."""
        if not self.done():
            return None
        if self.facts is not None:
            return Receipt.of(self.facts)
        error = CancelledError() if self.cancelled() else self.exception()
        return Receipt(None, "it has not run", None, 0.0, error=None if error is None else type(error))

    def cancel(self) -> bool:
        """Cancel the task if it has not started, as in the standard library; if it runs, tell it to stop.

        Returns:
            False if the task runs already or has run. One that runs and stops ends with ``TaskCancelledError``.
        """
        if super().cancel():
            return True
        if self.request_stop(Stop(TaskCancelledError, "the task was cancelled while it ran")):
            watcher = self.watcher
            if watcher is not None:
                watcher.watch(self)
        return False

    @property
    def is_unwanted(self) -> bool:
        """Whether its task, which does not run, is not to run any more: it was cancelled, or told to stop between runs.

        Read without the lock: a future that is cancelled after this look will not let its task start.
        """
        return self._state in _CANCELLED or self.stop is not None

    def check_stop(self) -> None:
        """Raise, once, if the task is to stop and does not know. Called by operations of the task.

        Raises:
            TaskCancelledError, TaskTimeoutError: why it is to stop.
        """
        if self.stop is not None and not self.is_told:
            self.is_told = True
            raise self.stop.new_error()

    def request_stop(self, stop: Stop) -> bool:
        """Tell the task to stop; return False, and do nothing, if it does not run or has been told so already."""
        with self._condition:  # the standard future's own: reentrant, and nothing is called under it
            if self.stop is not None or not self.running():
                return False
            self.stop = stop
            return True
