"""A thread that does something every so often, beside a pool: draws a view, or a bar.

It ends when it is told to, when its pool is shut down or collected, and when the interpreter exits; each of them puts
one token. It refers to nothing that keeps the pool alive, and it is the only one that waits for the token.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import thread as stock
from queue import Empty, SimpleQueue

from managed_exec.scheduling.threads import start_thread

_log = logging.getLogger(__name__)


class Ticker:
    """Calls *tick* at once, then every *interval_s* seconds, once more at the end, and then *close*."""

    def __init__(self, tick: Callable[[], object], close: Callable[[], object], interval_s: float, name: str) -> None:
        self._tick = tick
        self._close = close
        self._interval_s = interval_s
        self._wake: SimpleQueue[None] = SimpleQueue()  # one token ends it
        self._thread = threading.Thread(target=self._run, name=name)

    def start(self) -> None:
        """Start the thread; the interpreter ends it and waits for it when it exits.

        Raises:
            RuntimeError: the interpreter exits already, or there can be no more threads.
        """
        # The standard pool's global lock, taken beside no other.
        with stock._global_shutdown_lock:
            if stock._shutdown:
                raise RuntimeError(f"cannot start {self._thread.name!r}: the interpreter is shutting down")
            start_thread(self._thread, self._wake)

    def end(self, _: object = None) -> None:
        """Have the thread end soon. Takes no lock and waits for nobody, so the collector may call it anywhere."""
        self._wake.put(None)

    def join(self) -> None:
        """Have the thread end, and wait until it has; it may never have started."""
        self.end()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._tick()
            while not self._is_told_to_end():
                self._tick()
            self._tick()
        except Exception:  # noqa: BLE001 reported
            # Where it writes to was closed, say. What it shows goes on, and nobody waits for this thread to say more.
            _log.exception("%s ends", self._thread.name)
        finally:
            try:
                self._close()
            except Exception:  # noqa: BLE001 likewise
                _log.exception("%s cannot be closed", self._thread.name)

    def _is_told_to_end(self) -> bool:
        try:
            self._wake.get(timeout=self._interval_s)
        except Empty:
            return False
        return True
