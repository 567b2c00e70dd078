"""A device that breaks is taken out of service: it attracts no task any more, and nothing waits for it."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

import pytest
import torch
from conftest import Kind, eventually, identity
from test_loads import make_loads, running

from managed_exec import GPUPoolExecutor, current_task, gpu_task, sim
from managed_exec.errors import DeviceOutOfServiceError
from managed_exec.memory.manager import manager
from managed_exec.options import Need
from managed_exec.scheduling.placement import DeviceSnapshot, Placement, PlacementRequest

WAIT_S = 30
MIB = 2**20


def last_one(devices: Sequence[DeviceSnapshot], request: PlacementRequest) -> int:
    """Insist on the device with the highest position."""
    return devices[-1].position


def compute(i: int = 1) -> tuple[int, float]:
    """Return the task's device and what it has computed there."""
    return current_task().device.index, torch.full((4,), float(i), device="cuda").sum().item()


@gpu_task()
def compute_where(i: int = 1) -> tuple[int, float]:
    """Do the same, where ``options`` say."""
    return compute(i)


@gpu_task()
def abs_of(x: int) -> int:
    return abs(x)


class Gate:
    """A task that breaks its device when it is told to, and fails there."""

    def __init__(self) -> None:
        self.started, self.open = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.started.set()
        assert self.open.wait(WAIT_S)
        sim.faults.break_device(current_task().device.index)
        compute()


@pytest.fixture
def devices(simulator: Kind) -> Iterator[Kind]:
    """Four simulated devices, mended afterwards."""
    yield simulator
    sim.faults.clear()


def submit_gate(pool: GPUPoolExecutor, **options: object) -> tuple[Gate, Future[None]]:
    gate = Gate()
    future = pool.submit(gpu_task(**options)(gate))  # type: ignore[call-overload]
    assert gate.started.wait(WAIT_S)
    return gate, future


def break_in_a_task(pool: GPUPoolExecutor, index: int) -> None:
    gate, future = submit_gate(pool, device=index)
    gate.open.set()
    assert type(future.exception(WAIT_S)) is torch.AcceleratorError


class TestPool:
    @pytest.mark.parametrize("placement", ["least-loaded", "round-robin", "pack", last_one])
    def test_attracts_no_more_tasks(
        self, devices: Kind, placement: str | Placement, caplog: pytest.LogCaptureFixture
    ) -> None:
        with devices.pool(max_workers=4, placement=placement) as pool:
            break_in_a_task(pool, 3)
            results = [future.result(WAIT_S) for future in [pool.submit(compute, i) for i in range(100)]]
        assert [value for _, value in results] == [4.0 * i for i in range(100)]
        assert 3 not in {index for index, _ in results}
        assert caplog.text.count("device out of service: sim:3 since ") == 1

    def test_task_for_it_alone_fails_with_the_reason(self, devices: Kind) -> None:
        with devices.pool(max_workers=4) as pool:
            break_in_a_task(pool, 2)
            error = pool.submit(compute_where.options(device=2)).exception(WAIT_S)
            assert type(error) is DeviceOutOfServiceError
            assert isinstance(error, torch.AcceleratorError)
            when = r"sim:2 since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
            assert re.search(
                rf"{when}, when task 0 failed with AcceleratorError: sim error: device sim:2 is", str(error)
            )
            assert pool.submit(compute_where.options(device=lambda d: d.index in (1, 2))).result(WAIT_S)[0] == 1

    @pytest.mark.parametrize("options", [{"device": 1}, {"device": 1, "memory": "60MiB"}], ids=identity)
    def test_nothing_waits_for_it(self, devices: Kind, options: dict[str, object]) -> None:
        """Also not what waited before it broke, for room or for the task that ran there."""
        with devices.pool(max_workers=8, tasks_per_device=1) as pool:
            gate, future = submit_gate(pool, **options)
            held = [pool.submit(abs_of.options(**options), i) for i in range(5)]
            assert eventually(lambda: pool._tasks._held)
            gate.open.set()
            assert [type(f.exception(WAIT_S)) for f in held] == [DeviceOutOfServiceError] * 5
            assert type(future.exception(WAIT_S)) is torch.AcceleratorError
            assert not pool._tasks._held

    def test_more_memory_than_the_others_have(self, devices: Kind) -> None:
        sim.set_capacity(0, 16 * MIB)
        with devices.pool(max_workers=2, devices=2) as pool:
            gate, _ = submit_gate(pool, device=1, memory="40MiB")
            held = pool.submit(abs_of.options(memory="30MiB"), -1)
            assert eventually(lambda: pool._tasks._held)
            gate.open.set()
            assert isinstance(held.exception(WAIT_S), DeviceOutOfServiceError)
            assert pool.submit(abs_of.options(memory="16MiB"), -1).result(WAIT_S) == 1

    def test_kept_for_a_task_that_then_goes_elsewhere(self, devices: Kind) -> None:
        """The device that was kept free for it breaks; it runs on the other."""
        with devices.pool(max_workers=3, devices=2) as pool:
            gate, _ = submit_gate(pool, device=0, memory="40MiB")
            other = threading.Event()
            blocker = pool.submit(gpu_task(device=1, memory="41MiB")(lambda: other.wait(WAIT_S)))
            large = pool.submit(gpu_task(memory="60MiB")(lambda: current_task().device.index))
            for i in range(20):
                pool.submit(abs, i).result(WAIT_S)
                if pool._loads._kept_for:
                    break
            assert list(pool._loads._kept_for) == [0]
            gate.open.set()
            other.set()
            assert large.result(WAIT_S) == 1
            assert blocker.result(WAIT_S)
            assert [future.result(WAIT_S) for future in [pool.submit(abs, -1) for _ in range(50)]] == [1] * 50

    def test_no_device_left(self, devices: Kind) -> None:
        with devices.pool(max_workers=4, devices=2) as pool:
            gates = [submit_gate(pool, device=i) for i in range(2)]
            blocked = [pool.submit(abs_of.options(device=i % 2, memory="64MiB"), i) for i in range(6)]
            for gate, _ in gates:
                gate.open.set()
            for _, future in gates:
                assert type(future.exception(WAIT_S)) is torch.AcceleratorError
            for future in [pool.submit(compute) for _ in range(50)]:
                assert type(future.exception(WAIT_S)) is DeviceOutOfServiceError
            for future in blocked:  # they ran while there was a device, or failed on it, or were refused
                assert isinstance(future.exception(WAIT_S), (torch.AcceleratorError, type(None)))
            error = pool.submit(abs, -1).exception(WAIT_S)
            assert isinstance(error, DeviceOutOfServiceError)
            assert "sim:0 since" in str(error)
            assert "sim:1 since" in str(error)
            assert [snapshot.running for snapshot in pool._loads.snapshots()] == [0, 0]

    def test_error_of_the_task_s_own_making(self, devices: Kind) -> None:
        """The device is asked, and answers."""

        def task() -> None:
            raise torch.AcceleratorError("of a wrong index, on some backends")

        with devices.pool(max_workers=1, devices=1) as pool:
            assert isinstance(pool.submit(task).exception(WAIT_S), torch.AcceleratorError)
            assert pool.submit(compute).result(WAIT_S) == (0, 4.0)

    def test_full_device_is_no_broken_one(self, devices: Kind) -> None:
        def task() -> None:
            held.append(torch.empty(64 * MIB, dtype=torch.uint8, device="cuda"))
            raise torch.AcceleratorError("no")

        held: list[torch.Tensor] = []
        with devices.pool(max_workers=1, devices=1, memory=False) as pool:
            assert isinstance(pool.submit(task).exception(WAIT_S), torch.AcceleratorError)
            held.clear()
            assert pool.submit(compute).result(WAIT_S) == (0, 4.0)

    def test_error_of_the_task_before_the_device_s(self, devices: Kind) -> None:
        """The task failed by itself; what its device reported besides is heard."""

        def task() -> None:
            sim.faults.break_device(current_task().device.index)
            raise ValueError("mine")

        with devices.pool(max_workers=1, devices=1) as pool:
            assert isinstance(pool.submit(task).exception(WAIT_S), ValueError)
            error = pool.submit(abs, -1).exception(WAIT_S)
        assert isinstance(error, DeviceOutOfServiceError)
        assert "when task 0 failed with AcceleratorError" in str(error)

    def test_error_of_another_device(self, devices: Kind) -> None:
        """A task that meets the broken one by its number does not cost its own device."""
        with devices.pool(max_workers=1, devices=2) as pool:
            kept = [pool.submit(gpu_task(device=0)(lambda: torch.ones(4, device="cuda"))).result(WAIT_S)]
            assert pool.submit(compute_where.options(device=1)).result(WAIT_S) == (1, 4.0)
            sim.faults.break_device(0)
            failing = pool.submit(gpu_task(device=1)(lambda: kept[0].sum().item()))
            assert isinstance(failing.exception(WAIT_S), torch.AcceleratorError)
            assert [future.result(WAIT_S)[0] for future in [pool.submit(compute) for _ in range(20)]] == [1] * 20
            kept.clear()

    def test_memory_is_moved_there_no_more(self, devices: Kind) -> None:
        zero, one = torch.device("sim:0"), torch.device("sim:1")
        with devices.pool(max_workers=2, devices=2) as pool:
            limits = manager().limits
            assert one in limits.peers(zero)
            break_in_a_task(pool, 1)
            assert one not in limits.peers(zero)
        sim.faults.clear()
        with devices.pool(devices=2):
            assert one in limits.peers(zero), "a new pool comes with it again"

    def test_many_at_once(self, devices: Kind) -> None:
        """Tasks of many workers meet the broken device together: each fails or runs elsewhere, and none hangs."""
        with devices.pool(max_workers=8) as pool:
            together = threading.Barrier(8)

            def task(i: int) -> tuple[int, float]:
                if i < 8:
                    together.wait(WAIT_S)
                    if current_task().device.index in (0, 1):
                        sim.faults.break_device(current_task().device.index)
                return compute(i)

            futures = [pool.submit(task, i) for i in range(200)]
            errors = [future.exception(WAIT_S) for future in futures]
            assert sum(error is not None for error in errors) <= 16, "but those that were there, or about to be"
            assert {type(error) for error in errors} == {torch.AcceleratorError, type(None)}
            done = {f.result()[0] for f, error in zip(futures[8:], errors[8:], strict=True) if error is None}
            assert done >= {2, 3}
            assert [snapshot.running for snapshot in pool._loads.snapshots()] == [0] * 4
            del errors, futures


class TestLoads:
    def test_taken_out_once(self) -> None:
        loads = make_loads(2)
        assert loads.take_out(1, "cuda:1 since then")
        assert not loads.take_out(1, "cuda:1 since later")
        assert [loads.book(None) for _ in range(4)] == [0] * 4
        with pytest.raises(DeviceOutOfServiceError, match="cuda:1 since then"):
            loads.book(None, Need(allowed=frozenset({1})))

    @pytest.mark.parametrize("placement", [last_one, "least-loaded"])
    def test_none_left(self, placement: str | Placement) -> None:
        from managed_exec.config import checked_placement

        loads = make_loads(1, placement=checked_placement(placement))
        loads.book(None)
        loads.take_out(0, "cuda:0 since then")
        with pytest.raises(DeviceOutOfServiceError):
            loads.book(None)
        assert loads.has_room(Need()), "there is nothing to wait for"
        loads.give_back(0)
        assert running(loads) == [0]

    def test_full_is_not_hopeless(self) -> None:
        loads = make_loads(2, tasks_per_device=1)
        loads.take_out(0, "cuda:0")
        need = Need()
        assert loads.book(None, need) == 1
        assert loads.book(None, need) is None
        assert not loads.has_room(need)

    def test_neither_kept_nor_moved_to(self) -> None:
        loads = make_loads(2)
        loads.take_out(0, "cuda:0")
        loads.keep_for(need := Need(allowed=frozenset({0, 1})))
        assert loads.book(None) is None, "the other is kept"
        assert loads.book(None, need) == 1
        assert not loads.move(1, 0)

    def test_place_and_bytes_are_given_back_apart(self) -> None:
        loads = make_loads(1)
        loads._capacity_bytes = lambda position: 100
        need = Need(n_bytes=60)
        assert loads.book(None, need) == 0
        loads.give_back_place(0, need)
        assert (running(loads), loads.snapshots()[0].reserved_bytes) == ([0], 60)
        assert loads.book(None, Need(n_bytes=41)) is None
        loads.give_back_bytes(0, need)
        assert loads.snapshots()[0].reserved_bytes == 0
        assert loads.book(None, Need(n_bytes=41)) == 0
