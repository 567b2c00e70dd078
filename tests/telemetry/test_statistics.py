"""``pool.statistics()``: what it counts is what there is, whatever becomes of the tasks."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, wait
from concurrent.futures.thread import BrokenThreadPool
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
import torch
from conftest import Kind, eventually
from processes import nothing_left_by_processes, wait_for

from managed_exec import GPUPoolExecutor, MemoryPolicy, current_task, gpu_task, sim
from managed_exec.errors import TaskCancelledError, TaskTimeoutError
from managed_exec.events import Event, TaskFinished, TaskSubmitted
from managed_exec.scheduling import watchdog
from managed_exec.telemetry.statistics import PoolStatistics, TaskStatistics

WAIT_S = 60
MIB = 2**20


def ones(n_bytes: int) -> torch.Tensor:
    return torch.ones(n_bytes // 4, device="cuda")


def counted(tasks: TaskStatistics) -> tuple[int, int, int, int, int]:
    """Return the stages of a task's life, once it was seen that each task is in one of them."""
    stages = tasks.queued, tasks.running, tasks.finished, tasks.failed, tasks.cancelled
    assert sum(stages) == tasks.submitted
    assert min(stages) >= 0
    return stages


class Gate:
    """A task that runs until it is let go."""

    def __init__(self, n_tasks: int = 1) -> None:
        self._open = threading.Event()
        self._started = threading.Semaphore(0)
        self._n_tasks = n_tasks

    def __call__(self) -> None:
        self._started.release()
        assert self._open.wait(WAIT_S)

    def wait_started(self) -> None:
        for _ in range(self._n_tasks):
            assert self._started.acquire(timeout=WAIT_S)

    def open(self) -> None:
        self._open.set()


def until_told() -> None:
    while True:
        current_task().checkpoint()


class TestTasks:
    def test_nothing_yet(self, kind: Kind) -> None:
        with kind.pool(max_workers=3) as pool:
            seen = pool.statistics()
            assert counted(seen.tasks) == (0, 0, 0, 0, 0)
            assert (seen.workers, seen.max_workers) == (0, 3)
            with pytest.raises(FrozenInstanceError):
                seen.workers = 1  # type: ignore[misc]
            with pytest.raises(FrozenInstanceError):
                seen.tasks.failed = 1  # type: ignore[misc]

    def test_while_tasks_run_and_after(self, kind: Kind) -> None:
        gate = Gate(2)
        with kind.pool(max_workers=2) as pool:
            futures = [pool.submit(gate) for _ in range(5)]
            gate.wait_started()
            seen = pool.statistics()
            assert counted(seen.tasks) == (3, 2, 0, 0, 0)
            assert sum(device.running for device in seen.devices) == 2
            assert seen.workers == 2
            failed = pool.submit(int, "x")
            assert futures[4].cancel()
            assert counted(pool.statistics().tasks) == (4, 2, 0, 0, 0), "a worker has still to come to it"
            gate.open()
            wait([*futures[:4], failed], WAIT_S)
        after = pool.statistics()
        assert counted(after.tasks) == (0, 0, 4, 1, 1)
        assert after.tasks.ended == after.tasks.submitted == 6
        assert after.workers == 0
        assert after.tasks.ran_s > 0 < after.tasks.waited_s
        receipts = [future.receipt() for future in [*futures[:4], failed]]
        assert after.tasks.ran_s == pytest.approx(sum(receipt.ran_s for receipt in receipts))
        assert after.tasks.waited_s == pytest.approx(sum(receipt.waited_s for receipt in receipts))

    def test_told_to_stop(self, kind: Kind) -> None:
        started = threading.Event()

        def task() -> None:
            started.set()
            until_told()

        with kind.pool(max_workers=1) as pool:
            future = pool.submit(task)
            assert started.wait(WAIT_S)
            assert not future.cancel()
            assert isinstance(future.exception(WAIT_S), TaskCancelledError)
            late = pool.submit(gpu_task(timeout=0.01)(until_told))
            assert isinstance(late.exception(WAIT_S), TaskTimeoutError)
        assert counted(pool.statistics().tasks) == (0, 0, 0, 1, 1)

    def test_given_up(self, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
        """A task counts once, although its thread goes on, and another finishes it."""
        monkeypatch.setattr(watchdog, "GRACE_S", 0.02)
        gate = Gate()
        with kind.pool(max_workers=1) as pool:
            future = pool.submit(gpu_task(timeout=0.02)(gate))
            assert isinstance(future.exception(WAIT_S), TaskTimeoutError)
            assert counted(pool.statistics().tasks) == (0, 0, 0, 1, 0)
            assert pool.submit(abs, -1).result(WAIT_S) == 1
            gate.open()
        assert counted(pool.statistics().tasks) == (0, 0, 1, 1, 0)

    def test_retries(self, simulator: Kind) -> None:
        sim.enable(devices=1, memory="2MiB")
        with GPUPoolExecutor(1) as pool:
            future = pool.submit(gpu_task(on_oom="retry", retries=2)(lambda: ones(4 * MIB)))
            assert isinstance(future.exception(WAIT_S), torch.OutOfMemoryError)
            on_cpu = pool.submit(gpu_task(on_oom="cpu")(lambda: ones(4 * MIB)))
            assert on_cpu.result(WAIT_S).device.type == "cpu"
        tasks = pool.statistics().tasks
        assert counted(tasks) == (0, 0, 1, 1, 0)
        assert tasks.retries == 2 + 1

    def test_not_placed(self, simulator: Kind) -> None:
        with simulator.pool(max_workers=1, devices=2, placement=lambda devices, request: 7) as pool:
            assert pool.submit(abs, 1).exception(WAIT_S) is not None
        assert counted(pool.statistics().tasks) == (0, 0, 0, 1, 0)

    @pytest.mark.parametrize("priority", [0, 2])
    def test_cancelled_by_shutdown(self, kind: Kind, priority: int) -> None:
        gate, seen = Gate(), list[Event]()
        with kind.pool(max_workers=1, hooks=[seen.append]) as pool:
            running = pool.submit(gate)
            gate.wait_started()
            waiting = [pool.submit(gpu_task(priority=priority)(lambda: None)) for _ in range(3)]
            assert waiting[0].cancel()
            pool.shutdown(wait=False, cancel_futures=True)
            assert counted(pool.statistics().tasks) == (0, 1, 0, 0, 3)
            with pytest.raises(RuntimeError, match="after shutdown"):
                pool.submit(abs, 1)
            gate.open()
            running.result(WAIT_S)
        assert all(future.cancelled() for future in waiting)
        assert counted(pool.statistics().tasks) == (0, 0, 1, 0, 3)
        submitted = [event.task_id for event in seen if isinstance(event, TaskSubmitted)]
        ended = {event.task_id: event.error for event in seen if isinstance(event, TaskFinished)}
        assert sorted(ended) == submitted == [0, 1, 2, 3]
        assert [type(ended[i]) for i in (1, 2, 3)] == [CancelledError] * 3

    def test_of_a_broken_pool(self, kind: Kind) -> None:
        entered, go, seen = threading.Event(), threading.Event(), list[Event]()

        def initializer() -> None:
            entered.set()
            assert go.wait(WAIT_S)
            raise ValueError("mine")

        pool = kind.pool(max_workers=1, initializer=initializer, hooks=[seen.append])
        futures = [pool.submit(abs, i) for i in range(4)]
        assert entered.wait(WAIT_S)
        assert futures[1].cancel()
        go.set()
        assert isinstance(futures[3].exception(WAIT_S), BrokenThreadPool)
        with pytest.raises(BrokenThreadPool):
            pool.submit(abs, 1)
        pool.shutdown()
        assert counted(pool.statistics().tasks) == (0, 0, 0, 3, 1)
        assert sorted(event.task_id for event in seen if isinstance(event, TaskFinished)) == [0, 1, 2, 3]
        assert all(future.receipt().reason == "it has not run" for future in futures)

    def test_at_any_moment(self, kind: Kind) -> None:
        """Every snapshot of a busy pool adds up, whoever submits, cancels and fails meanwhile."""
        rng = random.Random(5)
        barrier = threading.Barrier(3)
        seen: list[TaskStatistics] = []

        def submit(pool: GPUPoolExecutor) -> None:
            barrier.wait(WAIT_S)
            for i in range(300):
                future = pool.submit(int, rng.choice(["1", "x"]))
                if i % 3 == 0:
                    future.cancel()

        with kind.pool(max_workers=3) as pool:
            threads = [threading.Thread(target=submit, args=(pool,)) for _ in range(2)]
            for thread in threads:
                thread.start()
            barrier.wait(WAIT_S)
            while any(thread.is_alive() for thread in threads):
                seen.append(pool.statistics().tasks)
            for thread in threads:
                thread.join()
        for tasks in [*seen, pool.statistics().tasks]:
            counted(tasks)
        assert [tasks.ended for tasks in seen] == sorted(tasks.ended for tasks in seen)
        assert pool.statistics().tasks.ended == 600


class TestDevices:
    def test_memory(self, simulator: Kind) -> None:
        sim.enable(devices=2, memory="8MiB")
        policy = MemoryPolicy(min_bytes=1024, limit="4MiB", spill=("host",))
        with GPUPoolExecutor(2, memory=policy) as pool:
            spilled_before = pool.statistics().memory.spilled_bytes.get("host", 0)
            kept = pool.submit(gpu_task(device=0)(lambda: ones(MIB))).result(WAIT_S)
            away = pool.submit(gpu_task(device=0)(lambda: ones(2 * MIB))).result(WAIT_S)
            kept.pin()
            away.spill("host")
            gate = Gate()
            booked = pool.submit(gpu_task(device=1, memory="3MiB")(gate))
            gate.wait_started()
            seen = pool.statistics()
            gate.open()
            booked.result(WAIT_S)
            kept.unpin()
        first, second = seen.devices
        assert (str(first.device), first.managed_bytes, first.pinned_bytes) == ("sim:0", MIB, MIB)
        assert first.spilled_bytes == {"host": 2 * MIB}
        assert (first.limit_bytes, first.free_bytes, first.allocated_bytes) == (4 * MIB, 3 * MIB, MIB)
        assert first.used_bytes == MIB
        assert (second.running, second.reserved_bytes, second.expected_bytes) == (1, 3 * MIB, 3 * MIB)
        assert (second.managed_bytes, second.pinned_bytes, second.spilled_bytes) == (0, 0, {})
        assert seen.memory.spilled_bytes["host"] == spilled_before + 2 * MIB
        text = str(seen)
        for part in (
            "tasks: 3 submitted, 0 queued, 1 running, 2 finished, 0 failed, 0 cancelled; 0 retries",
            " of 2",
            "sim:0: 0 running, memory 1.0 MiB of 4.0 MiB, managed 1.0 MiB, pinned 1.0 MiB, spilled to host 2.0 MiB",
            "sim:1: 1 running, memory 0 B of 4.0 MiB, reserved 3.0 MiB",
            "kernels run again for want of room: 0",
        ):
            assert part in text

    def test_nothing_managed(self, kind: Kind) -> None:
        with kind.pool(max_workers=1, memory=False) as pool:
            seen = pool.statistics()
        assert seen.memory is None
        assert all(device.limit_bytes > 0 <= device.free_bytes for device in seen.devices)
        assert {(device.managed_bytes, device.out_of_service) for device in seen.devices} == {(0, None)}

    def test_out_of_service(self, simulator: Kind) -> None:
        with simulator.pool(max_workers=1, devices=2) as pool:

            @gpu_task(device=1)
            def breaks() -> None:
                sim.faults.break_device(1)
                torch.ones(3, device="cuda").sum().item()

            assert pool.submit(breaks).exception(WAIT_S) is not None
            first, second = pool.statistics().devices
        assert first.out_of_service is None
        assert second.out_of_service.startswith("sim:1 since ")
        assert "OUT OF SERVICE: sim:1 since " in str(pool.statistics())

    def test_a_device_that_cannot_be_read(self, simulator: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
        with simulator.pool(max_workers=1, devices=1, memory=False) as pool:

            def memory() -> None:
                raise RuntimeError("lost")

            monkeypatch.setattr(pool._devices[0], "memory", memory)
            (device,) = pool.statistics().devices
        assert (device.limit_bytes, device.free_bytes, device.allocated_bytes, device.used_bytes) == (None,) * 4
        assert device.memory_text == "-"

    def test_one_that_costs_memory_to_ask_is_asked_once_it_was_used(
        self, simulator: Kind, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with simulator.pool(max_workers=1, devices=2, memory=MemoryPolicy()) as pool:
            monkeypatch.setattr(type(pool._devices[0]), "read_leaves_no_trace", False)
            assert [device.limit_bytes for device in pool.statistics().devices] == [None, None]
            pool.submit(gpu_task(device=1)(lambda: None)).result(WAIT_S)
            first, second = pool.statistics().devices
        assert first.limit_bytes is None
        assert second.limit_bytes == 64 * MIB


@pytest.mark.timeout(300)
def test_in_processes(simulator: Kind, tmp_path: Path) -> None:
    go = tmp_path / "go"
    with nothing_left_by_processes():
        with simulator.pool(max_workers=1, devices=1, workers="processes", memory=MemoryPolicy()) as pool:
            future = pool.submit(wait_for, go)
            assert eventually(lambda: pool.statistics().tasks.running == 1)
            waiting = pool.submit(abs, -3)
            seen = pool.statistics()
            go.touch()
            assert future.result(WAIT_S)
            assert waiting.result(WAIT_S) == 3
            assert pool.submit(int, "x").exception(WAIT_S) is not None
        assert counted(seen.tasks) == (1, 1, 0, 0, 0)
        (device,) = seen.devices
        assert (device.running, device.limit_bytes, device.allocated_bytes) == (1, 64 * MIB, None)
        assert seen.memory is None
        assert counted(pool.statistics().tasks) == (0, 0, 2, 1, 0)


def test_it_is_made_of_what_can_be_compared(kind: Kind) -> None:
    taken: list[Callable[[], PoolStatistics]] = []
    with kind.pool(max_workers=1) as pool:
        taken.append(pool.statistics)
        assert taken[0]().tasks == taken[0]().tasks


@pytest.mark.parametrize("in_time", [True, False])
def test_refused_while_it_was_told_of(kind: Kind, in_time: bool) -> None:
    """The pool is shut down between the event and the queue: whoever was told of the task is told of its end."""
    seen: list[Event] = []

    def hook(event: Event) -> None:
        seen.append(event)
        if isinstance(event, TaskSubmitted) and in_time:
            pool.shutdown(wait=False)

    pool = kind.pool(max_workers=1, hooks=[hook])
    if not in_time:
        pool.shutdown()
    with pytest.raises(RuntimeError, match="after shutdown"):
        pool.submit(abs, 1)
    pool.shutdown()
    assert [type(event) for event in seen] == ([TaskSubmitted, TaskFinished] if in_time else [])
    assert pool.statistics().tasks.submitted == 0
