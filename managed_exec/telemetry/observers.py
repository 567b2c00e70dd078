"""Who looks at a pool: its hooks, traces of it, and views that are drawn beside it.

Belongs to the pool alone, and refers to nothing of it that refers back: when the pool is collected so is this, and what
is left of views and of the memory manager's list of listeners is ended by weak references to this.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from managed_exec.events import Hooks
from managed_exec.memory.manager import MemoryManager
from managed_exec.telemetry.statistics import Census
from managed_exec.telemetry.ticker import Ticker
from managed_exec.telemetry.trace import Trace
from managed_exec.telemetry.watch import View


class Observers:
    """Those who look at one pool."""

    def __init__(self, hooks: Hooks, manager: MemoryManager | None, census: Census, thread_name: str) -> None:
        """
        Args:
            hooks: the pool's.
            manager: of the pool's memory, where it is this process's.
            thread_name: of the threads that draw.
        """
        self.hooks = hooks
        self.census = census
        self.thread_name = thread_name
        self._manager_hooks = None if manager is None else manager.hooks
        self._lock = threading.Lock()  # guards the next two; under it only the memory manager's hooks are changed
        self._listeners = 0  # who wants to be told of moves of memory: all hooks of the pool's together, and each trace
        self._stop_listening: weakref.finalize[..., Observers] | None = None
        # Those that draw, each with what ends it when this is collected. Changed in single steps: a pool may be looked
        # at from any thread.
        self._tickers: dict[Ticker, weakref.finalize[..., Observers]] = {}
        self._is_closed = False
        self._hooks_listen = bool(hooks.hooks)
        if self._hooks_listen:
            self._listen()

    @contextmanager
    def trace(self, path: str | Path) -> Iterator[None]:
        """Write to *path*, at the end of the block, what the pool does in it."""
        with open(path, "w", encoding="utf-8") as file:
            trace = Trace()
            key = self.hooks.add(trace)
            self._listen()
            try:
                yield
            finally:
                self.hooks.remove(key)
                self._listen_no_longer()  # or the manager would go on making events for nobody
                trace.write(file)

    def view(self, interval_s: float | None, out: TextIO | None) -> View:
        """Return a live view of the pool, which has not started."""
        # Bound to neither this nor the pool: who keeps the view keeps neither.
        begin = weakref.WeakMethod[Callable[[Ticker], None]](self.begin)
        return View(self.census.take, lambda ticker: _begin(begin, ticker), self.thread_name, interval_s, out)

    def begin(self, ticker: Ticker) -> None:
        """Start *ticker*, and end it when the pool is shut down or collected.

        Raises:
            RuntimeError: the pool is shut down, or the interpreter exits.
        """
        if self._is_closed:
            raise RuntimeError(_SHUT_DOWN)
        for ended in [each for each in self._tickers.copy() if not each.is_alive]:
            finalizer = self._tickers.pop(ended, None)
            if finalizer is not None:
                finalizer.detach()
        ticker.start()
        self._tickers[ticker] = weakref.finalize(self, ticker.end)
        if self._is_closed:  # since then, and may not have seen it
            ticker.end()

    def close(self, *, wait: bool) -> None:
        """End what draws; with *wait*, wait for it, and listen to the memory manager no longer."""
        self._is_closed = True
        for ticker in self._tickers.copy():
            ticker.end()
            if wait:
                ticker.join()
        if wait:
            with self._lock:
                hooks_listen, self._hooks_listen = self._hooks_listen, False
            if hooks_listen:
                self._listen_no_longer()

    def _listen(self) -> None:
        """Have the pool's hooks be told of moves of memory, until as many no longer want it, or this is collected."""
        with self._lock:
            self._listeners += 1
            if self._listeners == 1 and self._manager_hooks is not None:
                key = self._manager_hooks.add(self.hooks.emit)
                self._stop_listening = weakref.finalize(self, self._manager_hooks.remove, key)

    def _listen_no_longer(self) -> None:
        with self._lock:
            self._listeners -= 1
            if self._listeners == 0 and self._stop_listening is not None:
                self._stop_listening()


_SHUT_DOWN = "cannot look at a pool that is shut down"


def _begin(method: weakref.WeakMethod[Callable[[Ticker], None]], ticker: Ticker) -> None:
    """Call *method* with *ticker* if what it is of is still there."""
    begin = method()
    if begin is None:
        raise RuntimeError(_SHUT_DOWN)
    begin(ticker)
