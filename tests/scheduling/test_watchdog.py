"""Tasks that do not stop: they are reported and given up, and the pool keeps its capacity."""

from __future__ import annotations

import multiprocessing
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from pathlib import Path

import pytest
import torch
from conftest import Kind, eventually

from managed_exec import GPUPoolExecutor, current_task, gpu_task
from managed_exec.errors import DeviceMemoryError, TaskCancelledError, TaskTimeoutError
from managed_exec.options import Need
from managed_exec.scheduling import watchdog
from managed_exec.scheduling.threads import WorkerThread

WAIT_S = 30
MIB = 2**20


class Stuck:
    """A task that looks at nothing, and returns when it is told to."""

    def __init__(self) -> None:
        self.started, self.open, self.ended = threading.Event(), threading.Event(), threading.Event()
        self.thread: threading.Thread | None = None

    def __call__(self, *args: object) -> str:
        self.thread = threading.current_thread()
        self.started.set()
        self.open.wait(WAIT_S)
        self.ended.set()
        return "too late"


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    task = Stuck()
    yield task
    task.open.set()
    if task.thread is not None:
        assert eventually(lambda: not task.thread.is_alive()), "a thread that was given up ends"


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "GRACE_S", 0.05)


def loads(pool: GPUPoolExecutor) -> tuple[int, int]:
    """Return the running tasks and the reserved bytes of all devices."""
    snapshots = pool._loads.snapshots()
    return sum(s.running for s in snapshots), sum(s.reserved_bytes for s in snapshots)


@gpu_task()
def abs_of(x: int) -> int:
    return abs(x)


class TestGivenUp:
    def test_future_is_done_and_another_thread_goes_on(
        self, kind: Kind, stuck: Stuck, caplog: pytest.LogCaptureFixture
    ) -> None:
        with kind.pool(max_workers=1) as pool:
            future = pool.submit(gpu_task(timeout=0.01)(stuck))
            queued = pool.submit(threading.current_thread)
            assert type(future.exception(WAIT_S)) is TaskTimeoutError
            successor = queued.result(WAIT_S)
            assert successor not in (stuck.thread, pool._watchdog._thread)
            assert pool._threads == {successor}
            assert not stuck.ended.is_set()
            assert loads(pool) == (0, 0)
        assert not stuck.ended.is_set(), "shutdown does not wait for it"
        assert "task 0 (Stuck) has not stopped within 0.05 s" in caplog.text
        assert "in __call__" in caplog.text, "its stack"
        stuck.open.set()
        assert stuck.ended.wait(WAIT_S)
        assert future.exception() is not None, "what it returned is nobody's"
        assert loads(pool) == (0, 0), "nothing is given back twice"

    def test_cancelled(self, kind: Kind, stuck: Stuck) -> None:
        with kind.pool(max_workers=1) as pool:
            future = pool.submit(stuck)
            assert stuck.started.wait(WAIT_S)
            assert future.cancel() is False
            assert type(future.exception(WAIT_S)) is TaskCancelledError
            assert not future.cancelled()
            assert pool.submit(abs, -1).result(WAIT_S) == 1

    @pytest.mark.parametrize("ends", [True, False])
    def test_tasks_that_wait_for_its_bytes_when_the_pool_is_shut_down(
        self, simulator: Kind, stuck: Stuck, ends: bool
    ) -> None:
        """They run if it ends before, and fail if it does not: none of them is left undone."""
        pool = simulator.pool(max_workers=2, devices=1)
        most = pool._loads.largest_bytes(Need(1))
        given_up = pool.submit(gpu_task(timeout=0.01, memory=most)(stuck))
        waiting = pool.submit(gpu_task(memory=most)(abs_of), -3)
        assert isinstance(given_up.exception(WAIT_S), TaskTimeoutError)
        if ends:
            stuck.open.set()
            assert waiting.result(WAIT_S) == 3
        pool.shutdown()
        if not ends:
            error = waiting.exception(0)
            assert type(error) is DeviceMemoryError
            assert "still reserved for tasks that were given up" in str(error)

    def test_bytes_stay_reserved_until_it_has_ended(self, simulator: Kind, stuck: Stuck) -> None:
        """It may still hold them; only its place is free."""
        with simulator.pool(max_workers=2, devices=1, tasks_per_device=1) as pool:
            future = pool.submit(gpu_task(timeout=0.01, memory="40MiB")(stuck))
            assert isinstance(future.exception(WAIT_S), TaskTimeoutError)
            assert loads(pool) == (0, 40 * MIB)
            assert pool.submit(abs_of.options(memory="24MiB"), -1).result(WAIT_S) == 1, "what fits beside"
            large = pool.submit(abs_of.options(memory="25MiB"), -2)
            assert pool.submit(abs, -3).result(WAIT_S) == 3, "what asks for nothing"
            assert eventually(lambda: pool._tasks._held)
            assert not large.done()
            stuck.open.set()
            assert large.result(WAIT_S) == 2, "and is looked at again when it has ended"
        assert loads(pool) == (0, 0)

    def test_shutdown_leaves_no_task_behind_such_bytes(self, simulator: Kind, stuck: Stuck) -> None:
        """What waits for them fails when the pool has nobody left to start it; what does not need them still runs."""
        with simulator.pool(max_workers=2, devices=1) as pool:
            future = pool.submit(gpu_task(timeout=0.2, memory="40MiB")(stuck))
            assert stuck.started.wait(WAIT_S)
            large = [pool.submit(abs_of.options(memory="25MiB"), -i) for i in range(3)]
            small = [pool.submit(abs_of.options(memory="24MiB"), -i) for i in range(30)]
            plain = [pool.submit(abs, -i) for i in range(30)]
        assert isinstance(future.exception(0), TaskTimeoutError)
        for held in large:
            with pytest.raises(DeviceMemoryError, match="still reserved for tasks that were given up"):
                held.result(0)
        assert [f.result(0) for f in small] == [f.result(0) for f in plain] == list(range(30))
        assert loads(pool) == (0, 40 * MIB)
        assert not pool._loads._kept_for

    def test_every_worker_at_once(self, simulator: Kind) -> None:
        tasks = [Stuck() for _ in range(4)]
        with simulator.pool(tasks_per_device=1) as pool:
            futures = [pool.submit(gpu_task(timeout=0.01)(task)) for task in tasks]
            after = [pool.submit(abs, -i) for i in range(20)]
            assert [type(future.exception(WAIT_S)) for future in futures] == [TaskTimeoutError] * 4
            assert [future.result(WAIT_S) for future in after] == list(range(20))
            assert len(pool._threads) == 4
            barrier = threading.Barrier(4)
            assert sorted(f.result(WAIT_S) for f in [pool.submit(barrier.wait, WAIT_S) for _ in range(4)]) == [
                0,
                1,
                2,
                3,
            ]
        for task in tasks:
            task.open.set()
        assert eventually(lambda: not any(task.thread.is_alive() for task in tasks))

    def test_alone_on_its_device(self, simulator: Kind, stuck: Stuck) -> None:
        """A task that runs again alone keeps the device for itself no longer."""
        runs: list[int] = []

        @gpu_task(timeout=0.2, on_oom="retry", retries=1)
        def task() -> object:
            runs.append(1)
            if len(runs) == 1:
                raise torch.OutOfMemoryError("no")
            return stuck()

        with simulator.pool(max_workers=2, devices=1) as pool:
            assert isinstance(pool.submit(task).exception(WAIT_S), TaskTimeoutError)
            assert pool.submit(abs, -1).result(WAIT_S) == 1
            assert not pool._loads._kept_for
        assert len(runs) == 2

    def test_on_the_cpu_after_out_of_memory(self, simulator: Kind, stuck: Stuck) -> None:
        @gpu_task(timeout=0.2, on_oom="cpu")
        def task() -> object:
            if current_task().device.type == "cpu":
                return stuck()
            raise torch.OutOfMemoryError("no")

        with simulator.pool(max_workers=1) as pool:
            assert isinstance(pool.submit(task).exception(WAIT_S), TaskTimeoutError)
            assert loads(pool) == (0, 0)
            assert pool.submit(abs, -1).result(WAIT_S) == 1
            stuck.open.set()
            assert eventually(lambda: not stuck.thread.is_alive())
            assert loads(pool) == (0, 0)

    def test_it_moves_no_booking_any_more(self, simulator: Kind, stuck: Stuck) -> None:
        with simulator.pool(max_workers=1, devices=2) as pool:
            future = pool.submit(stuck)
            assert stuck.started.wait(WAIT_S)
            ((worker, _, position),) = pool._watchdog.running.values()
            assert worker._move_booking(future, 1 - position)
            assert [s.running for s in pool._loads.snapshots()][1 - position] == 1
            future.cancel()
            assert isinstance(future.exception(WAIT_S), TaskCancelledError)
            assert loads(pool) == (0, 0)
            assert not worker._move_booking(future, position)
            assert loads(pool) == (0, 0)

    def test_callbacks_run_in_a_worker(self, kind: Kind, stuck: Stuck) -> None:
        """One that blocks stops neither the watchdog nor anybody's timeout."""
        gate, second = threading.Event(), Stuck()
        seen: list[threading.Thread] = []
        with kind.pool(max_workers=2) as pool:
            future = pool.submit(stuck)
            assert stuck.started.wait(WAIT_S)
            future.add_done_callback(lambda _: seen.append(threading.current_thread()) or gate.wait(WAIT_S))
            future.cancel()
            assert isinstance(future.exception(WAIT_S), TaskCancelledError)
            assert isinstance(pool.submit(gpu_task(timeout=0.01)(second)).exception(WAIT_S), TaskTimeoutError)
            assert seen[0] in pool._threads
            gate.set()
        second.open.set()
        assert eventually(lambda: not second.thread.is_alive())

    def test_after_shutdown_what_is_queued_still_runs(self, kind: Kind, stuck: Stuck) -> None:
        pool = kind.pool(max_workers=1)
        first = pool.submit(gpu_task(timeout=0.3)(stuck))
        queued = [pool.submit(abs, -i) for i in range(10)]
        assert stuck.started.wait(WAIT_S)
        pool.shutdown(wait=True)
        assert isinstance(first.exception(0), TaskTimeoutError)
        assert [future.result(0) for future in queued] == list(range(10))

    def test_of_a_pool_that_was_collected(self, kind: Kind, stuck: Stuck) -> None:
        pool = kind.pool(max_workers=1)
        first, queued = pool.submit(gpu_task(timeout=0.3)(stuck)), pool.submit(abs, -1)
        assert stuck.started.wait(WAIT_S)
        del pool
        assert isinstance(first.exception(WAIT_S), TaskTimeoutError)
        assert queued.result(WAIT_S) == 1

    def test_initializer_runs_in_the_successor_too(self, kind: Kind, stuck: Stuck) -> None:
        ran: list[str] = []
        with kind.pool(max_workers=1, initializer=lambda: ran.append("initializer")) as pool:
            assert isinstance(pool.submit(gpu_task(timeout=0.01)(stuck)).exception(WAIT_S), TaskTimeoutError)
            assert pool.submit(abs, -1).result(WAIT_S) == 1
        assert ran == ["initializer"] * 2

    def test_no_thread_to_be_had(self, kind: Kind, stuck: Stuck, monkeypatch: pytest.MonkeyPatch) -> None:
        """The future is done all the same, and the next submit tries again."""
        with kind.pool(max_workers=1) as pool:
            future = pool.submit(stuck)
            assert stuck.started.wait(WAIT_S)
            with monkeypatch.context() as patch:
                patch.setattr(watchdog, "start_thread", no_thread)
                future.cancel()
                assert isinstance(future.exception(WAIT_S), TaskCancelledError)
                assert eventually(lambda: not pool._threads)
            sampler = pool._sampler
            assert pool.submit(abs, -1).result(WAIT_S) == 1
            assert pool._sampler is sampler, "a second one would never be ended"
            assert len(pool._threads) == 1

    def test_thread_that_is_refused_at_first(self, kind: Kind, stuck: Stuck, monkeypatch: pytest.MonkeyPatch) -> None:
        """It is tried again, for tasks that wait and nobody who submits another."""
        monkeypatch.setattr(watchdog, "_TRY_AGAIN_S", 0.01)
        refused = threading.Event()

        def no_thread_noted(thread: object, wake: object) -> None:
            refused.set()
            no_thread(thread, wake)

        with kind.pool(max_workers=1) as pool:
            future = pool.submit(stuck)
            behind = pool.submit(abs, -1)
            assert stuck.started.wait(WAIT_S)
            with monkeypatch.context() as patch:
                patch.setattr(watchdog, "start_thread", no_thread_noted)
                future.cancel()
                assert isinstance(future.exception(WAIT_S), TaskCancelledError)
                refused.clear()
                assert refused.wait(WAIT_S), "it was tried again"
                assert not behind.done()
            assert behind.result(WAIT_S) == 1
            assert len(pool._threads) == 1


def no_thread(thread: object, wake: object) -> None:
    raise RuntimeError("can't start new thread")


class TestRaces:
    @pytest.mark.parametrize("tasks_per_device", [None, 1])
    def test_tasks_that_end_as_they_are_given_up(
        self, simulator: Kind, monkeypatch: pytest.MonkeyPatch, tasks_per_device: int | None
    ) -> None:
        """Each future ends once, with a value or the error, and everything is given back once."""
        monkeypatch.setattr(watchdog, "GRACE_S", 0.0)
        durations = random.Random(0)
        done: list[Future[float]] = []
        with simulator.pool(max_workers=4, devices=2, tasks_per_device=tasks_per_device) as pool:
            task = gpu_task(timeout=0.003, memory="1MiB")(lambda s: time.sleep(s) or s)
            futures = [pool.submit(task, durations.uniform(0.001, 0.006)) for _ in range(150)]
            for future in futures:
                future.add_done_callback(done.append)
            assert not wait(futures, WAIT_S).not_done
            for future in futures:
                error = future.exception()
                assert error is None or type(error) is TaskTimeoutError
            assert eventually(lambda: loads(pool) == (0, 0)), loads(pool)
            assert not pool._watchdog.running
            assert pool.submit(abs, -1).result(WAIT_S) == 1
        assert len(done) == len(set(done)) == 150

    def test_cancelling_from_many_threads(self, kind: Kind) -> None:
        stuck = [Stuck() for _ in range(4)]
        with kind.pool(max_workers=4) as pool:
            futures = [pool.submit(task) for task in stuck]
            assert all(task.started.wait(WAIT_S) for task in stuck)
            barrier = threading.Barrier(8)

            def cancel_all() -> None:
                barrier.wait(WAIT_S)
                for future in futures:
                    future.cancel()

            threads = [threading.Thread(target=cancel_all) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert [type(future.exception(WAIT_S)) for future in futures] == [TaskCancelledError] * 4
            assert len(pool._threads) == 4
        for task in stuck:
            task.open.set()
        assert eventually(lambda: not any(task.thread.is_alive() for task in stuck))


EXITS = {
    "given up before": "print(type(pool.submit(stuck).exception()).__name__)",
    "given up while it exits": "pool.submit(stuck)",
    "with tasks behind it": "pool.submit(stuck); pool.submit(print, 'TaskTimeoutError')",
    "given up before, pool shut down": "print(type(pool.submit(stuck).exception()).__name__); pool.shutdown()",
}


@pytest.mark.parametrize("end", EXITS)
def test_exit_of_the_interpreter_waits_for_no_task_that_was_given_up(end: str, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "import logging, threading\n"
        "from managed_exec import GPUPoolExecutor, gpu_task\n"
        "from managed_exec.scheduling import watchdog\n"
        "watchdog.GRACE_S = 0.05\n"
        "logging.disable()\n"
        "pool = GPUPoolExecutor(1, devices='cpu')\n"
        "stuck = gpu_task(timeout=0.2)(lambda: threading.Event().wait(1000))\n"
        f"{EXITS[end]}\n"
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(
        [sys.executable, script], check=False, capture_output=True, text=True, timeout=60, env=environment
    )
    assert (run.returncode, run.stderr) == (0, "")
    # From 3.12 on no thread can be started any more while the interpreter exits, so nobody runs what is behind it.
    silent = ["given up while it exits", *(["with tasks behind it"] if sys.version_info >= (3, 12) else [])]
    assert run.stdout == ("" if end in silent else "TaskTimeoutError\n")


def test_threads_that_tasks_start_are_as_in_the_standard_pool(kind: Kind) -> None:
    def task() -> tuple[bool, bool]:
        return threading.current_thread().daemon, threading.Thread().daemon

    with kind.pool(max_workers=1) as pool:
        assert pool.submit(task).result(WAIT_S) == (False, False)


def test_shutdown_in_a_task_is_an_error_as_in_the_standard_pool(kind: Kind) -> None:
    pool = kind.pool(max_workers=1)
    assert isinstance(pool.submit(pool.shutdown).exception(WAIT_S), RuntimeError)
    pool.shutdown()


def test_forked_child_does_not_wait_for_the_threads_of_its_parent() -> None:
    """They are not there, and so never over. As at the exit of a child that a task, or a process pool, has forked."""
    go = threading.Event()
    thread = WorkerThread(go.wait, "worker")
    thread.start()
    child = multiprocessing.get_context("fork").Process(target=thread.join)
    child.start()
    child.join(WAIT_S)
    assert child.exitcode == 0
    go.set()
    thread.join(WAIT_S)
    assert not thread.is_alive()
