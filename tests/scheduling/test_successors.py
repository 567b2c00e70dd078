"""Workers in the places of those that were given up, where the system has no threads for a while."""

from __future__ import annotations

import threading

import pytest
from conftest import Kind, eventually

from managed_exec import gpu_task
from managed_exec.errors import TaskTimeoutError
from managed_exec.scheduling import watchdog

WAIT_S = 30


def test_each_gap_is_filled(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two are given up, and the thread of the first successor is refused: that of the second fills its own gap only."""
    monkeypatch.setattr(watchdog, "GRACE_S", 0.05)
    monkeypatch.setattr(watchdog, "_TRY_AGAIN_S", 0.01)
    start, refused, let_in = watchdog.start_thread, threading.Event(), threading.Event()
    release, together = threading.Event(), threading.Barrier(2)
    stuck_threads: list[threading.Thread] = []

    def start_some(thread: threading.Thread, wake: object) -> None:
        if thread.name.endswith("_0+") and not let_in.is_set():
            refused.set()
            raise RuntimeError("can't start new thread")
        start(thread, wake)  # type: ignore[arg-type]

    def stuck() -> None:
        stuck_threads.append(threading.current_thread())
        release.wait(WAIT_S)

    monkeypatch.setattr(watchdog, "start_thread", start_some)
    with kind.pool(max_workers=2) as pool:
        given_up = [pool.submit(gpu_task(timeout=0.2)(stuck)) for _ in range(2)]
        meeting = [pool.submit(together.wait, WAIT_S) for _ in range(2)]
        assert [type(future.exception(WAIT_S)) for future in given_up] == [TaskTimeoutError] * 2
        assert refused.wait(WAIT_S)
        let_in.set()
        assert sorted(future.result(WAIT_S) for future in meeting) == [0, 1]
        assert len(pool._threads) == 2
    release.set()
    assert eventually(lambda: not any(thread.is_alive() for thread in stuck_threads))


def test_shutdown_in_a_task_ends_what_serves_the_pool(simulator: Kind) -> None:
    """It raises, as the standard pool's does, for a thread cannot wait for itself; the rest is done all the same."""
    pool = simulator.pool(max_workers=2)
    error = pool.submit(pool.shutdown).exception(WAIT_S)
    assert isinstance(error, RuntimeError)
    sampler = pool._sampler
    assert sampler is not None
    assert eventually(lambda: not sampler.thread.is_alive())
    assert eventually(lambda: not any(thread.is_alive() for thread in pool._threads))
