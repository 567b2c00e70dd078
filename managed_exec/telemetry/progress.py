"""``pool.map(..., progress=True)``: a bar of the calls that are done, and what the devices do meanwhile.

    map's calls --done callbacks--> counted --a thread, a few times a second--> drawn

The bar is drawn on standard error: by rich, where that is installed, else by tqdm, both only on a terminal; in a
notebook in its cell; else there is a line now and then. It changes nothing of ``map``: what is submitted when, the
order, errors and timeouts are those without it.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sized
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from managed_exec.options import name_of
from managed_exec.streaming import Submits
from managed_exec.telemetry.display import Display, Page, is_terminal, open_display
from managed_exec.telemetry.observers import Observers
from managed_exec.telemetry.ticker import Ticker
from managed_exec.telemetry.watch import LINE_S

_log = logging.getLogger(__name__)

T = TypeVar("T")

BAR_S = 0.1  # between two drawings on a terminal: less, and it looks as if it stood still


class CountedCalls:
    """Submits the calls of one ``map`` and counts them."""

    def __init__(self, submit: Callable[..., Future[Any]], name: str, total: int | None) -> None:
        self._submit = submit
        self.counts = CallCounts(name, total)

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future = self._submit(fn, *args, **kwargs)
        future.add_done_callback(self.counts.note_done)
        return future


class CallCounts:
    """What a bar shows. Refers to no call, so a future that refers to it makes no cycle."""

    def __init__(self, name: str, total: int | None) -> None:
        self.name = name
        self.total = total  # calls there will be; None: nobody knows yet
        self.taken = 0  # results, by whoever asked for them
        self.began_s = time.monotonic()
        self._lock = threading.Lock()  # guards the next two, which any worker changes; a leaf
        self._done = 0
        self.failed = 0

    def note_done(self, future: Future[Any]) -> None:
        """Count a call that is done; not one that was cancelled before it began."""
        if future.cancelled():
            return
        failed = future.exception() is not None
        with self._lock:
            self._done += 1
            self.failed += failed

    @property
    def done(self) -> int:
        """Calls that are done. A result may be taken a moment before its call is counted."""
        return max(self._done, self.taken)


def with_progress(
    observers: Observers,
    submit: Callable[..., Future[Any]],
    begin: Callable[[Submits], Iterator[T]],
    fn: Callable[..., Any],
    iterables: tuple[Iterable[Any], ...],
) -> Iterator[T]:
    """Return the results of a ``map`` whose progress is shown.

    Args:
        submit: the pool's.
        begin: begins the map with what it is given to submit by.
        fn: what is called.
        iterables: its arguments; only their lengths are asked for here.
    """
    calls = CountedCalls(submit, name_of(fn), _length(iterables))
    ticker = _start_bar(observers, calls.counts)
    try:
        results = begin(calls)
    except BaseException:
        ticker.join()
        raise
    return BarredResults(results, calls, ticker)


class BarredResults(Iterator[T]):
    """The results of a map; ends its bar with the last of them, with an error, when closed and when collected."""

    def __init__(self, results: Iterator[T], calls: CountedCalls, ticker: Ticker) -> None:
        self._results = results
        self._calls: CountedCalls | None = calls  # which the map may need to submit more
        self._counts = calls.counts
        self._ticker = ticker
        # The collector may come in any thread, under any lock: it tells the bar to end and does not wait for it.
        self._end_if_dropped = weakref.finalize(self, ticker.end)

    def __next__(self) -> T:
        try:
            result = next(self._results)
        except BaseException as error:
            if isinstance(error, StopIteration):
                self._counts.total = self._counts.done
            self._ticker.join()
            # The frame of this call stays with the error, if somebody keeps that.
            self._results, self._calls = iter(()), None
            raise
        self._counts.taken += 1
        return result

    def close(self) -> None:
        """Cancel what has not started, as closing the results of a map without a bar does."""
        close = getattr(self._results, "close", None)
        try:
            if close is not None:
                close()
        finally:
            self._ticker.join()


def _length(iterables: tuple[Iterable[Any], ...]) -> int | None:
    """Return how many calls there will be, if all say how long they are."""
    lengths = []
    for iterable in iterables:
        if not isinstance(iterable, Sized):
            return None
        try:
            lengths.append(len(iterable))
        except Exception:  # noqa: BLE001 a DataLoader of a stream, say, has a length only to raise
            return None
    return min(lengths, default=0)


# -- the bars ---------------------------------------------------------------------------------------------------------


class _Bar(Protocol):
    interval_s: float

    def show(self, load: str) -> None: ...
    def close(self) -> None: ...


def _start_bar(observers: Observers, counts: CallCounts) -> Ticker:
    bar = _open_bar(counts)
    read: Callable[[], str] = observers.census.load_text
    ticker = Ticker(lambda: bar.show(read()), bar.close, bar.interval_s, f"{observers.thread_name}_bar")
    try:
        observers.begin(ticker)
    except RuntimeError as error:  # the pool is shut down, or the interpreter: map itself says what it has to say
        _log.debug("no bar for %s: %s", counts.name, error)
        bar.close()
    except BaseException:
        bar.close()
        raise
    return ticker


def _open_bar(counts: CallCounts) -> _Bar:
    if is_terminal(sys.stderr) and not _is_there("rich") and _is_there("tqdm"):
        return _TqdmBar(counts)
    return _Drawn(counts, open_display())


def _is_there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


class _Drawn:
    """A bar by rich, in place; or lines."""

    def __init__(self, counts: CallCounts, display: Display) -> None:
        self._counts = counts
        self._display = display
        self._progress: Any = None
        self.interval_s = BAR_S if display.redraws else LINE_S

    def show(self, load: str) -> None:
        counts = self._counts
        done, total = counts.done, counts.total
        of = "" if total is None else f" of {total}"
        failed = f", {counts.failed} failed" if counts.failed else ""
        rate = done / max(1e-9, time.monotonic() - counts.began_s)
        line = f"{counts.name}: {done}{of} calls, {rate:.1f} a second{failed}; running on {load}\n"
        self._display.show(Page(line, lambda: self._drawn(done, total, f"{load}{failed}")))

    def close(self) -> None:
        self._display.close()

    def _drawn(self, done: int, total: int | None, load: str) -> Any:
        from rich import progress
        from rich.markup import escape

        if self._progress is None:
            self._progress = progress.Progress(
                progress.TextColumn("{task.description}"),
                progress.BarColumn(),
                progress.MofNCompleteColumn(),
                progress.TimeElapsedColumn(),
                progress.TimeRemainingColumn(),
                progress.TextColumn("{task.fields[load]}"),
                auto_refresh=False,  # never started: what draws it is the display
            )
            self._progress.add_task(escape(self._counts.name), load="")
        self._progress.update(0, completed=done, total=total, load=escape(load))
        return self._progress


class _TqdmBar:
    """A bar by tqdm, on a terminal."""

    interval_s = BAR_S

    def __init__(self, counts: CallCounts) -> None:
        from tqdm import tqdm

        self._counts = counts
        self._bar: Any = tqdm(total=counts.total, desc=counts.name, unit=" calls", file=sys.stderr)

    def show(self, load: str) -> None:
        self._bar.total = self._counts.total
        self._bar.n = self._counts.done
        failed = f", {self._counts.failed} failed" if self._counts.failed else ""
        self._bar.set_postfix_str(f"{load}{failed}", refresh=False)
        self._bar.refresh()

    def close(self) -> None:
        self._bar.close()
