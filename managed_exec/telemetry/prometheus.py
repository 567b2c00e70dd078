"""Metrics of pools for Prometheus, kept by hooks: the extra ``metrics``.

    metrics = PoolMetrics()
    pool = GPUPoolExecutor(hooks=[metrics.hook("training")])
    prometheus_client.start_http_server(8000)

A time series is never forgotten once it was counted, so labels are what there are few of: pools, devices, tiers, kinds
of outcome. The name of a task's function is none of them: lambdas, partials and what is made on request have names
without number. Traces and ``TaskFinished`` have the names.
"""

from __future__ import annotations

import functools
import threading
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING

from managed_exec.errors import TaskCancelledError
from managed_exec.events import CallMigrated, Event, Hook, TaskFinished, TaskRetried, TaskStarted, TaskSubmitted
from managed_exec.memory.manager import manager

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

# Seconds: of tasks of less than a millisecond and of an hour, three buckets to a power of ten.
BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 3600)
NO_DEVICE = "none"  # of a task that has not run


class PoolMetrics:
    """The metrics of a program's pools, in one registry.

    | name | type | labels |
    |---|---|---|
    | ``managed_exec_tasks_submitted_total`` | counter | pool |
    | ``managed_exec_tasks_done_total`` | counter | pool, device, outcome: finished, failed or cancelled |
    | ``managed_exec_task_retries_total`` | counter | pool |
    | ``managed_exec_task_waited_seconds``, ``managed_exec_task_ran_seconds`` | histogram | pool, device |
    | ``managed_exec_tasks_queued`` | gauge | pool |
    | ``managed_exec_tasks_running`` | gauge | pool, device |
    | ``managed_exec_moved_bytes_total`` | counter | pool, device, tier, direction: spilled or unspilled |
    | ``managed_exec_tier_bytes`` | gauge, of the whole process | tier |
    | ``managed_exec_migrated_calls_total`` | counter | pool, device |

    Moves of memory are those of the process, as long as the pool listens: two pools with hooks see the same moves.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        """
        Args:
            registry: where they are registered; None for the library's own, which its servers show.

        Raises:
            ImportError: prometheus-client is not installed.
            ValueError: the registry has them already.
        """
        try:
            from prometheus_client import REGISTRY, Counter, Gauge, Histogram
        except ImportError as error:
            raise ImportError(
                "PoolMetrics needs prometheus-client: pip install 'managed_exec[metrics]'", name="prometheus_client"
            ) from error
        where = REGISTRY if registry is None else registry
        made: list[Counter | Gauge | Histogram] = []

        def counter(name: str, text: str, *labels: str) -> Counter:
            made.append(found := Counter(f"managed_exec_{name}", text, labels, registry=where))
            return found

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            made.append(found := Gauge(f"managed_exec_{name}", text, labels, registry=where))
            return found

        def histogram(name: str, text: str, *labels: str) -> Histogram:
            made.append(found := Histogram(f"managed_exec_{name}", text, labels, registry=where, buckets=BUCKETS_S))
            return found

        device = ("pool", "device")
        try:
            self.submitted = counter("tasks_submitted", "Tasks that came into the queue.", "pool")
            self.done = counter("tasks_done", "Tasks that are done with, by what became of them.", *device, "outcome")
            self.retries = counter("task_retries", "Runs but the first of tasks that are done with.", "pool")
            self.waited = histogram("task_waited_seconds", "From submit to the last start.", *device)
            self.ran = histogram("task_ran_seconds", "Of the last run, with its device work.", *device)
            self.queued = gauge("tasks_queued", "Tasks that wait for a run.", "pool")
            self.running = gauge("tasks_running", "Tasks that run.", *device)
            self.moved = counter("moved_bytes", "Memory moved out of devices and back.", *device, "tier", "direction")
            tiers = gauge("tier_bytes", "What the process has in a tier now, as counted against its limit.", "tier")
            for tier in manager().tier_bytes():
                tiers.labels(tier).set_function(functools.partial(_tier_bytes, tier))
            self.migrated = counter("migrated_calls", "Calls made there for want of room on their device.", *device)
        except ValueError as error:
            for collector in made:
                where.unregister(collector)
            raise ValueError(
                "the registry has metrics of managed_exec already: make one PoolMetrics, and a hook of it for each "
                "pool, metrics.hook('name'); or give another registry"
            ) from error

    def hook(self, pool: str = "default") -> Hook:
        """Return a hook for one pool, whose metrics bear the label *pool*; those of equal labels add up."""
        if not isinstance(pool, str):
            raise TypeError(f"pool: expected the text of a label, got {pool!r}")
        return _PoolHook(self, pool).note


class _PoolHook:
    """Turns the events of one pool into metrics."""

    def __init__(self, metrics: PoolMetrics, pool: str) -> None:
        self._metrics = metrics
        self._pool = pool
        # Guards the next, and is a leaf: where tasks are, by their ids. An event may come of a task that was submitted
        # before the hook was there, which must not make a gauge fall below what there is.
        self._lock = threading.Lock()
        self._waiting: dict[int, float] = {}  # since when
        self._running: dict[int, str] = {}

    def note(self, event: Event) -> None:
        """Be told of *event*."""
        metrics, pool = self._metrics, self._pool
        if isinstance(event, TaskSubmitted):
            metrics.submitted.labels(pool).inc()
            self._enter_queue(event)
        elif isinstance(event, TaskStarted):
            self._leave(event.task_id)
            device = str(event.device)
            with self._lock:
                self._running[event.task_id] = device
            metrics.running.labels(pool, device).inc()
        elif isinstance(event, TaskRetried):
            self._leave(event.task_id)
            self._enter_queue(event)
        elif isinstance(event, TaskFinished):
            # One that was to run again, and has not, has run until it began to wait.
            waited_since_s = self._leave(event.task_id)
            self._note_done(event, event.at_s if waited_since_s is None else waited_since_s)
        elif isinstance(event, CallMigrated):
            metrics.migrated.labels(pool, str(event.device)).inc()
        else:
            metrics.moved.labels(pool, str(event.device), event.tier, event.what).inc(event.n_bytes)

    def _enter_queue(self, event: TaskSubmitted | TaskRetried) -> None:
        with self._lock:
            self._waiting[event.task_id] = event.at_s
        self._metrics.queued.labels(self._pool).inc()

    def _leave(self, task_id: int) -> float | None:
        """Count the task no longer where it has been; return since when it has waited, if it has."""
        with self._lock:
            waited_since_s = self._waiting.pop(task_id, None)
            device = self._running.pop(task_id, None)
        if waited_since_s is not None:
            self._metrics.queued.labels(self._pool).dec()
        if device is not None:
            self._metrics.running.labels(self._pool, device).dec()
        return waited_since_s

    def _note_done(self, event: TaskFinished, ended_s: float) -> None:
        metrics, pool = self._metrics, self._pool
        device = NO_DEVICE if event.device is None else str(event.device)
        metrics.done.labels(pool, device, _outcome(event.error)).inc()
        if event.retries:
            metrics.retries.labels(pool).inc(event.retries)
        if event.started_s is not None:
            metrics.waited.labels(pool, device).observe(event.started_s - event.submitted_s)
            metrics.ran.labels(pool, device).observe(ended_s - event.started_s)


def _tier_bytes(tier: str) -> int:
    """Return what there is in *tier*, when the metrics are read: of what is dropped there no event tells."""
    return manager().tier_bytes()[tier]


def _outcome(error: BaseException | None) -> str:
    if error is None:
        return "finished"
    return "cancelled" if isinstance(error, (CancelledError, TaskCancelledError)) else "failed"
