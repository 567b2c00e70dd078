"""``cuda`` and ``to`` of managed tensors, outside tasks and in them."""

from __future__ import annotations

import threading

import pytest
import torch
from conftest import Kind

from managed_exec import GPUPoolExecutor, ManagedTensor, MemoryPolicy, manage, sim
from managed_exec.memory.manager import configure

WAIT_S = 30
POLICY = MemoryPolicy(min_bytes=1)


@pytest.fixture(autouse=True)
def everything() -> None:
    configure(POLICY)


def fresh() -> ManagedTensor:
    return torch.arange(6.0).as_subclass(ManagedTensor)


class TestOutsideATask:
    def test_on_the_cpu_it_copies(self) -> None:
        x = fresh()
        for moved in (x.cuda(), x.cuda("cuda"), x.cuda(disperse=True)):
            assert type(moved) is ManagedTensor
            assert (moved.device.type, moved.tolist()) == ("cpu", x.tolist())
            moved.add_(1)
            moved.spill("disk")
        assert x.tolist() == [0, 1, 2, 3, 4, 5]
        assert x.to("cuda") is x

    def test_devices(self, simulator: Kind) -> None:
        x = fresh()
        expected = {
            "sim:0": [x.cuda(), x.cuda("cuda"), x.to("cuda"), x.to(device="cuda"), x.cuda(torch.device("sim:0"))],
            "sim:2": [x.cuda(2), x.cuda("cuda:2"), x.cuda(device=torch.device("sim:2")), x.to("cuda:2"), x.to("sim:2")],
        }
        for device, moved in expected.items():
            for tensor in moved:
                assert type(tensor) is ManagedTensor
                assert (str(tensor.device), tensor.tolist()) == (device, x.tolist())
                assert tensor.spill("disk").tolist() == x.tolist()
                assert tensor.cuda(tensor.device) is tensor
        with pytest.raises(ValueError, match="not both"):
            x.cuda(1, disperse=True)

    def test_format_and_type(self, simulator: Kind) -> None:
        x = manage(torch.arange(24.0).reshape(1, 2, 3, 4))
        moved = x.cuda(memory_format=torch.channels_last, non_blocking=True)
        assert moved.is_contiguous(memory_format=torch.channels_last)
        assert moved.tolist() == x.tolist()
        assert x.to("cuda", torch.half, copy=True).dtype is torch.half
        assert x.to(torch.half).device.type == "cpu"

    def test_gradients_flow(self, simulator: Kind) -> None:
        x = torch.ones(3, requires_grad=True)
        (x.as_subclass(ManagedTensor).cuda(disperse=True) * 2).sum().backward()
        assert x.grad.tolist() == [2, 2, 2]

    def test_dispersed_tensors_spread(self, simulator: Kind) -> None:
        tensors = [torch.zeros(2**20).as_subclass(ManagedTensor).cuda(disperse=True) for _ in range(8)]
        assert sorted(tensor.device.index for tensor in tensors) == [0, 0, 1, 1, 2, 2, 3, 3]


class TestInATask:
    @pytest.mark.parametrize("memory", [None, POLICY], ids=["unmanaged", "managed"])
    def test_bare_cuda_is_the_task_s_device(self, simulator: Kind, memory: MemoryPolicy | None) -> None:
        def move() -> list[str]:
            x = fresh()
            return [str(t.device) for t in (x.cuda(), x.to("cuda"), x.cuda("cuda"), x.cuda(1), x.cuda("sim:2"))]

        with GPUPoolExecutor(1, devices=["sim:3"], memory=memory) as pool:
            assert pool.submit(move).result(WAIT_S) == ["sim:3", "sim:3", "sim:3", "sim:1", "sim:2"]

    def test_on_the_cpu_though_there_are_devices(self, simulator: Kind) -> None:
        def move() -> list[str]:
            x = fresh()
            return [str(t.device) for t in (x.cuda(), x.to("cuda"), x.cuda(disperse=True))]

        with GPUPoolExecutor(1, devices="cpu") as pool:
            assert pool.submit(move).result(WAIT_S) == ["cpu"] * 3

    def test_tasks_that_disperse_at_once(self, simulator: Kind) -> None:
        """Four tasks, all bound to one device, and each of four devices has room for one tensor."""
        sim.enable(devices=4, memory="1MiB")
        barrier = threading.Barrier(4)

        def move() -> ManagedTensor:
            x = torch.ones(150_000).as_subclass(ManagedTensor)
            barrier.wait(WAIT_S)
            return x.cuda(disperse=True)

        with GPUPoolExecutor(4, devices=["sim:0"], memory=POLICY) as pool:
            results = [future.result(WAIT_S) for future in [pool.submit(move) for _ in range(4)]]
        assert sorted(tensor.device.index for tensor in results) == [0, 1, 2, 3]
        assert all(tensor.sum().item() == 150_000 for tensor in results)


class TestData:
    def test_setting_data_keeps_the_bytes(self, simulator: Kind) -> None:
        """The new storage stays managed, also where its only other handle goes while its bytes are in a tier."""
        x = manage(torch.zeros(3)).to("sim:0")
        y = manage(torch.arange(3.0)).to("sim:0").spill("disk")
        x.data = y
        assert x.is_registered
        del y
        assert x.tolist() == [0, 1, 2]
        x.spill("disk")
        x.data = x
        assert x.residency == "disk"
        assert x.tolist() == [0, 1, 2]
