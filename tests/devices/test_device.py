"""The device protocol, the same on every kind of device."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable

import pytest
import torch
from conftest import SIMULATED_BYTES, Kind, eventually

from managed_exec import sim
from managed_exec.devices import AcceleratorDevice, CpuDevice, Device, DeviceMemory, nvml, resolve_devices
from managed_exec.devices import device as device_module

WAIT_S = 30


@pytest.fixture
def devices(kind: Kind) -> tuple[Device, ...]:
    return resolve_devices(None if kind.is_accelerator else "cpu")


def in_thread(function: Callable[[], object]) -> object:
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


class TestContract:
    def test_kind(self, kind: Kind, devices: tuple[Device, ...]) -> None:
        assert len(devices) == kind.device_count
        for i, device in enumerate(devices):
            assert device.is_accelerator is kind.is_accelerator
            assert device.torch_device == torch.device(kind.name, i if kind.is_accelerator else None)
            assert str(device.torch_device) in repr(device).lower()

    def test_memory_is_sane(self, devices: tuple[Device, ...]) -> None:
        for device in devices:
            memory = device.memory()
            assert isinstance(memory, DeviceMemory)
            assert all(isinstance(n_bytes, int) for n_bytes in memory)
            assert 0 < memory.free_bytes <= memory.total_bytes
            assert 0 <= memory.allocated_bytes <= memory.total_bytes

    def test_memory_moves_with_allocations(self, devices: tuple[Device, ...]) -> None:
        device, n_bytes = devices[-1], 48 * 2**20
        before = device.memory()
        if device.is_accelerator:
            held = torch.ones(n_bytes // 4, device=device.torch_device)
        else:
            # A mapping of its own: the C library may serve 48 MiB of resident memory that earlier tests freed again.
            held = torch.frombuffer(mmap.mmap(-1, n_bytes), dtype=torch.float32).fill_(1)
        during = device.memory()
        assert during.total_bytes == before.total_bytes
        # The process's resident memory, which stands for it on the CPU, also moves for other reasons.
        assert during.allocated_bytes - before.allocated_bytes == pytest.approx(n_bytes, rel=0.2)
        del held
        assert eventually(lambda: device.memory().allocated_bytes < before.allocated_bytes + n_bytes // 4)

    def test_utilization_is_unknown(self, devices: tuple[Device, ...]) -> None:
        assert [device.utilization() for device in devices] == [None] * len(devices)

    def test_reading_leaves_no_trace(self, devices: tuple[Device, ...]) -> None:
        assert all(device.read_leaves_no_trace for device in devices)

    def test_new_streams_are_each_their_own(self, devices: tuple[Device, ...]) -> None:
        for device in devices:
            if device.is_accelerator:
                streams = [device.new_stream(), device.new_stream(), device.current_stream()]
                assert len({stream.stream_id for stream in streams}) == 3
                assert {stream.device for stream in streams} == {device.torch_device}
            else:
                assert device.new_stream() is None

    def test_asking_for_streams_changes_no_current_device(self, devices: tuple[Device, ...]) -> None:
        before = devices[0].current_stream()
        for device in devices:
            device.new_stream()
            device.current_stream()
            device.memory()
        if before is not None:
            assert torch.accelerator.current_stream() == before

    def test_synchronize_and_empty_cache_with_nothing_to_do(self, devices: tuple[Device, ...]) -> None:
        for device in devices:
            held = torch.ones(1000, device=device.torch_device)
            device.synchronize()
            device.empty_cache()
            assert held.sum().item() == 1000


class TestStreams:
    def test_current_stream_is_the_thread_s(self, accelerator: Kind) -> None:
        device = resolve_devices()[1]
        default, other = device.current_stream(), device.new_stream()

        def task() -> list[torch.Stream]:
            seen = [device.current_stream()]
            torch.accelerator.set_stream(other)
            return [*seen, device.current_stream()]

        assert in_thread(task) == [default, other]
        assert device.current_stream() == default

    def test_synchronize_waits_for_every_stream(self, simulator: Kind) -> None:
        device = resolve_devices()[1]
        stream, done = device.new_stream(), threading.Event()
        source = torch.full((1000,), 7.0).pin_memory()
        target = torch.zeros(1000, device="sim:1")
        waiter = threading.Thread(target=lambda: device.synchronize() or done.set())
        with sim.hold_stream(stream):
            with stream:
                target.copy_(source, non_blocking=True)
            waiter.start()
            assert not done.wait(0.05)
            resolve_devices()[0].synchronize()  # another device has nothing to wait for
        assert done.wait(WAIT_S)
        waiter.join()
        assert target.eq(7).all()


class TestSimulatedMemory:
    def test_is_exact_and_each_device_s_own(self, simulator: Kind) -> None:
        first, second = resolve_devices(2)
        held = torch.empty(2**20, dtype=torch.uint8, device="sim:1")
        assert first.memory() == (SIMULATED_BYTES, SIMULATED_BYTES, 0)
        assert second.memory() == (SIMULATED_BYTES - 2**20, SIMULATED_BYTES, 2**20)
        del held
        assert second.memory() == (SIMULATED_BYTES, SIMULATED_BYTES, 0)

    def test_broken_device_says_so_when_waited_for(self, simulator: Kind) -> None:
        device = resolve_devices()[1]
        sim.faults.break_device(1)
        try:
            with pytest.raises(torch.AcceleratorError, match="sim:1"):
                device.synchronize()
            resolve_devices()[0].synchronize()
        finally:
            sim.faults.clear()


class TestCpuMemory:
    @pytest.fixture
    def no_proc(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A system without /proc."""

        def missing(*args: object, **kwargs: object) -> None:
            raise FileNotFoundError(args[0])

        monkeypatch.setattr("builtins.open", missing)

    @pytest.mark.usefixtures("no_proc")
    def test_without_proc(self) -> None:
        free_bytes, total_bytes, allocated_bytes = CpuDevice().memory()
        assert free_bytes == total_bytes > 0
        assert allocated_bytes == 0


class TestCudaMemory:
    """What a CUDA device makes of NVML's readings, with torch's and NVML's answers given."""

    @pytest.fixture(autouse=True)
    def allocator(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(device_module, "_allocator_bytes", lambda index: (30 + index, 50 + index))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (7, 1000))

    @pytest.fixture
    def device(self) -> AcceleratorDevice:
        return AcceleratorDevice(torch.device("cuda", 1))

    def test_unused_blocks_of_the_allocator_are_free(
        self, device: AcceleratorDevice, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(nvml, "cuda_uuid", lambda index: f"GPU-{index}")
        monkeypatch.setattr(nvml, "memory", {"GPU-1": nvml.NvmlMemory(400, 900)}.get)
        monkeypatch.setattr(nvml, "utilization", {"GPU-1": 0.25}.get)
        assert device.memory() == DeviceMemory(free_bytes=420, total_bytes=900, allocated_bytes=31)
        assert device.utilization() == 0.25
        assert device.read_leaves_no_trace

    def test_without_nvml_the_driver_is_asked_through_torch(
        self, device: AcceleratorDevice, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(nvml, "cuda_uuid", lambda index: None)
        assert device.memory() == DeviceMemory(free_bytes=27, total_bytes=1000, allocated_bytes=31)
        assert device.utilization() is None
        assert not device.read_leaves_no_trace, "mem_get_info creates a context"

    def test_a_reading_that_fails(self, device: AcceleratorDevice, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(nvml, "cuda_uuid", lambda index: "GPU-1")
        monkeypatch.setattr(nvml, "memory", lambda uuid: None)
        monkeypatch.setattr(nvml, "utilization", lambda uuid: None)
        assert device.memory() == DeviceMemory(free_bytes=27, total_bytes=1000, allocated_bytes=31)
        assert device.utilization() is None

    def test_uuid_is_asked_for_late_and_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[int] = []
        monkeypatch.setattr(nvml, "cuda_uuid", asked.append)
        device = AcceleratorDevice(torch.device("cuda", 2))
        assert asked == [], "the answer initialises CUDA"
        for _ in range(3):
            device.memory()
            device.utilization()
        assert asked == [2]
