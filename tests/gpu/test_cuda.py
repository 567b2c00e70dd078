"""The order of device work, and readings of the card, shown with CUDA's own means: on a real GPU only.

A kernel that spins (``torch.cuda._sleep``) keeps a stream busy. Each test first runs what it will queue behind such a
kernel, because CUDA loads a kernel on its first use, which may wait for the whole device.
"""

from __future__ import annotations

import concurrent.futures
import os
import threading
import time

import pytest
import torch
from conftest import Kind, eventually, run_python

from managed_exec import current_task
from managed_exec.devices import AcceleratorDevice, nvml

from .conftest import HAS_GPU, WHY_NOT

if not (HAS_GPU and torch.cuda.is_available()):
    pytest.skip("only for CUDA" if HAS_GPU else WHY_NOT, allow_module_level=True)

WAIT_S = 60
CYCLES_PER_S = 2e9  # about a GPU's highest clock, so that `occupy` takes at least as long as it says
SIZE = 1000


def occupy(seconds: float) -> None:
    """Queue a kernel that spins for at least *seconds* on the current stream."""
    torch.cuda._sleep(int(seconds * CYCLES_PER_S))


def own_stream() -> torch.Stream:
    current = current_task()
    assert current is not None
    assert current.stream is not None
    return current.stream


@pytest.fixture(autouse=True)
def kernels_loaded(cuda: Kind) -> None:
    for i in range(cuda.device_count):
        with torch.cuda.device(i):
            occupy(1e-6)
            torch.full((SIZE,), 7.0, device="cuda").clone().add_(1).fill_(2).cpu()
            torch.cuda.synchronize()


class TestOrder:
    def test_future_is_done_when_the_device_work_is(self, cuda: Kind) -> None:
        returned: list[float] = []
        streams: list[torch.Stream] = []

        def task() -> torch.Tensor:
            streams.append(own_stream())
            occupy(0.5)
            result = torch.full((SIZE,), 7.0, device="cuda")
            returned.append(time.perf_counter())
            return result

        with cuda.pool(max_workers=1, devices=1) as pool:
            future = pool.submit(task)
            assert eventually(lambda: returned)
            with pytest.raises(concurrent.futures.TimeoutError):
                future.result(timeout=0.05)
            result = future.result(WAIT_S)
            done = time.perf_counter()
            assert streams[0].query()
            with torch.cuda.stream(torch.cuda.Stream(0)):  # a stream that nothing makes wait for the task's
                assert result.cpu().eq(7).all()
        assert done - returned[0] > 0.2

    def test_failed_task_s_device_work_is_waited_for(self, cuda: Kind) -> None:
        streams: list[torch.Stream] = []

        def task() -> None:
            streams.append(own_stream())
            occupy(0.3)
            raise ValueError("mine")

        with cuda.pool(max_workers=1, devices=1) as pool:
            assert str(pool.submit(task).exception(WAIT_S)) == "mine"
            assert streams[0].query()

    def test_work_left_on_another_device_is_waited_for(self, cuda: Kind) -> None:
        if cuda.device_count < 2:
            pytest.skip("one GPU")

        def task() -> torch.Tensor:
            with torch.cuda.device(1):
                occupy(0.3)
            return torch.full((SIZE,), 7.0, device="cuda:1")

        default = torch.cuda.current_stream(1)
        with cuda.pool(max_workers=1, devices=2, placement="pack") as pool:
            result = pool.submit(task).result(WAIT_S)
            assert default.query()
        assert result.cpu().eq(7).all()

    def test_task_waits_for_what_the_submitter_queued(self, cuda: Kind) -> None:
        target = torch.zeros(SIZE, device="cuda:0")
        submitter = torch.cuda.Stream(0)
        with cuda.pool(max_workers=1, devices=1) as pool:
            pool.submit(target.clone).result(WAIT_S)  # the worker has its stream and a block
            with torch.cuda.stream(submitter):
                occupy(0.5)
                target.fill_(7)
                future = pool.submit(target.clone)
                assert not submitter.query(), "the stream was to be busy still; the test shows nothing"
            assert future.result(WAIT_S).cpu().eq(7).all()

    def test_result_dropped_while_its_reader_is_busy(self, cuda: Kind) -> None:
        """The block of a result is not handed out again while the stream that reads it still does."""
        reader = torch.cuda.Stream(0)
        target = torch.zeros(SIZE, device="cuda:0")
        with cuda.pool(max_workers=1, devices=1) as pool:
            with torch.cuda.stream(reader):
                result = pool.submit(lambda: {"x": [torch.full((SIZE,), 7.0, device="cuda")]}).result(WAIT_S)
                occupy(0.5)
                target.copy_(result["x"][0])
            del result
            other = pool.submit(lambda: torch.full((SIZE,), 9.0, device="cuda")).result(WAIT_S)
            assert not reader.query(), "the stream was to be busy still; the test shows nothing"
        reader.synchronize()
        assert target.eq(7).all()
        assert other.eq(9).all()

    def test_tasks_on_one_device_overlap(self, cuda: Kind) -> None:
        def task() -> None:
            occupy(0.2)

        with cuda.pool(max_workers=4, devices=1) as pool:
            list(pool.map(lambda _: own_stream().query(), range(4)))
            start = time.perf_counter()
            pool.submit(task).result(WAIT_S)
            alone_s = time.perf_counter() - start
            start = time.perf_counter()
            for future in [pool.submit(task) for _ in range(4)]:
                future.result(WAIT_S)
            together_s = time.perf_counter() - start
        assert together_s < 2.5 * alone_s


class TestTorchCuda:
    """``torch.cuda`` in a task speaks of the task's device and stream."""

    def test_current_device_and_stream(self, cuda: Kind) -> None:
        def task() -> None:
            current = current_task()
            assert current is not None
            assert torch.cuda.current_device() == current.device.index
            assert torch.cuda.current_stream().stream_id == own_stream().stream_id
            assert torch.empty(1, device="cuda").device == current.device

        with cuda.pool(max_workers=2 * cuda.device_count) as pool:
            for future in [pool.submit(task) for _ in range(8 * cuda.device_count)]:
                future.result(WAIT_S)

    def test_what_a_task_sets_is_set_back(self, cuda: Kind) -> None:
        seen: list[tuple[int, int]] = []

        def state() -> tuple[int, int]:
            return torch.cuda.current_device(), torch.cuda.current_stream().stream_id

        def vandal(gate: threading.Event) -> None:
            assert gate.wait(WAIT_S)
            last = cuda.device_count - 1
            torch.cuda.set_device(last)
            torch.cuda.set_stream(torch.cuda.Stream(last))

        with cuda.pool(max_workers=1, devices=1) as pool:
            for _ in range(2):
                gate = threading.Event()
                future = pool.submit(vandal, gate)
                future.add_done_callback(lambda _: seen.append(state()))
                gate.set()
                future.result(WAIT_S)
            assert pool.submit(lambda: torch.cuda.current_stream().stream_id == own_stream().stream_id).result(WAIT_S)
        default = torch.cuda.default_stream(0).stream_id
        assert seen == [(0, default)] * 2


class TestReadings:
    @pytest.fixture(autouse=True)
    def has_nvml(self) -> None:
        if nvml.session() is None:
            pytest.skip("NVML cannot be used here")
        if "MIG-" in os.environ.get("CUDA_VISIBLE_DEVICES", ""):
            pytest.skip("MIG instances")

    @staticmethod
    def uuid(index: int) -> str:
        """Return CUDA's own name for a card, as NVML writes it."""
        return "GPU-" + str(torch.cuda.get_device_properties(index).uuid).removeprefix("GPU-")

    def test_uuids_are_cuda_s(self, cuda: Kind) -> None:
        uuids = [self.uuid(i) for i in range(cuda.device_count)]
        assert [nvml.cuda_uuid(i) for i in range(cuda.device_count)] == uuids
        predicted = nvml.visible_uuids(os.environ.get("CUDA_VISIBLE_DEVICES"))
        assert sorted(predicted) == sorted(uuids)
        models = {torch.cuda.get_device_name(i) for i in range(cuda.device_count)}
        if len(models) == 1 or os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
            assert predicted == uuids

    def test_visible_devices_are_renumbered(self, cuda: Kind) -> None:
        """With the last card alone visible, it is device 0, for NVML's readings too, before CUDA is initialised."""
        last = self.uuid(cuda.device_count - 1)
        code = (
            "import os, torch\n"
            "from managed_exec.devices import nvml\n"
            "print(nvml.visible_uuids(os.environ['CUDA_VISIBLE_DEVICES']), torch.cuda.is_initialized())\n"
            "print(nvml.cuda_uuid(0), torch.cuda.device_count())\n"
        )
        run = run_python(code, CUDA_VISIBLE_DEVICES=last)
        assert run.stdout.splitlines() == [f"['{last}'] False", f"{last} 1"], run.stdout + run.stderr

    def test_memory_agrees_with_cuda_s(self, cuda: Kind) -> None:
        for i in range(cuda.device_count):
            device = AcceleratorDevice(torch.device("cuda", i))
            free, total = torch.cuda.mem_get_info(i)
            cached = torch.cuda.memory_reserved(i) - torch.cuda.memory_allocated(i)
            tolerance = max(2**30, total // 50)  # NVML counts what the driver keeps for itself, CUDA does not
            memory = device.memory()
            assert memory.free_bytes == pytest.approx(free + cached, abs=tolerance)
            assert memory.total_bytes == pytest.approx(total, abs=tolerance)
            assert memory.allocated_bytes == torch.cuda.memory_allocated(i)

    def test_memory_follows_allocations(self, cuda: Kind) -> None:
        device = AcceleratorDevice(torch.device("cuda", 0))
        torch.cuda.empty_cache()
        before = device.memory()
        size = min(2**30, before.free_bytes // 4)
        block = torch.empty(size, dtype=torch.uint8, device="cuda:0")
        held = device.memory()
        del block
        after = device.memory()
        torch.cuda.empty_cache()
        assert before.free_bytes - held.free_bytes == pytest.approx(size, rel=0.25)
        assert held.allocated_bytes - before.allocated_bytes >= size
        assert after.free_bytes == pytest.approx(before.free_bytes, abs=size // 4), "cached blocks count as free"

    def test_utilization_is_a_share(self, cuda: Kind) -> None:
        reading = AcceleratorDevice(torch.device("cuda", 0)).utilization()
        assert reading is None or 0 <= reading <= 1
