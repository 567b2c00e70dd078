"""``pool.watch()``: a pool's devices, tasks and rates, again and again, in a script or a notebook."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

from managed_exec.telemetry.display import Display, Page, busy_text, open_display, table
from managed_exec.telemetry.statistics import PoolStatistics
from managed_exec.telemetry.ticker import Ticker

# Seconds between two pages, where nothing else was asked for.
REDRAW_S = 0.5
LINE_S = 5.0
MIN_INTERVAL_S = 0.05


def checked_interval(interval_s: float | None) -> float | None:
    """Return *interval_s* if it is None or a number of seconds that can be kept."""
    if interval_s is None:
        return None
    if isinstance(interval_s, bool) or not isinstance(interval_s, (int, float)):
        raise TypeError(f"interval_s: expected seconds or None, got {interval_s!r}")
    if not MIN_INTERVAL_S <= interval_s <= 86400:
        raise ValueError(f"interval_s: expected {MIN_INTERVAL_S} to 86400 seconds, got {interval_s!r}")
    return interval_s


class View:
    """The live view of a pool: a context manager, or anything between ``start`` and ``stop``.

    ``stop`` is also done by the pool's shutdown, and by the interpreter when it exits. A view that has stopped can
    start again, at another place.
    """

    def __init__(
        self,
        take: Callable[[], PoolStatistics],
        begin: Callable[[Ticker], None],
        name: str,
        interval_s: float | None,
        out: TextIO | None,
    ) -> None:
        """
        Args:
            take: makes the pool's statistics.
            begin: starts a ticker that ends with the pool.
            name: of the pool's threads.
        """
        self._take = take
        self._begin = begin
        self._name = name
        self._interval_s = checked_interval(interval_s)
        self._out = out
        self._ticker: Ticker | None = None

    def start(self) -> View:
        """Begin to show; does nothing if it does already.

        Raises:
            RuntimeError: the pool is shut down.
        """
        if self._ticker is None or not self._ticker.is_alive:
            display = open_display(self._out)
            interval_s = self._interval_s or (REDRAW_S if display.redraws else LINE_S)
            pages = _Pages(self._take, display)
            ticker = Ticker(pages.show_next, display.close, interval_s, self._name)
            try:
                self._begin(ticker)
            except BaseException:
                display.close()
                raise
            self._ticker = ticker
        return self

    def stop(self) -> None:
        """Show the last state and end; does nothing if it has ended."""
        if self._ticker is not None:
            self._ticker.join()

    __enter__ = start

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class _Pages:
    """Makes pages of statistics, with the rates since the page before."""

    def __init__(self, take: Callable[[], PoolStatistics], display: Display) -> None:
        self._take = take
        self._display = display
        self._before: PoolStatistics | None = None

    def show_next(self) -> None:
        now = self._take()
        self._display.show(page(now, self._before))
        self._before = now


def page(now: PoolStatistics, before: PoolStatistics | None = None) -> Page:
    """Return what is seen of *now*; rates are those since *before*, or unknown without."""
    return Page(_line(now, before), lambda: _table(now, before))


def _rates(now: PoolStatistics, before: PoolStatistics | None) -> tuple[float, float]:
    """Return tasks done, and bytes moved out of devices and back, in a second."""
    elapsed_s = 0.0 if before is None else now.at_s - before.at_s
    if before is None or elapsed_s <= 0:
        return 0.0, 0.0
    return (now.tasks.ended - before.tasks.ended) / elapsed_s, (_moved(now) - _moved(before)) / elapsed_s


def _moved(statistics: PoolStatistics) -> int:
    memory = statistics.memory
    return 0 if memory is None else sum(memory.spilled_bytes.values()) + sum(memory.unspilled_bytes.values())


def _summary(now: PoolStatistics, before: PoolStatistics | None) -> str:
    tasks = now.tasks
    done, moved = _rates(now, before)
    text = f"queued {tasks.queued}, running {tasks.running}, done {tasks.ended} ({done:.1f} a second)"
    for name, count in (("failed", tasks.failed), ("cancelled", tasks.cancelled), ("retries", tasks.retries)):
        text += f", {name} {count}" if count else ""
    return text + (f", moving {moved / 2**20:.1f} MiB a second" if moved else "")


def _line(now: PoolStatistics, before: PoolStatistics | None) -> str:
    parts = [f"{time.strftime('%H:%M:%S')}  {_summary(now, before)}"]
    for device in now.devices:
        text = f"{device.device} {device.running} running, {device.memory_text}"
        text += f", {device.spilled_text}" if device.spilled_text else ""
        text += "" if device.utilization is None else f", busy {device.utilization:.0%}"
        text += "" if device.out_of_service is None else ", OUT OF SERVICE"
        parts.append(text)
    return "  |  ".join(parts) + "\n"


def _table(now: PoolStatistics, before: PoolStatistics | None) -> object:
    rows = []
    for device in now.devices:
        rows.append(
            (
                str(device.device),
                str(device.running) if device.out_of_service is None else "out of service",
                device.memory_text,
                device.spilled_text or "-",
                busy_text(device.utilization),
            )
        )
    title = f"{time.strftime('%H:%M:%S')}  workers {now.workers} of {now.max_workers}"
    headings = ("device", "running", "memory", "spilled", "busy")
    return table(title, headings, rows, _summary(now, before))
