"""Copies to and from the tiers hold nobody up: kernels, other copies and all that the manager is asked for go on.

Shown by events. A copy is stopped in the middle: its stream is held, with another copy queued before it. Whatever then
comes to its end has not waited for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import pytest
import torch
from conftest import Kind, eventually
from halted import out_stream, renew_copy_streams, start, stopped

from managed_exec import sim
from managed_exec.memory.manager import MemoryManager, configure
from managed_exec.memory.policy import MemoryPolicy
from managed_exec.memory.record import Residency
from managed_exec.tensors.managed import ManagedTensor, manage

WAIT_S = 30
DEVICE_BYTES = 2 * 2**20
ELEMENTS = 2**16  # of most tensors here: an eighth of a device


@pytest.fixture
def devices(simulator: Kind) -> MemoryManager:
    """The manager of two simulated devices of 2 MiB."""
    sim.enable(devices=2, memory=DEVICE_BYTES)
    made = configure(MemoryPolicy(min_bytes=1024, wait_s=WAIT_S))
    renew_copy_streams()
    return made


def on_device(value: float, index: int = 0, elements: int = ELEMENTS) -> ManagedTensor:
    return manage(torch.full((elements,), value)).to(f"sim:{index}")


@contextmanager
def spill_in_the_middle(tensor: ManagedTensor, tier: str = "host") -> Iterator[Future[ManagedTensor]]:
    """Have *tensor* on its way out in the body, in another thread, and out after it."""
    with stopped(out_stream(tensor.device.index)):
        spill = start(tensor.spill, tier)
        assert eventually(lambda: tensor.residency == "leaving")
        yield spill
        assert tensor.residency == "leaving"
        assert not spill.done()
    spill.result(WAIT_S)


@contextmanager
def unspill_in_the_middle(tensor: ManagedTensor) -> Iterator[None]:
    """Have the spilled *tensor* on its way back in the body, in another thread and a stream of its own."""
    stream = torch.Stream(tensor.device)

    def unspill() -> None:
        with stream:
            tensor.unspill()

    with stopped(stream):
        back = start(unspill)
        assert eventually(lambda: tensor.residency == "returning")
        yield
        assert tensor.residency == "returning"
        assert not back.done()
    back.result(WAIT_S)
    assert tensor.residency == "device"


def train(steps: int = 3) -> float:
    """Run many kernels, forward and backward, and copies of both directions."""
    weight = torch.ones(64, 64, device="cuda", requires_grad=True)
    x = torch.ones(16, 64).to("cuda")
    for _ in range(steps):
        loss = (x @ weight).square().mean()
        loss.backward()
        with torch.no_grad():
            weight -= 0.001 * weight.grad
            weight.grad = None
    return loss.item()


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_kernels_of_another_task_run_while_a_tensor_is_spilled(devices: MemoryManager, tier: str) -> None:
    with Kind("sim").pool(max_workers=1, devices=["sim:0"], memory=devices.policy) as pool:
        expected = pool.submit(train).result(WAIT_S)
        a = on_device(1.0)
        with spill_in_the_middle(a, tier):
            assert pool.submit(train).result(WAIT_S) == expected
    assert bool((a == 1).all())


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_kernels_of_another_task_run_while_a_tensor_comes_back(devices: MemoryManager, tier: str) -> None:
    with Kind("sim").pool(max_workers=1, devices=["sim:0"], memory=devices.policy) as pool:
        expected = pool.submit(train).result(WAIT_S)
        a = on_device(1.0).spill(tier)
        with unspill_in_the_middle(a):
            assert pool.submit(train).result(WAIT_S) == expected
    assert bool((a == 1).all())


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("other_tier", ["host", "disk"])
def test_a_tensor_comes_back_while_another_is_spilled(devices: MemoryManager, tier: str, other_tier: str) -> None:
    a, b = on_device(1.0), on_device(2.0).spill(other_tier)
    with spill_in_the_middle(a, tier):
        assert start(b.unspill).result(WAIT_S).residency == "device"
        assert start(b.sum).result(WAIT_S).item() == 2 * ELEMENTS
    assert a.sum().item() == ELEMENTS


def test_a_tensor_is_spilled_while_another_comes_back(devices: MemoryManager) -> None:
    a, b = on_device(1.0).spill(), on_device(2.0)
    with unspill_in_the_middle(a):
        assert start(b.spill).result(WAIT_S).residency == "host"
        assert start(b.spill, "disk").result(WAIT_S).residency == "disk", "it came back in between"
    assert (a.sum().item(), b.sum().item()) == (ELEMENTS, 2 * ELEMENTS)


def test_two_tensors_come_back_at_once(devices: MemoryManager) -> None:
    a, b = on_device(1.0).spill(), on_device(2.0).spill()
    with unspill_in_the_middle(a):
        assert start(b.sum).result(WAIT_S).item() == 2 * ELEMENTS
    assert a.sum().item() == ELEMENTS


def test_another_device_spills_meanwhile(devices: MemoryManager) -> None:
    """Its own tensors when asked to, and the coldest of them when a task wants more than it has."""
    a, b = on_device(1.0, 0), on_device(2.0, 1)

    def twice_the_device() -> list[float]:
        parts = [torch.full((ELEMENTS,), float(i), device="cuda") for i in range(2 * DEVICE_BYTES // (4 * ELEMENTS))]
        return [part.mean().item() for part in parts]

    with spill_in_the_middle(a):
        assert start(b.spill, "host").result(WAIT_S).residency == "host"
        with Kind("sim").pool(max_workers=1, devices=["sim:1"], memory=devices.policy) as pool:
            assert pool.submit(twice_the_device).result(WAIT_S) == list(range(16))
    assert (a.sum().item(), b.sum().item()) == (ELEMENTS, 2 * ELEMENTS)


def test_no_lock_is_held_while_bytes_are_copied(devices: MemoryManager) -> None:
    """Whatever the manager can be asked for, by another thread and about other tensors, is answered."""
    a, b, c = on_device(1.0), on_device(2.0).spill(), on_device(3.0)
    stored = manage(torch.arange(1000.0))

    def everything() -> float:
        assert devices.statistics().spilled_count["host"] >= 1
        new = manage(torch.ones(ELEMENTS)).to("sim:0")
        new += c
        assert new.pin().pinned
        assert not new.unpin().pinned
        with new.hold() as plain:
            plain.mul_(2)
        assert stored.spill("disk").residency == "disk"
        assert stored.sum().item() == 999 * 500
        assert (a.residency, b.residency) == ("leaving", "returning")
        assert a.shape == b.shape
        return new.mean().item()

    with spill_in_the_middle(a), unspill_in_the_middle(b):
        assert start(everything).result(WAIT_S) == 8
    assert (a.sum().item(), b.sum().item()) == (ELEMENTS, 2 * ELEMENTS)


def test_a_task_without_room_holds_up_those_without_room_alone(devices: MemoryManager) -> None:
    """While one spills for want of room, those that have room compute; those that have none wait for their turn."""
    a = on_device(1.0, elements=5 * ELEMENTS)
    with Kind("sim").pool(max_workers=3, devices=["sim:0"], memory=devices.policy) as pool:

        def large() -> float:
            return torch.full((4 * ELEMENTS,), 2.0, device="cuda").mean().item()

        expected = pool.submit(train).result(WAIT_S)
        with stopped(out_stream()):
            without_room = [pool.submit(large)]
            assert eventually(lambda: a.residency == "leaving")
            without_room.append(pool.submit(large))
            assert pool.submit(train).result(WAIT_S) == expected
            assert a.residency == "leaving"
            assert not any(future.done() for future in without_room)
        assert [future.result(WAIT_S) for future in without_room] == [2, 2]
    assert a.sum().item() == 5 * ELEMENTS


def test_a_kernel_waits_for_its_own_operand_alone(devices: MemoryManager) -> None:
    a, b = on_device(1.0), on_device(2.0)
    with spill_in_the_middle(a):
        both = start(lambda: (a + b).sum().item())
        assert start(b.sum).result(WAIT_S).item() == 2 * ELEMENTS
        assert not both.done()
    assert both.result(WAIT_S) == 3 * ELEMENTS


def test_a_tensor_that_is_dropped_on_its_way_leaves_nothing(devices: MemoryManager) -> None:
    a = on_device(1.0)
    with stopped(out_stream()):
        spill = start(a.spill)
        assert eventually(lambda: devices.table.live()[0].residency is Residency.LEAVING)
        del a
    spill.result(WAIT_S)
    del spill
    assert eventually(lambda: torch.accelerator.memory_allocated(0) == 0)
    assert eventually(lambda: devices.statistics().tier_bytes == {"peer": 0, "host": 0, "disk": 0})
