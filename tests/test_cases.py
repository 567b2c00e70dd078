"""What went wrong for people who do this job with other tools, each with its source."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import as_completed
from pathlib import Path

import pytest
import torch
from conftest import Kind, identity, run_python

from managed_exec import current_task, gpu_task, sim

WAIT_S = 30


class TestCase01GradModeOfTheCaller:
    """https://github.com/pytorch/pytorch/issues/20528: a pool mapped under no_grad still built graphs."""

    def test_no_grad_holds_in_the_task(self, kind: Kind) -> None:
        net = torch.nn.Linear(3, 1)
        with kind.pool(max_workers=1) as pool:
            with torch.no_grad():
                results = [pool.submit(net, torch.ones(2, 3)).result(WAIT_S), *pool.map(net, [torch.ones(2, 3)])]
            assert pool.submit(torch.is_grad_enabled).result(WAIT_S) is True
        assert [(y.requires_grad, y.grad_fn) for y in results] == [(False, None)] * 2
        assert torch.is_grad_enabled()

    def test_backward_in_the_caller_of_a_forward_in_a_worker(self, kind: Kind) -> None:
        net = torch.nn.Linear(3, 1)
        with kind.pool(max_workers=1) as pool:
            y = pool.submit(net, torch.ones(2, 3)).result(WAIT_S)
        assert y.requires_grad
        y.sum().backward()
        assert net.weight.grad.tolist() == [[2, 2, 2]]

    def test_the_same_on_the_device(self, kind: Kind) -> None:
        net = torch.nn.Linear(3, 1)

        def forward() -> torch.Tensor:
            return net.to("cuda")(torch.ones(2, 3, device="cuda"))

        with kind.pool(max_workers=1) as pool:
            with torch.no_grad():
                assert not pool.submit(forward).result(WAIT_S).requires_grad
            pool.submit(forward).result(WAIT_S).sum().backward()
        assert net.weight.grad.tolist() == [[2, 2, 2]]

    def test_without_inheritance_workers_start_with_grad_on(self, kind: Kind) -> None:
        with kind.pool(max_workers=1, inherit_context=False) as pool, torch.no_grad():
            assert pool.submit(torch.is_grad_enabled).result(WAIT_S) is True
            assert not torch.is_grad_enabled()


NAMES = {
    **dict.fromkeys(("fn", "self", "args", "kwargs", "task", "context", "timeout", "device", "memory"), "own"),
    **dict.fromkeys(("devices", "priority", "placement", "modes", "retries", "on_oom", "max_workers"), "own"),
    **dict.fromkeys(("initializer", "stream", "streams", "id", "chunksize"), "own"),
}


class TestCase03KeywordsOfTheExecutor:
    """https://github.com/noxdafox/pebble/issues/111, https://github.com/python/cpython/pull/12645: functions with a
    parameter named as one of the executor's own could not be called.
    """

    def test_every_keyword_goes_through(self, kind: Kind) -> None:
        def echo(*args: object, **kwargs: object) -> tuple[object, object]:
            return args, kwargs

        with kind.pool(max_workers=2) as pool:
            assert pool.submit(echo, 1, **NAMES).result(WAIT_S) == ((1,), NAMES)
            with torch.no_grad():  # the other way through the worker
                assert pool.submit(echo, 1, **NAMES).result(WAIT_S) == ((1,), NAMES)
        with kind.pool(max_workers=2, inherit_context=False) as pool:
            assert pool.submit(echo, 1, **NAMES).result(WAIT_S) == ((1,), NAMES)

    def test_a_task_keeps_its_keywords(self, kind: Kind) -> None:
        @gpu_task
        def solver(*, device: str, timeout: int) -> tuple[str, int]:
            return device, timeout

        with kind.pool(max_workers=2) as pool:
            assert pool.submit(solver, device="d", timeout=9).result(WAIT_S) == ("d", 9)

    def test_function_is_positional_only(self, kind: Kind) -> None:
        with kind.pool(max_workers=2) as pool, pytest.raises(TypeError):
            pool.submit(fn=abs)  # type: ignore[call-arg]


class TestCase05NothingKeptAlive:
    """https://github.com/agronholm/pythonfutures/issues/16, https://github.com/agronholm/pythonfutures/issues/32: an
    idle worker kept its last job, and through it the job's data.
    """

    @pytest.fixture(autouse=True)
    def no_collector(self) -> Iterator[None]:
        """Reference counting alone must be enough."""
        gc.collect()
        gc.disable()
        yield
        gc.enable()

    @pytest.mark.parametrize("where", ["cpu", "cuda"])
    def test_argument_and_result_die_while_the_pool_is_idle(self, kind: Kind, where: str) -> None:
        with kind.pool(max_workers=1) as pool:
            argument = torch.ones(1000)
            future = pool.submit(lambda x: x.to(where) * 2, argument)
            result = future.result(WAIT_S)
            references = [weakref.ref(argument), weakref.ref(result)]
            del argument, future, result
            assert _dead(references)

    def test_map_keeps_no_result_it_has_handed_out(self, kind: Kind) -> None:
        with kind.pool(max_workers=1) as pool:
            results = pool.map(torch.full_like, [torch.zeros(1000)] * 3, range(3))
            first = next(results)
            reference = weakref.ref(first)
            del first
            assert _dead([reference])
            assert [x[0].item() for x in results] == [1, 2]

    def test_failed_task_dies_with_its_future(self, kind: Kind) -> None:
        def fail(x: torch.Tensor) -> None:
            raise ValueError(x.shape)

        with kind.pool(max_workers=1) as pool:
            argument = torch.ones(1000)
            future = pool.submit(fail, argument)
            assert future.exception(WAIT_S) is not None
            reference = weakref.ref(argument)
            del argument, future
            assert _dead([reference])


class TestCase07BaseExceptions:
    """https://github.com/morganstanley/testplan/pull/74: sys.exit() in a job killed its worker, and the run hung."""

    class Stop(BaseException):
        pass

    @pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), Stop(), GeneratorExit()], ids=identity)
    def test_are_the_future_s_and_the_worker_goes_on(self, kind: Kind, error: BaseException) -> None:
        def throw() -> None:
            raise error

        with kind.pool(max_workers=1) as pool:
            assert pool.submit(throw).exception(WAIT_S) is error
            assert list(pool.map(str, range(3), timeout=WAIT_S)) == ["0", "1", "2"]
            assert pool.submit(threading.active_count).result(WAIT_S) >= 2
        error.__traceback__ = None

    def test_exit(self, kind: Kind) -> None:
        with kind.pool(max_workers=1) as pool:
            error = pool.submit(sys.exit, 3).exception(WAIT_S)
            assert isinstance(error, SystemExit)
            assert error.code == 3
            assert pool.submit(abs, -1).result(WAIT_S) == 1


class TestCase23NvmlNumbersCardsItsOwnWay:
    """https://github.com/gpuopenanalytics/pynvml/issues/28, https://github.com/OpenBioSim/somd2/issues/182,
    https://github.com/shootthesound/Fizgig/pull/105: memory was read from the wrong card.
    """

    FAKE = (
        "import types\n"
        "UUIDS = ['GPU-aaaa1111', 'GPU-bbbb2222', 'GPU-cccc3333']\n"
        "class NVMLError(Exception): pass\n"
        "def nvmlInit(): pass\n"
        "def nvmlDeviceGetCount(): return 3\n"
        "def nvmlDeviceGetHandleByIndex(i): return i\n"
        "def nvmlDeviceGetUUID(card): return UUIDS[card]\n"
        "def nvmlDeviceGetHandleByUUID(uuid): return UUIDS.index(uuid)\n"
        "def nvmlDeviceGetMemoryInfo(card):\n"
        "    return types.SimpleNamespace(total=1000, used=900 - 100 * card, free=100 * (card + 1))\n"
    )
    CODE = (
        "import itertools\n"
        "from managed_exec import GPUPoolExecutor\n"
        "from managed_exec.devices import nvml\n"
        "uuids = itertools.takewhile(bool, map(nvml.cuda_uuid, itertools.count()))\n"
        "print([nvml.memory(uuid).free_bytes for uuid in uuids])\n"
        "with GPUPoolExecutor() as pool: print([str(device.torch_device) for device in pool._devices])\n"
    )

    @pytest.mark.skipif(torch.cuda.device_count() > 2, reason="real cards would answer for the fake ones")
    @pytest.mark.parametrize(
        ("visible", "free_bytes"),
        [("2,0", [300, 100]), ("GPU-bbbb2222", [200]), ("GPU-cc,GPU-aa", [300, 100]), ("1,1", []), ("", [])],
    )
    def test_free_bytes_come_from_the_card_that_cuda_means(
        self, tmp_path: Path, visible: str, free_bytes: list[int]
    ) -> None:
        (tmp_path / "pynvml.py").write_text(self.FAKE)
        search_path = os.pathsep.join(filter(None, [str(tmp_path), *sys.path]))
        run = run_python(self.CODE, PYTHONPATH=search_path, CUDA_VISIBLE_DEVICES=visible)
        assert run.returncode == 0, run.stderr
        # CUDA has none of these cards, and for '1,1' and '' none at all: the pool falls back to the CPU.
        assert run.stdout.splitlines() == [str(free_bytes), "['cpu']"]


def _fail_in_the_body() -> None:
    raise ZeroDivisionError


def _fail_at_the_call() -> None:
    abs()  # type: ignore[call-arg]


def _exit() -> None:
    sys.exit(1)


def _run_out_of_memory() -> None:
    torch.ones(10**9, device="cuda")


def _break_the_device() -> None:
    sim.faults.break_device(current_task().device.index)


FAILURES: dict[str, tuple[Callable[[], object], type[BaseException]]] = {
    "error": (_fail_in_the_body, ZeroDivisionError),
    "wrong call": (_fail_at_the_call, TypeError),
    "exit": (_exit, SystemExit),
    "out of memory": (_run_out_of_memory, torch.OutOfMemoryError),
    "broken device": (_break_the_device, torch.AcceleratorError),
}


class TestCase25LoadGivenBack:
    """https://github.com/ray-project/ray/issues/1065, https://github.com/ROCm/spur/pull/450: what a failed task had
    booked stayed booked, and its device was avoided from then on.
    """

    @pytest.mark.parametrize("failure", FAILURES)
    def test_failures_leave_no_load_behind(self, simulator: Kind, failure: str) -> None:
        sim.enable(devices=2, memory="1MiB")
        task, error = FAILURES[failure]
        holds, all_started, two = [threading.Event(), threading.Event()], threading.Barrier(5), threading.Barrier(2)

        def device_index() -> int:
            current = current_task()
            assert current is not None
            return current.device.index

        def park() -> int:
            index = device_index()
            all_started.wait(WAIT_S)
            assert holds[index].wait(WAIT_S)
            return index

        def look() -> int:
            two.wait(WAIT_S)  # both run at once
            return device_index()

        with simulator.pool(max_workers=8) as pool:
            try:
                parked = [pool.submit(park) for _ in range(4)]
                all_started.wait(WAIT_S)
                holds[0].set()
                finished = as_completed(parked, timeout=WAIT_S)
                assert [next(finished).result(), next(finished).result()] == [0, 0]
                breaks = failure == "broken device"  # which is out of service then, though without load
                for _ in range(1 if breaks else 2):
                    assert isinstance(pool.submit(task).exception(WAIT_S), error)
                sim.faults.clear()
                assert [snapshot.running for snapshot in pool._loads.snapshots()] == [0, 2]
                looks = [pool.submit(look) for _ in range(2)]
                assert [future.result(WAIT_S) for future in looks] == [int(breaks)] * 2
            finally:
                for hold in holds:
                    hold.set()

    def test_cancelled_tasks_leave_none_either(self, simulator: Kind) -> None:
        gate, started = threading.Event(), threading.Event()
        with simulator.pool(max_workers=1) as pool:
            running = pool.submit(lambda: started.set() or gate.wait(WAIT_S))
            assert started.wait(WAIT_S)
            for future in [pool.submit(abs, 1) for _ in range(20)]:
                assert future.cancel()
            gate.set()
            assert running.result(WAIT_S)
            counts = pool.submit(lambda: [snapshot.running for snapshot in pool._loads.snapshots()]).result(WAIT_S)
        assert sorted(counts) == [0, 0, 0, 1]


def _dead(references: list[weakref.ref[torch.Tensor]]) -> bool:
    """Return whether all of them die soon, without the collector's help."""
    deadline = time.monotonic() + 5
    while any(reference() is not None for reference in references):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True
