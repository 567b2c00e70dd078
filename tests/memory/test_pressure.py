"""More tensors than the device holds: exact values, progress, and an error where there can be none."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from pathlib import Path

import pytest
import torch
from conftest import Kind, allocated_bytes

from managed_exec import sim
from managed_exec.errors import DeviceMemoryError
from managed_exec.memory.manager import MemoryManager, configure
from managed_exec.memory.policy import MemoryPolicy
from managed_exec.tensors.managed import ManagedTensor, manage

WAIT_S = 60
DEVICE_BYTES = 2 * 2**20
HALF = (DEVICE_BYTES // 2 - 4096) // 4  # elements of a little less than half the device


def peak_bytes() -> int:
    return torch.accelerator.max_memory_allocated(0)


def pool(manager: MemoryManager, workers: int, **options: object):
    return Kind("sim").pool(max_workers=workers, memory=manager.policy, **options)


def test_a_thousand_results_twenty_times_the_device(small_device: MemoryManager) -> None:
    elements = 20 * DEVICE_BYTES // 1000 // 4

    def task(i: int) -> torch.Tensor:
        return torch.full((elements,), float(i), device="cuda") * 2

    with pool(small_device, 4) as executor:
        results = [future.result(WAIT_S) for future in [executor.submit(task, i) for i in range(1000)]]
    assert all(isinstance(result, ManagedTensor) for result in results)
    assert peak_bytes() <= DEVICE_BYTES
    assert [float(result[0]) for result in results] == [2.0 * i for i in range(1000)]
    assert all(bool((result == 2 * i).all()) for i, result in enumerate(results))
    assert small_device.statistics().spilled_count["host"] >= 900


def test_host_budget_is_kept_and_the_rest_goes_to_disk(simulator: Kind, tmp_path: Path) -> None:
    sim.enable(devices=1, memory=DEVICE_BYTES)
    manager = configure(MemoryPolicy(min_bytes=1024, host_limit="1MiB", spill_dir=tmp_path))
    most = 0
    with pool(manager, 2) as executor:
        results = []
        for i in range(100):
            results.append(executor.submit(lambda i=i: torch.full((2**14,), float(i), device="cuda")).result(WAIT_S))
            most = max(most, manager.statistics().tier_bytes["host"])
    assert 0 < most <= 2**20
    assert manager.statistics().tier_bytes["disk"] > 2**20
    assert all(bool((result == i).all()) for i, result in enumerate(results))
    assert peak_bytes() <= DEVICE_BYTES
    del results
    assert manager.statistics().tier_bytes == {"peer": 0, "host": 0, "disk": 0}
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "in-use"]


def test_two_tasks_with_half_the_device_each_want_the_other_half(small_device: MemoryManager) -> None:
    both_have_half = threading.Barrier(2)

    def task(i: int) -> tuple[float, float]:
        mine = torch.full((HALF,), float(i), device="cuda")
        both_have_half.wait(WAIT_S)
        other = torch.full((HALF,), float(10 + i), device="cuda")
        return mine.sum().item() / HALF, other.sum().item() / HALF

    with pool(small_device, 2) as executor:
        assert [f.result(WAIT_S) for f in [executor.submit(task, i) for i in (1, 2)]] == [(1, 11), (2, 12)]


@pytest.mark.parametrize("workers", [2, 5, 8])
def test_every_kernel_needs_the_whole_device(small_device: MemoryManager, workers: int) -> None:
    """Two operands and a result of a third each: no two tasks' operands fit together."""
    elements = (DEVICE_BYTES // 3 - 4096) // 4
    together = threading.Barrier(workers)

    def task(i: int) -> float:
        a, b = torch.full((elements,), float(i), device="cuda"), torch.full((elements,), 1.0, device="cuda")
        together.wait(WAIT_S)
        for _ in range(5):
            a = a + b
        return a.max().item() + a.min().item()

    with pool(small_device, workers) as executor:
        futures = [executor.submit(task, i) for i in range(workers)]
        assert [future.result(WAIT_S) for future in futures] == [2.0 * (i + 5) for i in range(workers)]


def test_one_kernel_larger_than_the_device(small_device: MemoryManager) -> None:
    kept = manage(torch.arange(1024.0)).to("sim:0")
    with pool(small_device, 1) as executor:
        start = time.monotonic()
        error = executor.submit(lambda: torch.ones(DEVICE_BYTES, device="cuda")).exception(WAIT_S)
        assert time.monotonic() - start < 1, "it is certain, so nothing is waited for"
        assert isinstance(error, DeviceMemoryError)
        assert isinstance(error, torch.OutOfMemoryError)
        assert "sim:0" in str(error)
        assert "more than the device has" in str(error)
        assert executor.submit(lambda: torch.ones(8, device="cuda").sum().item()).result(WAIT_S) == 8
    assert kept.tolist() == list(range(1024))


def test_one_kernel_whose_operands_leave_it_no_room(small_device: MemoryManager) -> None:
    """Nothing that others let go of would help, so nobody is waited for."""
    held, done = threading.Event(), threading.Event()

    def holder() -> None:
        kept = torch.ones(2**16, device="cuda")
        with kept.hold():
            held.set()
            assert done.wait(WAIT_S)

    def task() -> None:
        a, b = (torch.ones(3 * HALF // 4, device="cuda") for _ in range(2))
        torch.add(a, b)

    with pool(small_device, 2) as executor:
        other = executor.submit(holder)
        assert held.wait(WAIT_S)
        error = executor.submit(task).exception(WAIT_S)
        assert not other.done(), "it was not waited for"
        done.set()
        other.result(WAIT_S)
    assert isinstance(error, DeviceMemoryError)
    assert "with the kernel's operands that is more than the device has" in str(error)
    assert "What helps: a smaller batch" in str(error)


@pytest.mark.parametrize("spilled", [0, HALF])
def test_one_kernel_as_large_as_the_device(small_device: MemoryManager, spilled: int) -> None:
    """The error's text, rounded up, would say that it is larger."""
    kept = manage(torch.ones(spilled, device="sim:0"))
    with pool(small_device, 1) as executor:
        made = executor.submit(torch.ones, DEVICE_BYTES // 4, device="cuda").result(WAIT_S)
        assert made.cpu().sum().item() == DEVICE_BYTES // 4
        del made
    assert kept.sum().item() == spilled


def test_room_of_just_the_needed_size_is_taken(small_device: MemoryManager) -> None:
    held, done = threading.Event(), threading.Event()

    def holder() -> None:
        with torch.ones(DEVICE_BYTES // 8, device="cuda").hold():
            held.set()
            assert done.wait(WAIT_S)

    with pool(small_device, 2) as executor:
        first = executor.submit(holder)
        assert held.wait(WAIT_S)
        second = executor.submit(torch.ones, DEVICE_BYTES // 4, device="cuda")
        with pytest.raises(concurrent.futures.TimeoutError):
            second.result(0.2)
        done.set()
        first.result(WAIT_S)
        assert second.result(WAIT_S).cpu().min().item() == 1


def test_device_without_an_index(small_device: MemoryManager) -> None:
    kept = manage(torch.ones(HALF, device="sim:0"))
    x = manage(torch.ones(2 * HALF // 3, device="sim:0"))
    assert torch.ones_like(x, device="sim").sum().item() == x.numel()
    assert kept.sum().item() == HALF


def test_those_that_hope_in_vain_give_up(simulator: Kind) -> None:
    """On each of three devices a task waits for what another one holds: none takes the others' tries for progress."""
    sim.enable(devices=3, memory=DEVICE_BYTES)
    manager = configure(MemoryPolicy(min_bytes=1024, wait_s=1))
    held, want, done = threading.Semaphore(0), threading.Barrier(3), threading.Event()

    def holder() -> None:
        with torch.ones(HALF, device="cuda").hold():
            held.release()
            assert done.wait(WAIT_S)

    def wanting() -> float:
        mine = torch.ones(HALF // 2, device="cuda")
        want.wait(WAIT_S)
        return (torch.cat([mine, mine, mine]) + 1).sum().item()

    with pool(manager, 6, tasks_per_device=2) as executor:
        holders = [executor.submit(holder) for _ in range(3)]
        assert all(held.acquire(timeout=WAIT_S) for _ in range(3))
        errors = [future.exception(WAIT_S) for future in [executor.submit(wanting) for _ in range(3)]]
        assert not any(future.done() for future in holders)
        done.set()
        for future in holders:
            future.result(WAIT_S)
    assert [type(error) for error in errors] == [DeviceMemoryError] * 3


def test_error_says_who_holds_what(small_device: MemoryManager) -> None:
    pinned = manage(torch.zeros(HALF)).to("sim:0").pin()
    shared = torch.zeros(HALF, device="sim:0")
    alias = manage(shared)
    with pool(small_device, 1) as executor:
        error = executor.submit(lambda: torch.ones(HALF, device="cuda")).exception(WAIT_S)
    text = str(error)
    assert "pinned" in text
    assert "a plain tensor, or other code, shares its memory" in text
    pinned.unpin()
    del alias, shared, error
    with pool(small_device, 1) as executor:
        assert executor.submit(lambda: torch.ones(HALF, device="cuda").sum().item()).result(WAIT_S) == HALF


@pytest.mark.parametrize("what", ["managed", "plain"])
def test_memory_of_a_running_task_is_waited_for(small_device: MemoryManager, what: str) -> None:
    """What another task holds and cannot be moved is waited for, and used once that task lets go."""
    held, done = threading.Event(), threading.Event()

    def holder() -> None:
        tensor = torch.ones(HALF + HALF // 2, device="cuda")
        with tensor.hold() as plain:
            if what == "plain":
                del tensor  # of what is left nothing is known but the bytes
            held.set()
            done.wait(WAIT_S)
            plain.sum()

    with pool(small_device, 2) as executor:
        first = executor.submit(holder)
        assert held.wait(WAIT_S)
        second = executor.submit(lambda: torch.ones(HALF, device="cuda").sum().item())
        with pytest.raises(concurrent.futures.TimeoutError):
            second.result(0.2)
        done.set()
        first.result(WAIT_S)
        assert second.result(WAIT_S) == HALF


def test_failing_allocations_change_no_value(small_device: MemoryManager) -> None:
    def task() -> list[float]:
        generator = torch.Generator().manual_seed(0)
        layer = torch.nn.Linear(64, 64)
        with torch.no_grad():
            layer.weight.copy_(torch.randn(64, 64, generator=generator))
            layer.bias.zero_()
        layer = layer.to("cuda")
        x = torch.randn(32, 64, generator=generator).to("cuda")
        losses = []
        for _ in range(3):
            loss = layer(x).square().mean()
            loss.backward()
            with torch.no_grad():
                for parameter in layer.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
            losses.append(loss.item())
        return losses

    with pool(small_device, 1) as executor:
        expected = executor.submit(task).result(WAIT_S)
        for seed in range(5):
            sim.faults.fail_share(0.2, seed)
            assert executor.submit(task).result(WAIT_S) == expected
            assert sim.faults.injected() > 0
            sim.faults.clear()
    assert allocated_bytes() == 0
