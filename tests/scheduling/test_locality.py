"""A task goes where the tensors are that it is given, while that device is not overloaded."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from conftest import Kind, eventually

from managed_exec import GPUPoolExecutor, gpu_task
from managed_exec.memory.manager import configure
from managed_exec.memory.policy import MemoryPolicy
from managed_exec.scheduling.placement import DeviceSnapshot, PlacementRequest

WAIT_S = 30
MIB = 2**20


def place(*args: object, **kwargs: object) -> int:
    return torch.accelerator.current_device_index()


def on_device(index: int, megabytes: int = 2) -> torch.Tensor:
    return torch.ones(megabytes * MIB // 4, device=f"sim:{index}")


@pytest.mark.parametrize("memory", [None, False], ids=["managed", "unmanaged"])
@pytest.mark.parametrize("index", range(4))
class TestAlone:
    def test_plain_arguments(self, simulator: Kind, memory: bool | None, index: int) -> None:
        x = on_device(index)
        model = torch.nn.Linear(600, 900).to(f"sim:{index}")
        with simulator.pool(max_workers=1, memory=memory) as pool:
            for call in (
                partial(pool.submit, place, x),
                partial(pool.submit, place, 1, k=[{"x": (x,)}]),
                partial(pool.submit, partial(place, x)),
                partial(pool.submit, gpu_task(priority=1)(lambda y: place()), x),
                partial(pool.submit, place, model),
            ):
                assert call().result(WAIT_S) == index
        del x, model, call

    def test_results_of_earlier_tasks(self, simulator: Kind, memory: bool | None, index: int) -> None:
        with simulator.pool(max_workers=2, memory=memory) as pool:
            x = pool.submit(gpu_task(device=index)(lambda: torch.ones(MIB, device="cuda"))).result(WAIT_S)
            assert x.device.index == index
            assert [pool.submit(place, x).result(WAIT_S) for _ in range(5)] == [index] * 5
        del x


def test_not_if_the_device_is_overloaded(simulator: Kind) -> None:
    gate = threading.Event()
    places: list[int] = []

    def task(x: torch.Tensor) -> None:
        places.append(place())
        gate.wait(WAIT_S)

    x = on_device(2)
    with simulator.pool(max_workers=8) as pool:
        futures = [pool.submit(task, x) for _ in range(8)]
        assert eventually(lambda: len(places) == 8)
        counts = [places.count(i) for i in range(4)]
        gate.set()
        for future in futures:
            future.result(WAIT_S)
    assert counts[2] == 3, "one more than the others, never two more than the least"
    assert sorted(counts) == [1, 2, 2, 3]
    del x


def test_spilled_tensors_draw_nobody(simulator: Kind) -> None:
    configure(MemoryPolicy())
    with simulator.pool(max_workers=1) as pool:
        x = pool.submit(gpu_task(device=3)(lambda: torch.ones(MIB, device="cuda"))).result(WAIT_S)
        x.spill("host")
        assert pool.submit(gpu_task(device=1)(lambda: place(0))).result(WAIT_S) == 1
        assert pool.submit(place, x).result(WAIT_S) == 1, "the worker's last device"
        assert x.residency == "host"
        x.unspill()
        assert pool.submit(place, x).result(WAIT_S) == 3
    del x


def test_asked_for_device_comes_first(simulator: Kind) -> None:
    x = on_device(2)
    with simulator.pool(max_workers=1) as pool:
        assert pool.submit(gpu_task(device=0)(lambda y: place()), x).result(WAIT_S) == 0
    del x


def test_own_placement_is_told(simulator: Kind) -> None:
    seen: list[PlacementRequest] = []

    def placement(devices: Sequence[DeviceSnapshot], request: PlacementRequest) -> int:
        seen.append(request)
        return 1

    x, y = on_device(0), on_device(3, 4)
    with simulator.pool(max_workers=1, placement=placement) as pool:
        for args in ((x, y, torch.ones(5)), (1, "two"), (x,)):
            pool.submit(place, *args).result(WAIT_S)
        pool.submit(gpu_task(memory="3MiB")(lambda: place(0))).result(WAIT_S)
    assert [dict(request.local_bytes) for request in seen] == [{0: 2 * MIB, 3: 4 * MIB}, {}, {0: 2 * MIB}, {}]
    assert [request.expected_bytes for request in seen] == [0, 0, 0, 3 * MIB]
    del x, y, args


def test_devices_that_are_not_the_pool_s(simulator: Kind) -> None:
    x = on_device(3)
    with GPUPoolExecutor(1, devices=[0, 1]) as pool:
        assert pool.submit(place, x).result(WAIT_S) in (0, 1)
    del x
