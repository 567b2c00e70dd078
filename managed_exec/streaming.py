"""``map(..., in_flight=)``: the calls of a long stream, a bounded number of bytes at a time.

    iterables -> drawn -> submitted -> done -> handed out, in order

In flight is a call from ``submit`` until its result is handed out. It counts with the bytes of its arguments until it
is done, since the pool drops them then, with those of its result from then on, and with ``CALL_BYTES`` always. How
large a result will be is not known before: each is expected to be as large as the largest so far, and the first call
runs alone. So the bound holds unless a call is larger than it by itself, or a result is larger than all before it.
Besides there is one call that was drawn, to see how large it is, and waits for room.

Everything happens in the thread that asks for results, like the drawing of the standard ``map``: no user code runs in
another thread, and nothing is locked. The oldest call is always in flight, so its result comes and makes room.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from concurrent.futures import Executor, Future
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import torch

from managed_exec.memory.room import tensor_bytes
from managed_exec.sizes import format_bytes, parse_bytes
from managed_exec.tensors.results import iter_leaves

T = TypeVar("T")

# What each call counts besides: about what a queued task, its future and small arguments take. So a stream of numbers
# or file names is bounded as well.
CALL_BYTES = 1024


@runtime_checkable
class _Array(Protocol):
    """Whatever says how many bytes its elements take: arrays of NumPy and the like, memory views."""

    @property
    def nbytes(self) -> int: ...


class Submits(Protocol):
    """What ``map`` needs of an executor, the standard library's too."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]: ...


def bytes_in(value: object) -> int:
    """Return the bytes of the tensors, arrays and byte strings in *value*, in containers too (``tensors.results``)."""
    n_bytes = 0
    for leaf in iter_leaves(value, (bytes, bytearray, _Array)):
        if isinstance(leaf, torch.Tensor):
            n_bytes += tensor_bytes(leaf)
        else:
            n_bytes += len(leaf) if isinstance(leaf, (bytes, bytearray)) else leaf.nbytes
    return n_bytes


def begin_map(
    fn: Callable[..., T],
    iterables: tuple[Iterable[Any], ...],
    in_flight: int | str | None,
    timeout: float | None,
    chunksize: int,
    newer: dict[str, Any],
    executor: Submits,
) -> Iterator[T]:
    """Begin a map, the standard one where *in_flight* is None; see ``GPUPoolExecutor.map``."""
    if in_flight is None:
        return Executor.map(cast("Any", executor), fn, *iterables, timeout=timeout, chunksize=chunksize, **newer)
    return stream(executor.submit, fn, iterables, in_flight, timeout, **newer)


def stream(
    submit: Callable[..., Future[T]],
    fn: Callable[..., T],
    iterables: tuple[Iterable[Any], ...],
    in_flight: int | str,
    timeout: float | None = None,
    buffersize: int | None = None,
) -> Iterator[T]:
    """Submit calls of *fn* while there is room for them, and yield their results in order.

    Args:
        submit: the pool's.
        fn: what is called.
        iterables: its arguments, drawn in the thread that calls this and then in the one that takes the results.
        in_flight: bytes, or text such as ``"2GiB"``, of arguments and results that there may be at once.
        timeout: seconds from now until the last result; None for no bound.
        buffersize: most calls in flight, besides; None for no bound.

    Raises:
        TypeError, ValueError: *in_flight* or *buffersize* is of the wrong type, or out of range.
        TimeoutError, or what a call or the iterables raised: from the iterator. What has not started is cancelled then,
            and when the iterator is closed.
    """
    limit_bytes = parse_bytes(in_flight, name="in_flight")
    if buffersize is not None and (isinstance(buffersize, bool) or not isinstance(buffersize, int)):
        raise TypeError(f"buffersize: expected an int or None, got {buffersize!r}")
    if buffersize is not None and buffersize < 1:
        raise ValueError(f"buffersize: expected 1 or more calls, or None for no bound, got {buffersize}")
    deadline_s = None if timeout is None else time.monotonic() + timeout
    # Not zip, which refers to the last arguments it gave until it gives others.
    arguments = map(_row, *iterables) if iterables else iter(())
    window = _Window(submit, fn, arguments, limit_bytes, buffersize)
    try:
        window.fill()  # before the first result is asked for, likewise
    except BaseException:
        window.close()
        raise
    return window.results(deadline_s)


def _row(*arguments: Any) -> tuple[Any, ...]:
    return arguments


class _Call:
    """A call in flight."""

    __slots__ = ("future", "is_done", "n_bytes")

    def __init__(self, future: Future[Any], n_bytes: int) -> None:
        self.future = future
        self.n_bytes = n_bytes  # with its arguments, or with its result once ``is_done``
        self.is_done = False


class _Window:
    """The calls of one stream that are in flight, and how many bytes they have.

    ``_n_bytes`` is the sum over ``_calls``, ``_unfinished`` the number of those that are not done.
    """

    def __init__(
        self,
        submit: Callable[..., Future[Any]],
        fn: Callable[..., Any],
        arguments: Iterator[tuple[Any, ...]],
        limit_bytes: int,
        max_calls: int | None,
    ) -> None:
        self._submit = submit
        self._fn = fn
        self._arguments = arguments
        self._limit_bytes = limit_bytes
        self._max_calls = max_calls
        self._drawn: tuple[tuple[Any, ...], int] | None = None  # arguments that wait for room, and their bytes
        self._calls: deque[_Call] = deque()  # in order
        self._handed_out = 0  # calls before the first of these, so that the n-th call is at n - _handed_out
        self._n_bytes = 0
        self._unfinished = 0
        self._largest_bytes: int | None = None  # of the results so far
        # Numbers of calls that are done, put by whoever ends their futures: a worker, or what cancels them. A pool ends
        # each of its futures, so whoever waits here is woken.
        self._done: SimpleQueue[int] = SimpleQueue()

    def fill(self) -> None:
        """Submit calls while there is room."""
        while self._max_calls is None or len(self._calls) < self._max_calls:
            arguments, n_bytes = self._drawn or self._draw()
            if arguments is None:
                return
            if self._calls and not self._has_room(n_bytes):
                self._drawn = arguments, n_bytes
                return
            self._drawn = None
            self._start(arguments, n_bytes)

    def _draw(self) -> tuple[tuple[Any, ...] | None, int]:
        """Return the next arguments and their bytes; None where there are no more."""
        arguments = next(self._arguments, None)
        return arguments, CALL_BYTES + bytes_in(arguments)

    def _has_room(self, n_bytes: int) -> bool:
        """Return whether a call that begins with *n_bytes* fits beside the others and all results to come."""
        expected_bytes = self._limit_bytes if self._largest_bytes is None else self._largest_bytes
        result_bytes = (self._unfinished + 1) * expected_bytes
        return self._n_bytes + n_bytes + result_bytes <= self._limit_bytes

    def _start(self, arguments: tuple[Any, ...], n_bytes: int) -> None:
        number, done = self._handed_out + len(self._calls), self._done
        call = _Call(self._submit(self._fn, *arguments), n_bytes)
        self._calls.append(call)
        self._n_bytes += n_bytes
        self._unfinished += 1
        call.future.add_done_callback(lambda _: done.put(number))  # of the future it knows nothing: no cycle

    def results(self, deadline_s: float | None) -> Iterator[Any]:
        """Yield the results in order; have the window full while their taker works."""
        try:
            while self._calls:
                while not self._calls[0].is_done:
                    self._note_done(self._next_done(deadline_s))
                    self.fill()
                # No filling here, or an endless stream of quick calls would keep its taker.
                while not self._done.empty():
                    self._note_done(self._done.get())
                yield self._hand_out()
        finally:
            self.close()

    def _next_done(self, deadline_s: float | None) -> int:
        if deadline_s is None:
            return self._done.get()
        try:
            return self._done.get(timeout=max(0.0, deadline_s - time.monotonic()))
        except Empty:
            raise futures.TimeoutError(
                f"result {self._handed_out + 1} did not come in time; {len(self._calls)} calls with "
                f"{format_bytes(self._n_bytes)} were in flight"
            ) from None

    def _note_done(self, number: int) -> None:
        """Count the result of a call in the place of its arguments, which the pool has dropped."""
        call = self._calls[number - self._handed_out]
        failed = call.future.cancelled() or call.future.exception() is not None
        result_bytes = 0 if failed else bytes_in(call.future.result())
        self._largest_bytes = max(result_bytes, self._largest_bytes or 0)
        self._n_bytes += CALL_BYTES + result_bytes - call.n_bytes
        self._unfinished -= 1
        call.n_bytes, call.is_done = CALL_BYTES + result_bytes, True

    def _hand_out(self) -> Any:
        """Return the first result, which is in flight no longer, or raise what came instead."""
        call = self._calls.popleft()
        self._handed_out += 1
        self._n_bytes -= call.n_bytes
        try:
            result = call.future.result()
        finally:
            del call  # the traceback of an error refers to this frame
        self.fill()
        return result

    def close(self) -> None:
        """Cancel what has not started, and let go of the rest."""
        for call in self._calls:
            call.future.cancel()
        self._calls.clear()
        self._drawn = None
        self._arguments = iter(())
