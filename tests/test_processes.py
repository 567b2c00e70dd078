"""Tasks in processes: they see what they would see in a thread, and what they are given and return arrives.

Starting a process costs seconds, so most tests share one pool; what kills processes is in ``test_lost_processes``.
"""

from __future__ import annotations

import contextvars
import dataclasses
import os
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.thread import BrokenThreadPool
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import eventually, make_kind
from processes import WAIT_S, nothing_left_by_processes, wait_for

from managed_exec import GPUPoolExecutor, ManagedTensor, MemoryPolicy, current_task, errors, gpu_task, manage, sim

pytestmark = pytest.mark.timeout(300)  # starting a process imports torch

Pair = namedtuple("Pair", "left right")


class Holder:
    def __init__(self, held: object) -> None:
        self.held = held

    def method(self) -> None: ...


VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


@dataclasses.dataclass
class Box:
    content: torch.Tensor


@pytest.fixture(scope="module")
def pool() -> Iterator[GPUPoolExecutor]:
    """Two lanes, each on a simulated device of its own."""
    with nothing_left_by_processes():
        for _ in make_kind("sim"):
            sim.enable(devices=2, memory="64MiB", host_bandwidth=100e9)
            policy = MemoryPolicy(min_bytes=1024, limit="48MiB")
            with GPUPoolExecutor(2, workers="processes", memory=policy, tasks_per_device=1) as pool:
                assert sorted(on_both(pool, lambda: current_task().device.index)) == [0, 1]
                yield pool


@pytest.fixture(autouse=True)
def nothing_left() -> None:
    """Do not look at every test for itself: the pool of the module does so at its end."""


def on_both(pool: GPUPoolExecutor, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Return what *fn* returns on each device."""

    def task() -> Any:
        return fn(*args)

    return [pool.submit(gpu_task(device=i)(task)).result(WAIT_S) for i in range(2)]


class TestTask:
    def test_is_bound_to_its_device(self, pool: GPUPoolExecutor) -> None:
        def task() -> tuple[Any, ...]:
            task = current_task()
            assert task is not None
            assert torch.accelerator.current_stream() == task.stream
            made = torch.ones(3, device="cuda")
            return os.getpid(), task.id, task.device, made.device, torch.ones(3).cuda().device, torch.ones(3).device

        future = pool.submit(task)
        pid, task_id, *devices, plain = future.result(WAIT_S)
        assert pid != os.getpid()
        assert task_id > 0
        assert set(devices) <= {torch.device("sim:0"), torch.device("sim:1")}
        assert len(set(devices)) == 1
        assert plain == torch.device("cpu")

    def test_results_are_those_of_threads(self, pool: GPUPoolExecutor) -> None:
        def solve(seed: int) -> float:
            x = torch.randn(50, 50, generator=torch.Generator().manual_seed(seed)).cuda()
            return float(torch.linalg.solve(x, x.sum(0)).cpu().sum())

        with ThreadPoolExecutor(2) as threads:
            expected = list(threads.map(solve_on_cpu, range(20)))
        assert list(pool.map(solve, range(20))) == pytest.approx(expected, rel=1e-3)

    def test_modes_of_the_submitter_hold(self, pool: GPUPoolExecutor) -> None:
        def modes() -> tuple[bool, ...]:
            return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")

        assert pool.submit(modes).result(WAIT_S) == (True, False, False)
        with torch.no_grad():
            assert pool.submit(modes).result(WAIT_S) == (False, False, False)
        with torch.inference_mode(), torch.autocast("cpu"):
            assert pool.submit(modes).result(WAIT_S) == (False, True, True)
        assert pool.submit(modes).result(WAIT_S) == (True, False, False)

    def test_context_variables_stay(self, pool: GPUPoolExecutor) -> None:
        token = VARIABLE.set("here")
        try:
            assert pool.submit(value_of_variable).result(WAIT_S) == "unset"
        finally:
            VARIABLE.reset(token)

    def test_seeds(self, pool: GPUPoolExecutor) -> None:
        def seeded() -> float:
            torch.manual_seed(3)
            return torch.rand(1).item()

        first, second = on_both(pool, lambda: torch.rand(1).item())
        assert first != second, "two lanes do not draw the same numbers"
        with torch.random.fork_rng(devices=[]):
            assert on_both(pool, seeded) == [seeded()] * 2

    def test_memory_is_managed(self, pool: GPUPoolExecutor) -> None:
        """80 MiB in tensors on a device of 64, of which 48 may be used."""

        def task() -> tuple[float, bool, int]:
            parts = [torch.full((2**20,), float(i), device="cuda") for i in range(20)]
            total = sum(part.sum() for part in parts)
            return total.item(), isinstance(parts[0], ManagedTensor), torch.accelerator.max_memory_allocated()

        total, is_managed, most_bytes = pool.submit(task).result(WAIT_S)
        assert (total, is_managed) == (190 * 2**20, True)
        assert most_bytes <= 48 * 2**20

    def test_settings_of_the_process(self, pool: GPUPoolExecutor) -> None:
        assert on_both(pool, torch.get_num_threads) == [torch.get_num_threads()] * 2
        assert on_both(pool, torch.get_default_dtype) == [torch.float32] * 2

    def test_is_what_a_pool_of_threads_is(self, pool: GPUPoolExecutor) -> None:
        assert isinstance(pool, ThreadPoolExecutor)
        assert list(pool.map(pow, [2, 3], [5, 2])) == [32, 9]
        assert pool.submit(lambda *, memory, device: (memory, device), memory=1, device=2).result(WAIT_S) == (1, 2)


def value_of_variable() -> str:
    return VARIABLE.get()


def solve_on_cpu(seed: int) -> float:
    x = torch.randn(50, 50, generator=torch.Generator().manual_seed(seed))
    return float(torch.linalg.solve(x, x.sum(0)).sum())


class TestWhatTravels:
    def test_device_results_come_to_the_host(self, pool: GPUPoolExecutor) -> None:
        def task() -> tuple[Any, ...]:
            x = torch.arange(20_000.0, device="cuda")
            return Pair(x, x[:10]), Box(x * 2), torch.ones(3, 2, device="cuda").max(dim=0), {"n": [x.sum()]}

        pair, box, found, rest = pool.submit(task).result(WAIT_S)
        assert (type(pair), type(box), type(found)) == (Pair, Box, type(torch.ones(1, 1).max(dim=0)))
        for tensor in (*pair, box.content, *found, rest["n"][0]):
            assert type(tensor) is torch.Tensor
            assert tensor.device.type == "cpu"
        pair.left[:10] = 7
        assert pair.right.tolist() == [7] * 10, "what shared its memory still does"
        assert box.content[100] == 200

    def test_tensors_of_devices_are_brought(self, pool: GPUPoolExecutor) -> None:
        plain = torch.arange(1000.0).to("sim:1")
        managed = manage(torch.arange(30_000.0).to("sim:0"))
        spilled = manage(torch.arange(30_000.0).to("sim:0")).spill("host")

        def task(*tensors: torch.Tensor) -> list[tuple[str, float]]:
            return [(t.device.type, t.cuda().sum().item()) for t in tensors]

        sums = pool.submit(task, plain, managed, spilled).result(WAIT_S)
        assert sums == [("cpu", 499500.0)] + [("cpu", torch.arange(30_000.0).sum().item())] * 2
        assert spilled.residency == "host"

    def test_shared_memory_is_shared(self, pool: GPUPoolExecutor) -> None:
        shared, other = torch.zeros(2).share_memory_(), torch.zeros(2)
        on_both(pool, lambda x, y: (x.add_(1), y.add_(1), None)[2], shared, other)
        assert (shared.tolist(), other.tolist()) == ([2, 2], [0, 0])

    def test_modules(self, pool: GPUPoolExecutor) -> None:
        def train(model: torch.nn.Module) -> torch.nn.Module:
            model = model.cuda()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model(torch.ones(4, 3, device="cuda")).sum().backward()
            optimizer.step()
            return model

        model = torch.nn.Linear(3, 2)
        trained = pool.submit(train, model).result(WAIT_S)
        assert torch.allclose(trained.weight, model.weight - 0.4)
        assert isinstance(trained.weight, torch.nn.Parameter)
        assert not torch.equal(trained.bias, model.bias)

    def test_what_cannot_be_sent_is_named(self, pool: GPUPoolExecutor) -> None:
        lock = threading.Lock()
        circle: list[object] = []
        circle += [circle, lock]
        module: dict[str, Any] = {"guard": lock, "__name__": "__main__"}
        exec("def guarded(): return (lambda: guard)", module)
        for future, named in (
            (pool.submit(print, 1, lock), r"task \d+ \(print\): argument 2, a lock, cannot be sent"),
            (pool.submit(print, end=lock), r"\(print\): end, a lock, cannot be sent"),
            (
                pool.submit(lambda: lock),
                r"<lambda>\): function's variable 'lock', a lock, cannot .* use workers='threads'",
            ),
            (pool.submit(module["guarded"]), r"\(guarded\): function's variable 'guard', a lock, cannot be sent"),
            (pool.submit(print, {"a": [1, lock]}), r"argument 1\['a'\]\[1\], a lock, cannot be sent"),
            (pool.submit(print, partial(print, Holder(lock))), r"argument 1\[0\]\.held, a lock, cannot"),
            (pool.submit(print, circle), r"argument 1\[1\], a lock, cannot be sent"),
            (pool.submit(print, Holder(lock).method), r"argument 1\.__self__\.held, a lock, cannot be sent"),
            (pool.submit(threading.Lock), r"the result of task \d+ \(.*\) cannot be sent back .* cannot pickle"),
            (pool.submit(lambda: torch.ones(3, requires_grad=True) * 2), r"the result .* detach\(\) it"),
            (pool.submit(Unreadable()), r"cannot be read in the process .* ZeroDivisionError"),
        ):
            with pytest.raises(errors.NotSendableError, match=named):
                future.result(WAIT_S)
        assert pool.submit(abs, -1).result(WAIT_S) == 1

    def test_exceptions(self, pool: GPUPoolExecutor) -> None:
        error = pool.submit(raising, KeyError("k")).exception(WAIT_S)
        assert (type(error), error.args) == (KeyError, ("k",))
        assert "in raising" in str(error.__cause__)
        assert __file__ in str(error.__cause__)
        for raised in (SystemExit(3), KeyboardInterrupt(), GeneratorExit()):
            assert type(pool.submit(raising, raised).exception(WAIT_S)) is type(raised)
        for make, text in ((Picky, "two words"), (Locked, "with a lock")):
            error = pool.submit(lambda make=make: raising(make(*"ab"))).exception(WAIT_S)
            assert type(error) is errors.RemoteError
            assert text in str(error)
            assert "in raising" in str(error.__cause__)


class Unreadable:
    """A task that can be pickled, and not unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return divmod, (1, 0)

    def __call__(self) -> None:
        """Never run."""


class Picky(Exception):
    def __init__(self, one: str, two: str) -> None:
        super().__init__("two words")


class Locked(Exception):
    def __init__(self, *args: str) -> None:
        super().__init__("with a lock")
        self.lock = threading.Lock()


def raising(error: BaseException) -> None:
    raise error


class TestOutOfMemory:
    def test_raises(self, pool: GPUPoolExecutor) -> None:
        error = pool.submit(lambda: torch.empty(2**30, device="cuda")).exception(WAIT_S)
        assert isinstance(error, torch.OutOfMemoryError)

    def test_runs_again_also_if_the_error_was_another_one_s_cause(self, pool: GPUPoolExecutor, tmp_path: Path) -> None:
        @gpu_task(on_oom="retry", retries=2)
        def task(runs: Path) -> int:
            with runs.open("a") as file:
                file.write("x")
            n_runs = len(runs.read_text())
            if n_runs < 3:
                try:
                    torch.empty(2**30, device="cuda")
                except torch.OutOfMemoryError as error:
                    raise ValueError("no room") from error
            return n_runs

        assert pool.submit(task, tmp_path / "runs").result(WAIT_S) == 3
        assert not pool._loads._kept_for

    def test_goes_on_on_the_cpu(self, pool: GPUPoolExecutor) -> None:
        @gpu_task(on_oom="cpu")
        def task() -> tuple[str, str, int]:
            x = torch.ones(2**25, device="cuda")  # 128 MiB
            return current_task().device.type, x.device.type, os.getpid()

        kind, made, pid = pool.submit(task).result(WAIT_S)
        assert (kind, made) == ("cpu", "cpu")
        assert pid != os.getpid()

    def test_more_than_a_process_may_use(self, pool: GPUPoolExecutor) -> None:
        assert pool.submit(gpu_task(memory="48MiB")(raising_nothing)).result(WAIT_S) is None
        with pytest.raises(ValueError, match=r"needs 49\.0 MiB, and the largest device .* 48\.0 MiB"):
            pool.submit(gpu_task(memory="49MiB")(raising_nothing))


def raising_nothing() -> None:
    """Do nothing."""


class TestPool:
    def test_kinds_of_workers(self) -> None:
        for wrong in ("process", "", None, 2):
            with pytest.raises(ValueError, match="workers: expected 'threads' or 'processes', got "):
                GPUPoolExecutor(workers=wrong)  # type: ignore[arg-type]
        lock = threading.Lock()
        with pytest.raises(errors.NotSendableError, match="the initializer: argument 2, a lock, cannot be sent"):
            GPUPoolExecutor(workers="processes", devices="cpu", initializer=print, initargs=(1, lock))

    def test_one_process_a_device_unless_told(self, pool: GPUPoolExecutor) -> None:
        for options, n_workers in (({}, 2), ({"max_workers": 5}, 5), ({"tasks_per_device": 3}, 6), ({"devices": 1}, 1)):
            with GPUPoolExecutor(workers="processes", **options) as other:
                assert other._max_workers == n_workers

    def test_limits_are_shared_by_the_processes_of_a_device(self, pool: GPUPoolExecutor) -> None:
        policy = MemoryPolicy(limit="40MiB")
        with GPUPoolExecutor(4, workers="processes", memory=policy) as other:
            assert other._loads.largest_bytes(gpu_need()) == 40 * 2**20
            with pytest.raises(ValueError, match=r"leaves each of the processes on a device 20\.0 MiB; have fewer"):
                other.submit(gpu_task(memory="21MiB")(raising_nothing))

    def test_on_the_cpu(self, tmp_path: Path) -> None:
        """Also: the initializer runs once in each process, no process is there before it is needed, and all end."""
        with nothing_left_by_processes():
            pool = GPUPoolExecutor(2, workers="processes", devices="cpu", initializer=note_pid, initargs=(tmp_path,))
            for _ in range(5):
                device, pid = pool.submit(where).result(WAIT_S)
                assert device == torch.device("cpu")
            assert os.listdir(tmp_path) == [str(pid)], "one at a time needs one process"
            held: list[Future[Any]] = [pool.submit(wait_for, tmp_path / "go") for _ in range(20)]
            assert eventually(lambda: len(os.listdir(tmp_path)) == 2, WAIT_S)
            pool.shutdown(wait=False, cancel_futures=True)
            (tmp_path / "go").touch()
            pool.shutdown()
            assert [future.cancelled() for future in held] == [False] * 2 + [True] * 18
            assert held[1].result(WAIT_S)

    def test_initializer_that_fails(self) -> None:
        with nothing_left_by_processes():
            pool = GPUPoolExecutor(
                workers="processes", devices="cpu", initializer=raising, initargs=(ValueError("no"),)
            )
            futures = [pool.submit(abs, i) for i in range(3)]
            for future in futures:
                assert isinstance(future.exception(WAIT_S), BrokenThreadPool)
            assert "in raising" in str(futures[0].exception().__cause__.__cause__)
            with pytest.raises(BrokenThreadPool):
                pool.submit(abs, 1)
            pool.shutdown()


def gpu_need() -> Any:
    from managed_exec.options import Need

    return Need(1)


def note_pid(folder: Path) -> None:
    (folder / str(os.getpid())).touch()


def where() -> tuple[torch.device, int]:
    return current_task().device, os.getpid()
