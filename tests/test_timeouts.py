"""Timeouts, and ``cancel()`` of tasks that run: how a task is told to stop, and where it does."""

from __future__ import annotations

import asyncio
import concurrent.futures
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import Future

import pytest
import torch
from conftest import Kind, allocated_bytes, eventually

from managed_exec import current_task, gpu_task
from managed_exec.errors import TaskCancelledError, TaskTimeoutError
from managed_exec.memory.manager import MemoryManager
from managed_exec.scheduling import watchdog
from managed_exec.tensors.managed import ManagedTensor

WAIT_S = 30
NUMEL = 2**15  # 128 KiB, which is managed


class Loop:
    """A task that does one thing again and again, until that stops it."""

    def __init__(self, step: Callable[[], object]) -> None:
        self.step = step
        self.started = threading.Event()
        self.errors: list[BaseException] = []

    def __call__(self) -> None:
        try:
            while True:
                self.step()
                self.started.set()
        except BaseException as error:
            self.errors.append(error)
            raise


def look() -> None:
    current_task().checkpoint()


def add_managed() -> None:
    x = torch.ones(NUMEL, device="cuda")
    assert isinstance(x, ManagedTensor)
    x + 1


def add_small() -> None:
    torch.ones(3, device="cuda").add_(1)


def train() -> None:
    x = torch.ones(NUMEL, device="cuda", requires_grad=True)
    (x * 2).sum().backward()


STEPS = [look, add_managed, add_small, train]
by_step = pytest.mark.parametrize("step", STEPS)


class TestTimeout:
    @by_step
    def test_stops_the_task_where_it_looks(self, simulator: Kind, step: Callable[[], object]) -> None:
        loop = Loop(step)
        with simulator.pool(max_workers=1) as pool:
            future = pool.submit(gpu_task(timeout=0.05)(loop))
            error = future.exception(WAIT_S)
            assert type(error) is TaskTimeoutError
            assert isinstance(error, TimeoutError)
            assert loop.errors == [error], "the very error that was raised in the task"
            assert "task 0 (Loop) has not ended within its timeout of 0.05 s" in str(error)
            assert pool.submit(abs, -1).result(WAIT_S) == 1
            loop.errors.clear()
            del error, future

    def test_counts_from_the_start(self, kind: Kind) -> None:
        gate = threading.Event()
        with kind.pool(max_workers=1) as pool:
            blocker = pool.submit(gate.wait, WAIT_S)
            future = pool.submit(gpu_task(timeout=20)(lambda: current_task().cancelled))
            assert not pool._watchdog.clocks, "not while it is queued"
            gate.set()
            assert blocker.result(WAIT_S)
            assert future.result(WAIT_S) is False

    def test_each_its_own(self, kind: Kind) -> None:
        """A later timeout that is set first does not let the others wait for it."""
        slow, fast = Loop(look), Loop(look)
        with kind.pool(max_workers=2) as pool:
            first = pool.submit(gpu_task(timeout=3600)(slow))
            assert slow.started.wait(WAIT_S)
            assert eventually(lambda: pool._watchdog._sleeps_until > 0)
            second = pool.submit(gpu_task(timeout=0.01)(fast))
            assert isinstance(second.exception(WAIT_S), TaskTimeoutError)
            assert not first.done()
            first.cancel()
            assert isinstance(first.exception(WAIT_S), TaskCancelledError)

    def test_nothing_is_kept_of_tasks_that_end_in_time(self, kind: Kind) -> None:
        with kind.pool(max_workers=3) as pool:
            futures = [pool.submit(abs_of.options(timeout=3600), i) for i in range(100)]
            assert [future.result(WAIT_S) for future in futures] == list(range(100))
            assert not pool._watchdog.clocks
            assert not pool._watchdog.running

    def test_value_of_a_task_that_returns_all_the_same(self, kind: Kind) -> None:
        def task() -> str:
            assert eventually(lambda: current_task().cancelled)
            return "done"

        with kind.pool(max_workers=1) as pool:
            assert pool.submit(gpu_task(timeout=0.01)(task)).result(WAIT_S) == "done"

    def test_error_of_another_kind_is_the_task_s_own(self, kind: Kind) -> None:
        def task() -> None:
            try:
                Loop(look)()
            except TimeoutError as error:
                raise ValueError("too slow") from error

        with kind.pool(max_workers=1) as pool:
            error = pool.submit(gpu_task(timeout=0.01)(task)).exception(WAIT_S)
        assert isinstance(error, ValueError)
        assert isinstance(error.__cause__, TaskTimeoutError)

    def test_there_is_no_thread_without_need(self, kind: Kind) -> None:
        with kind.pool(max_workers=2) as pool:
            assert pool.submit(abs, -1).result(WAIT_S) == 1
            assert pool.submit(abs_of.options(priority=1), 1).result(WAIT_S) == 1
            assert pool._watchdog._thread is None
            assert pool.submit(abs_of.options(timeout=9), 1).result(WAIT_S) == 1
            thread = pool._watchdog._thread
            assert thread is not None
            assert thread.is_alive()
        assert not thread.is_alive()


@gpu_task()
def abs_of(x: int) -> int:
    return abs(x)


class TestCancel:
    @by_step
    def test_of_a_running_task(self, simulator: Kind, step: Callable[[], object]) -> None:
        loop = Loop(step)
        with simulator.pool(max_workers=1) as pool:
            future = pool.submit(loop)
            assert loop.started.wait(WAIT_S)
            assert future.cancel() is False, "as the standard says"
            error = future.exception(WAIT_S)
            assert type(error) is TaskCancelledError
            assert isinstance(error, concurrent.futures.CancelledError)
            assert not future.cancelled(), "it has run in part"
            assert loop.errors == [error]
            loop.errors.clear()
            del error, future

    def test_of_tasks_that_have_not_started_or_have_ended(self, kind: Kind) -> None:
        gate = threading.Event()
        with kind.pool(max_workers=1) as pool:
            running, queued = pool.submit(gate.wait, WAIT_S), pool.submit(abs, -1)
            assert queued.cancel()
            assert queued.cancel(), "again"
            gate.set()
            assert running.result(WAIT_S)
            assert not running.cancel()
            assert running.result(), "has kept its value"
            assert pool._watchdog._thread is None

    def test_first_reason_counts(self, kind: Kind) -> None:
        stop_now, stopped = threading.Event(), threading.Event()

        def task() -> None:
            stopped.set()
            assert stop_now.wait(WAIT_S)
            assert eventually(lambda: current_task().cancelled)
            look()

        with kind.pool(max_workers=1) as pool:
            future = pool.submit(gpu_task(timeout=0.01)(task))
            assert eventually(lambda: future.stop is not None)
            future.cancel()
            stop_now.set()
            assert isinstance(future.exception(WAIT_S), TaskTimeoutError)

    def test_in_a_backward_pass(self, simulator: Kind) -> None:
        """It stops between two kernels, and the error is not one of autograd's making."""
        reached: list[str] = []
        futures: list[Future[None]] = []
        submitted = threading.Event()

        def task() -> None:
            assert submitted.wait(WAIT_S)
            x = torch.ones(NUMEL, device="cuda", requires_grad=True)
            y = x * 2
            y.register_hook(lambda grad: reached.append("first"))
            z = y * 3
            z.register_hook(lambda grad: futures[0].cancel() or None)
            z.sum().backward()
            reached.append("end")

        with simulator.pool(max_workers=1) as pool:
            futures.append(pool.submit(task))
            submitted.set()
            assert type(futures[0].exception(WAIT_S)) is TaskCancelledError
            assert allocated_bytes() == 0, "neither the error nor the pass that was broken off keeps tensors"
        assert reached == []

    @pytest.mark.parametrize("how", ["error", "cancelled", "checkpoint"])
    def test_a_task_that_knows_can_save_what_it_has(self, simulator: Kind, how: str) -> None:
        def task() -> tuple[torch.Tensor, float, bool]:
            x = torch.ones(NUMEL, device="cuda")
            started.set()
            cancel_me.wait(WAIT_S)
            with torch.no_grad():
                if how == "cancelled":
                    assert current_task().cancelled
                else:
                    with pytest.raises(TaskCancelledError):
                        x.add_(1) if how == "error" else current_task().checkpoint()
                x.add_(2)
            with pytest.raises(TaskCancelledError):
                current_task().checkpoint()
            return x.cpu(), x.sum().item(), torch.is_grad_enabled()

        started, cancel_me = threading.Event(), threading.Event()
        with simulator.pool(max_workers=1) as pool:
            future = pool.submit(task)
            assert started.wait(WAIT_S)
            future.cancel()
            cancel_me.set()
            saved, total, grad_enabled = future.result(WAIT_S)
        assert bool((saved == 3).all())
        assert (total, grad_enabled) == (3 * NUMEL, True)

    def test_by_asyncio(self, kind: Kind) -> None:
        """What is cancelled or timed out there stops here."""
        loop = Loop(look)

        async def main() -> None:
            running = asyncio.get_running_loop().run_in_executor(pool, loop)
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(running, 0.05)

        with kind.pool(max_workers=1) as pool:
            asyncio.run(main())
        assert isinstance(loop.errors[0], TaskCancelledError)

    def test_out_of_memory_then_is_not_retried(self, simulator: Kind) -> None:
        runs: list[int] = []

        @gpu_task(on_oom="retry", retries=5)
        def task() -> None:
            runs.append(1)
            assert eventually(lambda: current_task().cancelled)
            raise torch.OutOfMemoryError("no")

        with simulator.pool(max_workers=1) as pool:
            future = pool.submit(task)
            assert eventually(lambda: runs)
            future.cancel()
            assert isinstance(future.exception(WAIT_S), torch.OutOfMemoryError)
        assert runs == [1]

    def test_between_two_runs(self, simulator: Kind) -> None:
        """A task that waits for its second run does not start it."""
        runs: list[int] = []
        gate, started = threading.Event(), threading.Event()

        @gpu_task(on_oom="retry", retries=1)
        def task() -> None:
            runs.append(1)
            raise torch.OutOfMemoryError("no")

        with simulator.pool(max_workers=2, devices=1) as pool:
            blocker = pool.submit(lambda: started.set() or gate.wait(WAIT_S))
            assert started.wait(WAIT_S)
            future = pool.submit(task)
            assert eventually(lambda: pool._tasks._held)
            assert not future.cancel()
            assert isinstance(future.exception(WAIT_S), TaskCancelledError), "though its device is not free yet"
            assert pool.submit(abs, -1).result(WAIT_S) == 1, "which is kept for it no longer"
            gate.set()
            assert blocker.result(WAIT_S)
        assert runs == [1]


class TestWaitsForMemory:
    """One device of 2 MiB. Whoever waits for what another task has stops waiting, long before ``wait_s``."""

    @pytest.fixture
    def keeper(self, small_device: MemoryManager, monkeypatch: pytest.MonkeyPatch) -> MemoryManager:
        monkeypatch.setattr(watchdog, "GRACE_S", 1000)
        return small_device

    def test_for_memory_and_for_the_turn(self, keeper: MemoryManager) -> None:
        policy = sim_policy(keeper)
        gate, held = threading.Event(), threading.Event()

        def hold() -> int:
            x = torch.ones(300_000, device="cuda")  # of the 524,288 that fit
            x.data_ptr()  # it cannot move any more
            held.set()
            gate.wait(WAIT_S)
            return x.numel()

        def want() -> int:
            return torch.ones(400_000, device="cuda").numel()

        with Kind("sim").pool(max_workers=3, memory=policy) as pool:
            holder = pool.submit(hold)
            assert held.wait(WAIT_S)
            futures = [pool.submit(want) for _ in range(2)]
            turns = keeper.relief._turns_of(torch.device("sim:0"))
            assert eventually(lambda: turns._holder is not None and turns._waiting), (
                "one has the turn, one waits for it"
            )
            for future in futures[::-1]:
                future.cancel()
            assert [type(future.exception(WAIT_S)) for future in futures] == [TaskCancelledError] * 2
            assert turns._holder is None
            assert not turns._waiting
            gate.set()
            assert holder.result(WAIT_S) == 300_000
            assert pool.submit(want).result(WAIT_S) == 400_000


def sim_policy(keeper: MemoryManager) -> object:
    """Return the policy of *keeper* with a wait that no test lives to see the end of."""
    from dataclasses import replace

    return replace(keeper.policy, wait_s=1000)


class TestCurrentTask:
    def test_says_whether_to_stop(self, kind: Kind) -> None:
        def task() -> list[bool]:
            current = current_task()
            seen = [current.cancelled]
            current.checkpoint()
            cancel_me.wait(WAIT_S)
            return [*seen, current.cancelled, current_task().cancelled]

        cancel_me = threading.Event()
        with kind.pool(max_workers=1) as pool:
            future = pool.submit(task)
            assert eventually(future.running)
            future.cancel()
            cancel_me.set()
            assert future.result(WAIT_S) == [False, True, True]
            assert pool.submit(lambda: current_task().cancelled).result(WAIT_S) is False, "the next one is not"

    def test_in_a_thread_of_the_task(self, kind: Kind) -> None:
        """The record may be handed on."""
        asked, seen = threading.Event(), []

        def task() -> None:
            current = current_task()
            helper = threading.Thread(target=lambda: asked.wait(WAIT_S) and seen.append(current.cancelled))
            helper.start()
            helper.join()

        with kind.pool(max_workers=1) as pool:
            future = pool.submit(task)
            assert eventually(future.running)
            future.cancel()
            asked.set()
            future.result(WAIT_S)
        assert seen == [True]

    def test_as_a_result_keeps_nothing_alive(self) -> None:
        with Kind("cpu").pool(max_workers=1) as pool:
            current = pool.submit(current_task).result(WAIT_S)
        assert current._future() is None
        assert not current.cancelled
        assert pickle.loads(pickle.dumps(current)) == current


def test_map_stops_what_nobody_will_ask_for(kind: Kind) -> None:
    """The standard ``map`` cancels the rest when one of its tasks fails."""
    loop = Loop(look)

    def task(i: int) -> None:
        if i == 0:
            assert loop.started.wait(WAIT_S)
            raise ValueError("first")
        loop()

    with kind.pool(max_workers=2) as pool, pytest.raises(ValueError, match="first"):
        list(pool.map(task, range(2)))
    assert isinstance(loop.errors[0], TaskCancelledError)
