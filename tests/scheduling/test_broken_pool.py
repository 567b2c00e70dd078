"""Initializers that fail at a bad moment: every future is done, and the pool ends."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError, wait
from concurrent.futures.thread import BrokenThreadPool

import pytest
from conftest import Kind, eventually
from processes import nothing_left_by_processes

from managed_exec import GPUPoolExecutor, gpu_task
from managed_exec.errors import TaskTimeoutError
from managed_exec.scheduling import watchdog

WAIT_S = 30


def fail() -> None:
    raise ValueError("no")


def test_a_cancelled_future_does_not_keep_the_others(kind: Kind) -> None:
    gate = threading.Event()

    def initialize() -> None:
        gate.wait(WAIT_S)
        fail()

    pool = kind.pool(max_workers=1, initializer=initialize)
    futures = [pool.submit(abs, i) for i in range(4)]
    assert futures[1].cancel()
    gate.set()
    assert not wait(futures, WAIT_S).not_done, "also those who wait for the cancelled one are told"
    with pytest.raises(CancelledError):
        futures.pop(1).result()
    for future in futures:
        assert isinstance(future.exception(), BrokenThreadPool)
    pool.shutdown()


def test_a_callback_may_use_the_pool(kind: Kind) -> None:
    """No lock is held while it runs."""
    gate, told = threading.Event(), threading.Event()

    def initialize() -> None:
        gate.wait(WAIT_S)
        fail()

    def submit_again(_: object) -> None:
        try:
            pool.submit(abs, 1)
        except BrokenThreadPool:
            told.set()

    pool = kind.pool(max_workers=1, initializer=initialize)
    pool.submit(abs, 1).add_done_callback(submit_again)
    gate.set()
    assert told.wait(WAIT_S)
    pool.shutdown()


def test_of_a_worker_that_takes_another_s_place_after_shutdown(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """The word for the other workers to end is not lost with what was queued."""
    monkeypatch.setattr(watchdog, "GRACE_S", 0.05)
    calls: list[int] = []
    stuck, busy, both = threading.Event(), threading.Event(), threading.Barrier(3)

    def initialize() -> None:
        calls.append(1)
        if len(calls) > 2:
            fail()

    def wait_for(gate: threading.Event) -> bool:
        both.wait(WAIT_S)
        return gate.wait(WAIT_S)

    pool = kind.pool(max_workers=2, initializer=initialize)
    hung, other = pool.submit(wait_for, stuck), pool.submit(wait_for, busy)
    both.wait(WAIT_S)
    pool.shutdown(wait=False)
    hung.cancel()
    assert eventually(lambda: len(calls) == 3 and pool._broken and pool._tasks.qsize())
    busy.set()
    assert other.result(WAIT_S)
    ending = threading.Thread(target=pool.shutdown)
    ending.start()
    ending.join(WAIT_S)
    ended = not ending.is_alive()
    stuck.set()
    pool._tasks.put(None)
    ending.join()
    assert ended


def test_in_a_process_after_shutdown() -> None:
    with nothing_left_by_processes():
        with GPUPoolExecutor(1, workers="processes", devices="cpu", initializer=fail) as pool:
            future = pool.submit(abs, 1)
        assert isinstance(future.exception(0), BrokenThreadPool)


def test_given_up_in_spite_of_the_report(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log handler that raises loses no task and no worker."""

    def raising(text: str) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(watchdog, "GRACE_S", 0.05)
    monkeypatch.setattr(watchdog._log, "warning", raising)
    gate = threading.Event()
    with kind.pool(max_workers=1) as pool:
        future = pool.submit(gpu_task(timeout=0.01)(lambda: gate.wait(WAIT_S)))
        assert isinstance(future.exception(WAIT_S), TaskTimeoutError)
        assert pool.submit(abs, -1).result(WAIT_S) == 1
        gate.set()
