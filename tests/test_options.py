"""``gpu_task`` with options, through the pool: priority, device, memory, and what happens out of memory."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait

import pytest
import torch
from conftest import Kind, eventually, identity

from managed_exec import GPUPoolExecutor, current_task, gpu_task
from managed_exec.options import TaskOptions, options_of
from managed_exec.scheduling.footprints import function_name
from managed_exec.scheduling.held import MAX_PASSED

WAIT_S = 30


@gpu_task(memory="1KiB", priority=3)
def scaled(x: float, /, *, memory: float = 2.0) -> float:
    """Multiply."""
    return x * memory


class Gate:
    """A task that says when it has started, and ends when it is told to."""

    def __init__(self) -> None:
        self.started, self.open = threading.Event(), threading.Event()

    def __call__(self) -> bool:
        self.started.set()
        return self.open.wait(WAIT_S)


def submit_gate(pool: GPUPoolExecutor, **options: object) -> tuple[Gate, Future[bool]]:
    """Start a gate as a task with *options*."""
    gate = Gate()
    future = pool.submit(gpu_task(**options)(gate))  # type: ignore[call-overload]
    assert gate.started.wait(WAIT_S)
    return gate, future


class Solver:
    @gpu_task(priority=1)
    def run(self, n: int) -> int:
        return n


class TestMarking:
    def test_methods(self) -> None:
        solver = Solver()
        assert options_of(solver.run).priority == 1
        assert solver.run(3) == 3
        variant = Solver.run.options(priority=7)
        assert options_of(variant).priority == 7
        assert variant(solver, 3) == 3

    def test_function_stays_what_it_was(self) -> None:
        assert scaled(3, memory=5.0) == 15
        assert (scaled.__name__, scaled.__doc__) == ("scaled", "Multiply.")
        assert pickle.loads(pickle.dumps(scaled)) is scaled

    def test_variant_changes_what_it_names(self) -> None:
        variant = scaled.options(priority=-1)
        assert options_of(variant) == TaskOptions(memory="1KiB", priority=-1)
        assert options_of(scaled).priority == 3
        assert variant(3) == 6
        assert options_of(functools.partial(variant, 1)) == options_of(variant)
        partial = functools.partial(variant, 1)
        assert options_of(gpu_task(priority=2)(partial)).priority == 2
        assert options_of(functools.partial(partial)).priority == -1

    def test_partial_may_have_its_own(self) -> None:
        own = gpu_task(priority=7)(functools.partial(scaled, 1))
        assert options_of(own) == options_of(functools.partial(own)) == TaskOptions(priority=7)
        assert own.options(device=1)() == scaled(1)
        assert options_of(own.options(device=1)) == TaskOptions(priority=7, device=1)
        assert options_of(scaled).priority == 3

    @pytest.mark.parametrize("thing", [abs, torch.neg], ids=identity)
    def test_what_has_no_attributes(self, kind: Kind, thing: Callable[[torch.Tensor], torch.Tensor]) -> None:
        task = gpu_task(priority=1)(thing)
        assert options_of(task).priority == 1
        with kind.pool(max_workers=1) as pool:
            future = pool.submit(task, torch.tensor(-3))
            assert future.result(WAIT_S).abs() == 3
        assert function_name(task) == function_name(thing)

    @pytest.mark.parametrize(
        ("options", "error"),
        [
            ({"memory": "much"}, ValueError),
            ({"memory": 2.5}, TypeError),
            ({"priority": "high"}, TypeError),
            ({"retries": -1}, ValueError),
            ({"timeout": "1s"}, TypeError),
            ({"timeout": True}, TypeError),
            ({"timeout": 0}, ValueError),
            ({"timeout": 10**400}, ValueError),
            ({"timeout": float("nan")}, ValueError),
            ({"on_oom": "wait", "retries": 1}, ValueError),
            ({"on_oom": "retry"}, ValueError),
            ({"device": 1.5}, TypeError),
        ],
        ids=identity,
    )
    def test_wrong_options(self, options: dict[str, object], error: type[Exception]) -> None:
        with pytest.raises(error, match=f"{'on_oom' if 'on_oom' in options else next(iter(options))}: "):
            gpu_task(**options)  # type: ignore[call-overload]


class TestPriority:
    def test_higher_first_and_first_come_first_served(self, kind: Kind) -> None:
        ran: list[str] = []
        with kind.pool(max_workers=1) as pool:
            gate, _ = submit_gate(pool)
            for name, priority in [("a", 0), ("b", -5), ("c", 7), ("d", 0), ("e", 7), ("f", 1)]:
                pool.submit(gpu_task(priority=priority)(lambda name=name: ran.append(name)))
            gate.open.set()
        assert "".join(ran) == "cefadb"


class TestDevice:
    @pytest.mark.parametrize(
        "choice", [2, "cuda:2", "sim:2", torch.device("cuda", 2), lambda d: d.index == 2], ids=identity
    )
    def test_by_number_name_and_function(self, simulator: Kind, choice: object) -> None:
        task = gpu_task(device=choice)(lambda: current_task().device.index)  # type: ignore[call-overload]
        with simulator.pool(max_workers=8) as pool:
            assert [future.result(WAIT_S) for future in [pool.submit(task) for _ in range(20)]] == [2] * 20

    @pytest.mark.parametrize("choice", [7, "cuda:4", "gpu", -1, lambda d: False, lambda: True], ids=identity)
    def test_none_of_the_pool_s(self, simulator: Kind, choice: object) -> None:
        said = r"^device: .*(of the pool's devices, sim:0, .*sim:3|expected a function that is given a torch.device)"
        with simulator.pool() as pool, pytest.raises(ValueError, match=said):
            pool.submit(gpu_task(device=choice)(abs_of), 1)  # type: ignore[call-overload]

    def test_names_that_are_none(self) -> None:
        expected = r"^gpu_task: unknown option 'memroy', expected some of memory, device, .*; did you mean 'memory'\?$"
        with pytest.raises(TypeError, match=expected):
            gpu_task(memroy=1)  # type: ignore[call-overload]
        with pytest.raises(TypeError, match="unknown option 'x'"):
            scaled.options(x=1)  # type: ignore[call-arg]

    def test_number_means_the_cpu_where_there_is_no_other(self) -> None:
        with GPUPoolExecutor(1, devices="cpu") as pool:
            assert pool.submit(gpu_task(device=3)(lambda: current_task().device.type)).result(WAIT_S) == "cpu"

    def test_no_more_than_the_device_takes(self, simulator: Kind) -> None:
        """The others wait, and are passed by tasks for other devices."""
        with simulator.pool(tasks_per_device=1) as pool:
            gate, future = submit_gate(pool, device=1)
            second = pool.submit(gpu_task(device=1)(lambda: current_task().device.index))
            assert pool.submit(gpu_task(device=0)(lambda: current_task().device.index)).result(WAIT_S) == 0
            assert not second.done()
            gate.open.set()
            assert second.result(WAIT_S) == 1
            assert future.result(WAIT_S)


def abs_of(x: int) -> int:
    return abs(x)


class TestMemory:
    """Four devices of 64 MiB, of which the pools have one."""

    def test_tasks_that_do_not_fit_together(self, simulator: Kind) -> None:
        with simulator.pool(max_workers=3, devices=1) as pool:
            gate, future = submit_gate(pool, memory="40MiB")
            second = pool.submit(gpu_task(memory="40MiB")(lambda: [s.reserved_bytes for s in pool._loads.snapshots()]))
            assert pool.submit(abs, -1).result(WAIT_S) == 1, "what asks for nothing passes"
            assert pool.submit(gpu_task(memory="20MiB")(abs_of), -2).result(WAIT_S) == 2, "and what fits beside"
            assert not second.done()
            assert not second.running()
            gate.open.set()
            assert second.result(WAIT_S) == [40 * 2**20]
            assert future.result(WAIT_S)
        assert [snapshot.reserved_bytes for snapshot in pool._loads.snapshots()] == [0]

    def test_others_pass_a_bounded_number_of_times(self, simulator: Kind) -> None:
        """Then the device is kept for the task that waits, until what runs there has ended."""
        ran: list[str] = []
        with simulator.pool(max_workers=2, devices=1) as pool:
            gate, _ = submit_gate(pool, memory="40MiB")
            large = pool.submit(gpu_task(memory="60MiB")(lambda: ran.append("large")))
            small = [pool.submit(lambda: ran.append("small")) for _ in range(3 * MAX_PASSED)]
            assert eventually(lambda: len(ran) == MAX_PASSED)
            gate.open.set()
            wait([large, *small], WAIT_S)
        assert ran.index("large") == MAX_PASSED
        assert len(ran) == 1 + 3 * MAX_PASSED

    def test_more_than_any_device_has(self, simulator: Kind) -> None:
        with simulator.pool() as pool:
            with pytest.raises(ValueError, match=r"needs 65\.0 MiB, and the largest device .* has 64\.0 MiB"):
                pool.submit(gpu_task(memory="65MiB")(abs_of), 1)
            assert pool.submit(gpu_task(memory="64MiB")(abs_of), 1).result(WAIT_S) == 1

    def test_task_that_waits_for_room_can_be_cancelled(self, simulator: Kind) -> None:
        with simulator.pool(max_workers=2, devices=1) as pool:
            gate, _ = submit_gate(pool, memory="40MiB")
            held = pool.submit(gpu_task(memory="60MiB")(abs_of), 1)
            assert eventually(lambda: pool._tasks._held)
            assert held.cancel()
            gate.open.set()
            assert wait([held], WAIT_S).done == {held}, "those who wait for it are told"
            assert pool.submit(gpu_task(memory="64MiB")(abs_of), -1).result(WAIT_S) == 1

    def test_shutdown_cancels_what_waits_for_room(self, simulator: Kind) -> None:
        pool = simulator.pool(max_workers=2, devices=1)
        gate, future = submit_gate(pool, memory="40MiB")
        held = pool.submit(gpu_task(memory="60MiB")(abs_of), 1)
        assert eventually(lambda: pool._tasks._held)
        pool.shutdown(wait=False, cancel_futures=True)
        assert held.cancelled()
        gate.open.set()
        pool.shutdown()
        assert future.result(WAIT_S)

    def test_shutdown_runs_what_waits_for_room(self, simulator: Kind) -> None:
        pool = simulator.pool(max_workers=2, devices=1)
        gate, _ = submit_gate(pool, memory="40MiB")
        held = [pool.submit(gpu_task(memory="60MiB")(abs_of), -i) for i in range(5)]
        pool.shutdown(wait=False)
        gate.open.set()
        pool.shutdown()
        assert [future.result(WAIT_S) for future in held] == list(range(5))

    def test_many_uneven_tasks_never_reserve_more_than_there_is(self, simulator: Kind) -> None:
        most: list[int] = []

        def task(i: int) -> int:
            most.append(max(snapshot.reserved_bytes for snapshot in pool._loads.snapshots()))
            return i

        with simulator.pool(max_workers=8, devices=2) as pool:
            sizes = [(i * 7919) % 64 + 1 for i in range(300)]
            futures = [pool.submit(gpu_task(memory=f"{n}MiB", priority=n % 3)(task), i) for i, n in enumerate(sizes)]
            assert [future.result(WAIT_S) for future in futures] == list(range(300))
        assert max(most) <= 64 * 2**20
        assert [snapshot.reserved_bytes for snapshot in pool._loads.snapshots()] == [0, 0]
        assert not pool._loads._kept_for


class TestOutOfMemory:
    def test_runs_again_alone(self, simulator: Kind) -> None:
        attempts: list[list[int]] = []

        @gpu_task(on_oom="retry", retries=2)
        def task() -> str:
            attempts.append([snapshot.running for snapshot in pool._loads.snapshots()])
            if len(attempts) < 3:
                torch.empty(2**30, device="cuda")
            return "done"

        with simulator.pool(max_workers=4, devices=2) as pool:
            gate, _ = submit_gate(pool, device=0)
            future = pool.submit(task)
            assert future.result(WAIT_S) == "done"
            assert len(attempts) == 3
            assert attempts[1] == attempts[2] == [1, 1], "beside no other task, on the device without the gate"
            gate.open.set()
        assert [snapshot.running for snapshot in pool._loads.snapshots()] == [0, 0]
        assert not pool._loads._kept_for

    def test_shutdown_that_cancels_leaves_what_is_to_run_again(self, simulator: Kind) -> None:
        failed = threading.Event()

        @gpu_task(on_oom="retry", retries=1, device=0)
        def task() -> int:
            if not failed.is_set():
                failed.set()
                raise torch.OutOfMemoryError("no")
            return 1

        pool = simulator.pool(max_workers=2, devices=2)
        gate, _ = submit_gate(pool, device=0)
        future = pool.submit(task)
        assert failed.wait(WAIT_S)
        assert eventually(lambda: pool._tasks._held)
        pool.shutdown(wait=False, cancel_futures=True)
        gate.open.set()
        assert future.result(WAIT_S) == 1
        pool.shutdown()

    def test_not_more_often_than_allowed_nor_for_other_errors(self, simulator: Kind) -> None:
        runs: list[type[Exception]] = []

        @gpu_task(on_oom="retry", retries=2)
        def task(error: type[Exception]) -> None:
            runs.append(error)
            raise error("no")

        with simulator.pool(max_workers=2) as pool:
            assert isinstance(pool.submit(task, torch.OutOfMemoryError).exception(WAIT_S), torch.OutOfMemoryError)
            assert isinstance(pool.submit(task, ValueError).exception(WAIT_S), ValueError)
        assert runs == [torch.OutOfMemoryError] * 3 + [ValueError]

    def test_goes_on_on_the_cpu(self, simulator: Kind) -> None:
        @gpu_task(on_oom="cpu")
        def task() -> tuple[str, int]:
            x = torch.ones(2**25, device="cuda")  # 128 MiB
            return current_task().device.type, x.numel()

        with simulator.pool(max_workers=1) as pool:
            assert pool.submit(task).result(WAIT_S) == ("cpu", 2**25)
            assert pool.submit(lambda: current_task().device.type).result(WAIT_S) == "sim"

    def test_raises_by_default(self, simulator: Kind) -> None:
        with simulator.pool(max_workers=1) as pool:
            error = pool.submit(gpu_task(retries=3)(lambda: torch.empty(2**30, device="cuda"))).exception(WAIT_S)
        assert isinstance(error, torch.OutOfMemoryError)


def test_options_and_name_of_what_asyncio_runs_in_a_context(kind: Kind) -> None:
    @gpu_task(priority=3)
    def work(x: int) -> int:
        return x + 1

    names: list[str] = []

    async def main(pool: GPUPoolExecutor) -> int:
        asyncio.get_running_loop().set_default_executor(pool)
        return await asyncio.to_thread(work, 1)

    pool = kind.pool(max_workers=1, hooks=[lambda event: names.append(event.name)])
    assert asyncio.run(main(pool)) == 2
    assert set(names) == {work.__qualname__}
    run = functools.partial(contextvars.copy_context().run, work, 1)
    assert options_of(run).priority == 3
    assert function_name(run) == function_name(work)
