"""A trace of a pool in the Trace Event format, which https://ui.perfetto.dev and ``chrome://tracing`` show.

Each device is a process there, and has a row for each worker that ran tasks on it. Waiting tasks, moves of storages and
bytes by tier are tracks of their own. Times are microseconds since the same day as in the traces of ``torch.profiler``,
so the two can be laid side by side.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, TextIO

from managed_exec.events import (
    CallMigrated,
    Event,
    TaskFinished,
    TaskRetried,
    TaskStarted,
    TaskSubmitted,
    TensorMoved,
)

# Times in torch's traces are counted from the last whole multiple of this since 1970, so that digits of a double are
# left for parts of a microsecond: ``ChromeTraceBaseTime`` of its library Kineto.
_BASE_PERIOD_S = 7_889_238

_QUEUE = "queue"  # the process that stands for the tasks that wait


class Trace:
    """A hook that keeps what it is told, to be written as a trace."""

    def __init__(self) -> None:
        now_s = time.time()
        self._base_s = int(now_s) // _BASE_PERIOD_S * _BASE_PERIOD_S  # after 1970
        self._to_base_s = now_s - self._base_s - time.perf_counter()
        self._events: list[Event] = []  # appended to from any thread, in single steps

    def __call__(self, event: Event) -> None:
        self._events.append(event)

    def write(self, file: TextIO) -> None:
        """Write what was told so far to *file*."""
        entries = list(_Writer(self._to_base_s).entries(list(self._events)))
        json.dump({"baseTimeNanoseconds": self._base_s * 10**9, "traceEvents": entries}, file)


class _Writer:
    """Turns events into entries of a trace."""

    def __init__(self, to_base_s: float) -> None:
        self._to_base_s = to_base_s
        self._processes: dict[str, int] = {}  # number by name
        self._threads: dict[tuple[str, str], int] = {}  # number by names of process and thread
        self._tier_bytes: dict[str, Counter[str]] = {}  # by device
        self._moves = 0

    def entries(self, events: list[Event]) -> Iterator[dict[str, Any]]:
        begun: dict[int, TaskStarted] = {}  # by task, whose next run comes after the end of the one before
        for event in events:
            if isinstance(event, TaskStarted):
                begun[event.task_id] = event
                yield self._wait("e", event.task_id, event.name, event.at_s)
            elif isinstance(event, TaskSubmitted):
                yield self._wait("b", event.task_id, event.name, event.at_s)
            elif isinstance(event, TaskFinished):
                start = begun.pop(event.task_id, None)
                if start is None:  # cancelled, or never placed
                    yield self._wait("e", event.task_id, event.name, event.at_s)
                else:
                    yield self._run(start, event)
            elif isinstance(event, TensorMoved):
                yield from self._move(event)
            elif isinstance(event, CallMigrated):
                yield self._migration(event)
            else:
                start = begun.pop(event.task_id, None)
                if start is not None:
                    yield self._run(start, event)
                yield self._wait("b", event.task_id, event.name, event.at_s)
        yield from self._names()

    def _us(self, at_s: float) -> float:
        return (at_s + self._to_base_s) * 1e6

    def _at(self, process: str, thread: str) -> dict[str, int]:
        pid = self._processes.setdefault(process, len(self._processes) + 1)
        tid = self._threads.setdefault((process, thread), len(self._threads) + 1)
        return {"pid": pid, "tid": tid}

    def _wait(self, phase: str, task_id: int, name: str, at_s: float) -> dict[str, Any]:
        place = self._at(_QUEUE, "waiting")
        return {"ph": phase, "cat": "wait", "id": task_id, "name": name, "ts": self._us(at_s), **place}

    def _run(self, start: TaskStarted, end: TaskFinished | TaskRetried) -> dict[str, Any]:
        details: dict[str, Any] = {"task": start.task_id, "attempt": start.attempt}
        if isinstance(end, TaskRetried):
            details["ended"] = f"{end.reason}; it runs again"
        elif end.error is not None:
            details["error"] = _shown(end.error)
        return {
            "ph": "X",
            "cat": "task",
            "name": start.name,
            "ts": self._us(start.at_s),
            "dur": (end.at_s - start.at_s) * 1e6,
            "args": details,
            **self._at(str(start.device), start.worker),
        }

    def _move(self, event: TensorMoved) -> Iterator[dict[str, Any]]:
        device = str(event.device)
        self._moves += 1
        common = {
            "cat": "memory",
            "id": self._moves,
            "name": f"{event.what} {event.tier}",
            **self._at(device, "memory"),
        }
        details = {"bytes": event.n_bytes, "created by": event.task}
        yield {"ph": "b", "ts": self._us(event.started_s), "args": details, **common}
        yield {"ph": "e", "ts": self._us(event.at_s), **common}
        held = self._tier_bytes.setdefault(device, Counter())
        held[event.tier] += event.n_bytes if event.what == "spilled" else -event.n_bytes
        # Of what was spilled before the trace began only the way back is seen.
        counts = {tier: max(0, n_bytes) for tier, n_bytes in held.items()}
        place = {"pid": common["pid"], "tid": common["tid"]}
        yield {"ph": "C", "name": "spilled bytes", "ts": self._us(event.at_s), "args": counts, **place}

    def _migration(self, event: CallMigrated) -> dict[str, Any]:
        place = self._at(str(event.device), "memory")
        name = f"a call of {event.task or 'no task'} is made here"
        return {"ph": "i", "s": "p", "cat": "memory", "name": name, "ts": self._us(event.at_s), **place}

    def _names(self) -> Iterator[dict[str, Any]]:
        for process, pid in self._processes.items():
            yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": process}}
        for (process, thread), tid in self._threads.items():
            pid = self._processes[process]
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": thread}}


def _shown(error: BaseException) -> str:
    try:
        return repr(error)
    except Exception:  # noqa: BLE001 it is the user's, and the trace is wanted all the same
        return type(error).__qualname__
