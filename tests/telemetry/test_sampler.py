"""The sampler, step by step: its waiting is scripted, so that no test waits for a clock."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue

import pytest
import torch
from conftest import Kind, eventually, identity

from managed_exec.devices import DeviceMemory
from managed_exec.scheduling.loads import DeviceLoads
from managed_exec.scheduling.placement import least_loaded
from managed_exec.telemetry import sampler as sampler_module
from managed_exec.telemetry.sampler import PERIOD_S, DeviceSampler

WAIT_S = 30


class FakeDevice:
    """A device that notes when its memory is read, and may fail to tell."""

    is_accelerator = True

    def __init__(self, index: int, read_leaves_no_trace: bool = True) -> None:
        self.torch_device = torch.device("cuda", index)
        self.read_leaves_no_trace = read_leaves_no_trace
        self.reads = 0
        self.error: Exception | None = None
        self.on_read: Callable[[], object] = lambda: None

    def memory(self) -> DeviceMemory:
        self.reads += 1
        self.on_read()
        if self.error is not None:
            raise self.error
        return DeviceMemory(1000 - self.reads, 1000, self.reads)

    def utilization(self) -> float | None:
        return 0.5


class ScriptedQueue:
    """The sampler's queue, where the test decides when a period is over.

    ``waits`` gets the timeout of each ``get`` of the sampler, when it has sampled and begins to wait.
    """

    def __init__(self) -> None:
        self.queue: SimpleQueue[object] = SimpleQueue()
        self.waits: SimpleQueue[float | None] = SimpleQueue()

    def get(self, timeout: float | None) -> object:
        self.waits.put(timeout)
        item = self.queue.get(timeout=WAIT_S)
        if item == "period over":
            raise Empty
        return item

    def put(self, item: object) -> None:
        self.queue.put(item)

    def empty(self) -> bool:
        return self.queue.empty()


class Rig:
    """A sampler of fake devices in its thread."""

    def __init__(self, *devices: FakeDevice) -> None:
        self.devices = devices
        self.loads = DeviceLoads(devices, None, least_loaded)  # type: ignore[arg-type]
        self.sampler = DeviceSampler(devices, self.loads, "sampler")  # type: ignore[arg-type]
        self.wake = ScriptedQueue()
        self.sampler.wake = self.wake  # type: ignore[assignment]

    def start(self) -> float | None:
        self.sampler.thread.start()
        return self.wake.waits.get(timeout=WAIT_S)

    def next_wait(self) -> float | None:
        """Return how long the sampler waits after its next samples."""
        return self.wake.waits.get(timeout=WAIT_S)

    def period_over(self) -> float | None:
        self.wake.put("period over")
        return self.next_wait()

    def reads(self) -> list[int]:
        return [device.reads for device in self.devices]

    def stop(self) -> None:
        if self.sampler.thread.is_alive():
            self.wake.put(None)
            self.sampler.thread.join(WAIT_S)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig(FakeDevice(0), FakeDevice(1))
    yield rig
    rig.stop()


class TestSchedule:
    def test_samples_every_period_while_tasks_run_once_after_and_then_sleeps(self, rig: Rig) -> None:
        rig.loads.book(None)
        assert rig.wake.empty(), "it is only about to start: there is nobody to wake"
        assert rig.start() == PERIOD_S
        assert rig.period_over() == PERIOD_S
        assert rig.period_over() == PERIOD_S
        assert rig.reads() == [3, 3]
        rig.loads.give_back(0)
        assert rig.period_over() is None, "the sample after the last task, and then sleep"
        assert rig.reads() == [4, 4]

    def test_wakes_for_the_first_task_and_not_for_the_others(self, rig: Rig) -> None:
        assert rig.start() == PERIOD_S
        assert rig.period_over() is None
        first = rig.loads.book(None)
        assert rig.next_wait() == PERIOD_S
        reads = rig.reads()
        second = rig.loads.book(None)
        assert rig.wake.empty()
        assert rig.reads() == reads
        rig.loads.give_back(first)
        rig.loads.give_back(second)
        assert rig.period_over() == PERIOD_S, "the second came after the last sample began"
        assert rig.period_over() is None

    def test_task_that_comes_while_it_falls_asleep(self, rig: Rig) -> None:
        """Booked after the sampler last asked for tasks and before it waits: nobody else would wake it."""
        rig.start()
        rig.devices[1].on_read = lambda: rig.loads.book(None)
        assert rig.period_over() == PERIOD_S

    def test_many_short_tasks_wake_it_once(self, rig: Rig) -> None:
        """Each of them finds the pool idle; only the first may cost a change of threads."""
        rig.start()
        assert rig.period_over() is None
        reads = rig.reads()
        rig.loads.give_back(rig.loads.book(None))
        assert rig.next_wait() == PERIOD_S
        for _ in range(100):
            rig.loads.give_back(rig.loads.book(None))
        assert rig.wake.empty()
        assert rig.reads() == [count + 1 for count in reads]
        assert rig.period_over() == PERIOD_S, "tasks came and went since the last sample"
        assert rig.period_over() is None, "a period without a task"

    def test_asleep_it_reads_nothing(self, rig: Rig) -> None:
        rig.start()
        rig.period_over()
        reads = rig.reads()
        rig.loads.snapshots()
        rig.loads.give_back(rig.loads.book(None))
        assert rig.next_wait() in (PERIOD_S, None)
        assert rig.reads() == [count + 1 for count in reads]

    def test_end(self, rig: Rig) -> None:
        rig.start()
        rig.wake.put(None)
        rig.sampler.thread.join(WAIT_S)
        assert not rig.sampler.thread.is_alive()
        assert rig.reads() == [1, 1]

    def test_end_that_comes_right_behind_a_wake(self, rig: Rig) -> None:
        rig.start()
        rig.wake.put(True)
        rig.wake.put(None)
        rig.sampler.thread.join(WAIT_S)
        assert not rig.sampler.thread.is_alive()


class TestReadings:
    def test_reach_the_placement(self, rig: Rig) -> None:
        rig.start()
        assert [snapshot[3:6] for snapshot in rig.loads.snapshots()] == [(999, 1000, 0.5)] * 2

    @pytest.mark.parametrize(
        "error",
        [RuntimeError("gone"), torch.AcceleratorError("gone"), OSError("gone"), ValueError("gone")],
        ids=identity,
    )
    def test_device_that_cannot_be_read(self, rig: Rig, error: Exception) -> None:
        """The others are, its last figures stay, and it is tried again."""
        rig.loads.book(None)
        rig.start()
        rig.devices[0].error = error
        assert rig.period_over() == PERIOD_S
        assert [snapshot.free_bytes for snapshot in rig.loads.snapshots()] == [999, 998]
        rig.devices[0].error = None
        assert rig.period_over() == PERIOD_S
        assert [snapshot.free_bytes for snapshot in rig.loads.snapshots()] == [997, 997]

    def test_no_context_is_created_on_devices_nobody_used(self) -> None:
        rig = Rig(FakeDevice(0, read_leaves_no_trace=False), FakeDevice(1, read_leaves_no_trace=False), FakeDevice(2))
        rig.start()
        rig.period_over()
        assert rig.reads() == [0, 0, 2]
        position = rig.loads.book(1)
        assert position == 1
        rig.next_wait()
        assert rig.reads() == [0, 1, 3]
        rig.loads.give_back(position)
        rig.period_over()
        assert rig.reads() == [0, 2, 4], "once used, a device stays in view"
        rig.stop()


class TestInThePool:
    @pytest.fixture(autouse=True)
    def fast(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sampler_module, "PERIOD_S", 0.001)

    def samplers(self) -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name.endswith("_sampler")]

    def test_starts_with_the_first_task_and_ends_with_the_pool(self, simulator: Kind) -> None:
        pool = simulator.pool(max_workers=1, thread_name_prefix="solver")
        assert self.samplers() == []
        pool.submit(abs, 1).result(WAIT_S)
        assert [thread.name for thread in self.samplers()] == ["solver_sampler"]
        pool.shutdown()
        assert self.samplers() == []

    def test_ends_with_a_pool_that_is_not_waited_for(self, simulator: Kind) -> None:
        pool = simulator.pool(max_workers=1)
        pool.submit(abs, 1).result(WAIT_S)
        pool.shutdown(wait=False)
        assert eventually(lambda: not self.samplers())

    def test_ends_with_a_pool_nobody_holds(self, simulator: Kind) -> None:
        pool = simulator.pool(max_workers=2)
        pool.submit(abs, 1).result(WAIT_S)
        del pool
        assert eventually(lambda: not self.samplers())

    @pytest.mark.parametrize("devices", ["cpu", 1])
    def test_none_where_there_is_no_choice(self, simulator: Kind, devices: object) -> None:
        with simulator.pool(max_workers=1, devices=devices) as pool:
            pool.submit(abs, 1).result(WAIT_S)
            assert self.samplers() == []

    def test_shutdown_without_any_task(self, simulator: Kind) -> None:
        simulator.pool().shutdown()

    def test_figures_follow_the_memory_in_use(self, simulator: Kind) -> None:
        with simulator.pool(max_workers=1, placement="round-robin") as pool:
            held = pool.submit(lambda: torch.empty(2**20, dtype=torch.uint8, device="cuda")).result(WAIT_S)

            def shares() -> list[int | None]:
                return [
                    None if snapshot.free_bytes is None else snapshot.total_bytes - snapshot.free_bytes
                    for snapshot in pool._loads.snapshots()
                ]

            assert eventually(lambda: shares() == [2**20, 0, 0, 0])
            del held
            pool.submit(abs, 1).result(WAIT_S)
            assert eventually(lambda: shares() == [0, 0, 0, 0])

    def test_pools_side_by_side_have_their_own(self, simulator: Kind) -> None:
        with simulator.pool(max_workers=1) as first, simulator.pool(max_workers=1) as second:
            first.submit(abs, 1).result(WAIT_S)
            second.submit(abs, 1).result(WAIT_S)
            assert len(self.samplers()) == 2
            first.shutdown()
            assert len(self.samplers()) == 1
            assert second.submit(abs, -1).result(WAIT_S) == 1
