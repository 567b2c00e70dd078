"""The executor through its public face, on every kind of device."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import gc
import itertools
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import Kind, eventually, run_python

from managed_exec import GPUPoolExecutor, current_task, sim

WAIT_S = 30


def fail(error: BaseException) -> None:
    raise error


class TestInterface:
    """What programs written for ``ThreadPoolExecutor`` rely on."""

    def test_is_a_thread_pool_executor(self, kind: Kind) -> None:
        assert issubclass(GPUPoolExecutor, ThreadPoolExecutor)
        with kind.pool(max_workers=2, thread_name_prefix="solver") as pool:
            assert isinstance(pool, ThreadPoolExecutor)
            assert pool.submit(lambda: threading.current_thread().name).result().startswith("solver_")

    def test_positional_arguments_are_the_standard_ones(self) -> None:
        seen: list[int] = []
        with GPUPoolExecutor(2, "name", seen.append, (7,)) as pool:
            assert pool.submit(lambda: threading.current_thread().name).result() == "name_0"
        assert seen == [7]

    def test_results_exceptions_and_keywords(self, kind: Kind) -> None:
        error = KeyError("k")
        with kind.pool(max_workers=2) as pool:
            assert pool.submit(int, "101", base=2).result() == 5
            assert pool.submit(fail, error).exception() is error
            with pytest.raises(TypeError):
                pool.submit(fn=int)  # type: ignore[call-arg]

    def test_map_in_order_with_timeout(self, kind: Kind) -> None:
        gate = threading.Event()
        with kind.pool(max_workers=2) as pool:
            assert list(pool.map(pow, range(5), itertools.repeat(2))) == [0, 1, 4, 9, 16]
            late = pool.map(lambda _: gate.wait(WAIT_S), range(4), timeout=0.05)
            with pytest.raises(concurrent.futures.TimeoutError):
                next(late)
            gate.set()

    @pytest.mark.skipif(sys.version_info < (3, 14), reason="map(buffersize=) is new in Python 3.14")
    def test_map_buffersize(self, kind: Kind) -> None:
        with kind.pool(max_workers=2) as pool:
            assert list(pool.map(abs, range(-3, 0), buffersize=1)) == [3, 2, 1]

    def test_wait_and_as_completed(self, kind: Kind) -> None:
        gate = threading.Event()
        with kind.pool(max_workers=2) as pool:
            slow = pool.submit(gate.wait, WAIT_S)
            quick = pool.submit(abs, -1)
            done, pending = concurrent.futures.wait(
                [slow, quick], timeout=WAIT_S, return_when=concurrent.futures.FIRST_COMPLETED
            )
            assert done == {quick}
            assert pending == {slow}
            gate.set()
            assert set(concurrent.futures.as_completed([slow, quick], timeout=WAIT_S)) == {slow, quick}

    def test_asyncio_default_executor(self, kind: Kind) -> None:
        variable = contextvars.ContextVar("variable", default="unset")

        async def main() -> tuple[object, ...]:
            loop = asyncio.get_running_loop()
            loop.set_default_executor(kind.pool(max_workers=2))
            variable.set("set")
            in_thread = await asyncio.to_thread(lambda: (variable.get(), current_task() is not None))
            run = await loop.run_in_executor(None, torch.zeros, 2)
            with kind.pool(max_workers=1) as other:
                own = await loop.run_in_executor(other, abs, -2)
            return in_thread, run.tolist(), own

        assert asyncio.run(main()) == (("set", True), [0, 0], 2)

    def test_done_callback_runs_outside_the_task(self, kind: Kind) -> None:
        seen = []
        with kind.pool(max_workers=1) as pool:
            gate = threading.Event()
            future = pool.submit(gate.wait, WAIT_S)
            future.add_done_callback(lambda _: seen.append((current_task(), torch._C._len_torch_function_stack())))
            gate.set()
            assert future.result()
        assert seen == [(None, 0)]

    def test_pending_task_can_be_cancelled_and_running_one_not(self, kind: Kind) -> None:
        gate, started = threading.Event(), threading.Event()
        with kind.pool(max_workers=1) as pool:
            running = pool.submit(lambda: started.set() or gate.wait(WAIT_S))
            pending = pool.submit(abs, -1)
            assert started.wait(WAIT_S)
            assert pending.cancel()
            assert not running.cancel()
            gate.set()
            assert running.result(WAIT_S)
            assert pending.cancelled()

    def test_task_may_submit_to_its_own_pool(self, kind: Kind) -> None:
        with kind.pool(max_workers=2) as pool:
            assert pool.submit(lambda: pool.submit(abs, -3).result(WAIT_S)).result(WAIT_S) == 3


class TestShutdown:
    def test_submit_after_shutdown(self, kind: Kind) -> None:
        pool = kind.pool(max_workers=1)
        pool.submit(abs, 1).result()
        pool.shutdown()
        pool.shutdown()
        with pytest.raises(RuntimeError, match="after shutdown"):
            pool.submit(abs, 1)

    def test_without_waiting_runs_what_is_queued(self, kind: Kind) -> None:
        gate = threading.Event()
        pool = kind.pool(max_workers=1)
        futures = [pool.submit(gate.wait, WAIT_S)] + [pool.submit(abs, -i) for i in range(5)]
        pool.shutdown(wait=False)
        gate.set()
        assert [future.result(WAIT_S) for future in futures[1:]] == list(range(5))

    def test_cancel_futures(self, kind: Kind) -> None:
        gate, started = threading.Event(), threading.Event()
        pool = kind.pool(max_workers=1)
        running = pool.submit(lambda: started.set() or gate.wait(WAIT_S))
        pending = [pool.submit(abs, -1) for _ in range(10)]
        assert started.wait(WAIT_S)
        pool.shutdown(wait=False, cancel_futures=True)
        assert all(future.cancelled() for future in pending)
        gate.set()
        assert running.result(WAIT_S)

    def test_pool_nobody_holds_ends_its_threads(self, kind: Kind) -> None:
        before = set(threading.enumerate())
        pool = kind.pool(max_workers=2)
        futures = [pool.submit(abs, -i) for i in range(4)]
        del pool
        assert [future.result(WAIT_S) for future in futures] == list(range(4))
        assert eventually(lambda: set(threading.enumerate()) <= before)

    @pytest.mark.parametrize("simulated", ["", "3x16MiB"], ids=["cpu", "sim"])
    def test_interpreter_exit_waits_for_running_tasks(self, simulated: str) -> None:
        code = (
            "import concurrent.futures.thread as stock, time\n"
            "from managed_exec import GPUPoolExecutor\n"
            "pool = GPUPoolExecutor(max_workers=2)\n"
            "def outlast_the_main_thread():\n"
            "    while not stock._shutdown: time.sleep(0.01)\n"
            "    print('done', flush=True)\n"
            "pool.submit(outlast_the_main_thread)\n"
        )
        run = run_python(code, MANAGED_EXEC_SIM=simulated)
        assert (run.returncode, run.stdout.strip(), run.stderr) == (0, "done", "")

    def test_failing_initializer_breaks_the_pool(self, kind: Kind, caplog: pytest.LogCaptureFixture) -> None:
        error = ValueError("no licence")
        with kind.pool(max_workers=1, initializer=fail, initargs=(error,)) as pool:
            try:
                future = pool.submit(abs, 1)
            except concurrent.futures.thread.BrokenThreadPool:
                future = None
            if future is not None:
                with pytest.raises(concurrent.futures.thread.BrokenThreadPool):
                    future.result(WAIT_S)
            assert eventually(lambda: pool._broken)
            with pytest.raises(concurrent.futures.thread.BrokenThreadPool):
                pool.submit(abs, 1)
        assert "no licence" in caplog.text


class TestWorkers:
    def test_bad_numbers(self) -> None:
        for name in ("max_workers", "tasks_per_device"):
            for number in (0, -1):
                with pytest.raises(ValueError, match=f"{name} must be greater than 0, got {number}"):
                    GPUPoolExecutor(**{name: number})
            for other in (1.5, "2", True):
                with pytest.raises(TypeError, match=name):
                    GPUPoolExecutor(**{name: other})

    def test_bad_placements(self) -> None:
        with pytest.raises(ValueError, match=r"least-loaded, round-robin, pack.*'fastest'"):
            GPUPoolExecutor(placement="fastest")
        with pytest.raises(TypeError, match="placement"):
            GPUPoolExecutor(placement=3)  # type: ignore[arg-type]

    def test_default_count_covers_all_devices(self, simulator: Kind) -> None:
        with ThreadPoolExecutor() as stock, simulator.pool() as pool, simulator.pool(tasks_per_device=3) as bounded:
            assert pool._max_workers == max(stock._max_workers, 4)
            assert bounded._max_workers == 12
        sim.enable(devices=50, memory="1MiB")
        with simulator.pool() as pool:
            assert pool._max_workers == 50

    def test_idle_thread_is_reused(self, kind: Kind) -> None:
        with kind.pool(max_workers=8) as pool:
            for _ in range(20):
                pool.submit(abs, 1).result()
                assert eventually(lambda: pool._done_with)
            assert len(pool._threads) == 1

    def test_thread_is_started_for_each_task_that_waits(self, kind: Kind) -> None:
        """A thread that is only just starting is not an idle one: tasks that wait for each other all get to run."""
        first, slow = threading.Event(), threading.Event()

        def initialize() -> None:
            if first.is_set():
                slow.wait(WAIT_S)
            first.set()

        together = threading.Barrier(3)
        with kind.pool(max_workers=3, initializer=initialize) as pool:
            futures = [pool.submit(together.wait, WAIT_S) for _ in range(3)]
            assert len(pool._threads) == 3
            slow.set()
            assert sorted(future.result(WAIT_S) for future in futures) == [0, 1, 2]

    def test_result_whose_reading_ends_the_thread(self, accelerator: Kind) -> None:
        """Looking for tensors in a result runs the code of its containers."""

        class Lazy(Mapping[str, object]):
            def __getitem__(self, key: str) -> object:
                sys.exit(3)

            def __iter__(self) -> Iterator[str]:
                return iter("a")

            def __len__(self) -> int:
                return 1

        with accelerator.pool(max_workers=1) as pool:
            assert isinstance(pool.submit(Lazy).exception(WAIT_S), SystemExit)
            assert pool.submit(abs, -1).result(WAIT_S) == 1

    def test_as_many_tasks_as_workers_run_at_once(self, kind: Kind) -> None:
        together = threading.Barrier(12)
        with kind.pool(max_workers=12) as pool:
            futures = [pool.submit(together.wait, WAIT_S) for _ in range(24)]
            assert sorted(future.result(WAIT_S) for future in futures) == sorted([*range(12)] * 2)

    @pytest.mark.parametrize(("max_workers", "tasks_per_device"), [(3, None), (None, 2), (5, 2), (32, 1)])
    def test_never_more_at_once_than_allowed(
        self, kind: Kind, max_workers: int | None, tasks_per_device: int | None
    ) -> None:
        lock = threading.Lock()
        running: dict[torch.device, int] = {}
        most: dict[object, int] = {"all": 0}

        def task(i: int) -> int:
            current = current_task()
            assert current is not None
            with lock:
                running[current.device] = running.get(current.device, 0) + 1
                most["all"] = max(most["all"], sum(running.values()))
                most[current.device] = max(most.get(current.device, 0), running[current.device])
            torch.ones(100).sum()
            with lock:
                running[current.device] -= 1
            return i

        with kind.pool(max_workers, tasks_per_device=tasks_per_device) as pool:
            assert list(pool.map(task, range(300))) == list(range(300))
        bound = min(max_workers or 10**9, (tasks_per_device or 10**9) * kind.device_count)
        assert most.pop("all") <= bound
        assert all(count <= (tasks_per_device or bound) for count in most.values())

    def test_devices_fill_up_to_tasks_per_device(self, simulator: Kind) -> None:
        together = threading.Barrier(8)

        def task() -> torch.device:
            together.wait(WAIT_S)
            current = current_task()
            assert current is not None
            return current.device

        with simulator.pool(tasks_per_device=2, placement="pack") as pool:
            devices = [future.result() for future in [pool.submit(task) for _ in range(8)]]
        assert sorted(str(device) for device in devices) == sorted(f"sim:{i}" for i in range(4) for _ in range(2))


class TestReferences:
    """After a task nothing of it stays referenced. Reference counting alone must be enough."""

    @pytest.fixture(autouse=True)
    def no_collector(self):
        gc.disable()
        yield
        gc.enable()

    def test_arguments_and_result(self, kind: Kind) -> None:
        with kind.pool(max_workers=1) as pool:
            argument = torch.ones(1000)
            future = pool.submit(lambda x: x.cuda() * 2, argument)
            result = future.result()
            references = [weakref.ref(argument), weakref.ref(result)]
            del argument, future, result
            assert _eventually_dead(references)

    def test_arguments_are_gone_when_the_future_is_done(self, kind: Kind) -> None:
        class Argument:
            pass

        with kind.pool(max_workers=1) as pool:
            argument = Argument()
            reference = weakref.ref(argument)
            gate = threading.Event()
            future = pool.submit(lambda _: gate.wait(WAIT_S), argument)
            alive_at_callback = []
            future.add_done_callback(lambda _: alive_at_callback.append(reference()))
            del argument
            gate.set()
            assert future.result(WAIT_S)
        assert alive_at_callback == [None]

    def test_failure_without_its_future(self, kind: Kind) -> None:
        class Local:
            pass

        seen: list[weakref.ref[Local]] = []

        def task() -> None:
            local = Local()
            seen.append(weakref.ref(local))
            raise ValueError(1)

        with kind.pool(max_workers=1) as pool:
            future = pool.submit(task)
            assert isinstance(future.exception(), ValueError)
            del future
            assert _eventually_dead(seen)

    def test_placement_failure_without_its_future(self, simulator: Kind) -> None:
        with simulator.pool(max_workers=1, placement=lambda devices, request: 99) as pool:
            future = pool.submit(abs, 1)
            error = weakref.ref(future.exception())
            del future
            assert _eventually_dead([error])


def _eventually_dead(references: list) -> bool:
    deadline = threading.Event()
    for _ in range(400):
        if all(reference() is None for reference in references):
            return True
        deadline.wait(0.01)
    return False
