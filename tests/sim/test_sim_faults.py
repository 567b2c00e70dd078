"""Injected faults: each is the error that a real device raises, and changes nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from managed_exec import sim

pytestmark = pytest.mark.usefixtures("devices")


def test_the_nth_allocation_fails_once() -> None:
    sim.faults.fail_allocation(2)
    first = torch.empty(1, device="sim")
    with pytest.raises(torch.OutOfMemoryError, match=r"faults\.fail_allocation"):
        torch.empty(1, device="sim")
    second = torch.empty(1, device="sim")
    assert sim.faults.injected() == 1
    del first, second
    with pytest.raises(ValueError, match="n: expected"):
        sim.faults.fail_allocation(0)


def test_faults_of_one_device_leave_the_others_alone() -> None:
    sim.faults.fail_allocation(1, device=1)
    torch.empty(1, device="sim:0")
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1, device="sim:1")


def failures(seed: int, n: int = 200) -> list[int]:
    sim.faults.clear()
    sim.faults.fail_share(0.25, seed)
    failed = []
    for i in range(n):
        try:
            torch.empty(1, device="sim")
        except torch.OutOfMemoryError:
            failed.append(i)
    return failed


def test_a_share_of_allocations_fails_as_the_seed_says() -> None:
    assert failures(1) == failures(1)
    assert failures(1) != failures(2)
    assert 20 < len(failures(3)) < 80
    with pytest.raises(ValueError, match="share"):
        sim.faults.fail_share(1.5, 0)


def test_first_tries_fail_and_second_ones_pass() -> None:
    a = torch.ones(4, device="sim")
    sim.faults.fail_first_tries()
    with pytest.raises(torch.OutOfMemoryError, match="fail_first_tries"):
        a + 1
    b = a + 1
    with pytest.raises(torch.OutOfMemoryError):
        b.sum()
    assert b.sum().item() == 8
    with pytest.raises(torch.OutOfMemoryError):
        a * 2  # another kernel
    assert sim.faults.injected() == 3


def test_a_kernel_that_is_tried_again_gives_the_same_values() -> None:
    a = torch.arange(6.0, device="sim").reshape(2, 3)
    expected = (a @ a.T).cpu()
    sim.faults.fail_first_tries()
    for _ in range(6):
        try:
            result = a @ a.T
        except torch.OutOfMemoryError:
            continue
        break
    assert torch.equal(result.cpu(), expected)


def test_a_broken_device_raises_until_cleared_and_frees_its_memory() -> None:
    tensor, other = torch.ones(4, device="sim:0"), torch.ones(4, device="sim:1")
    sim.faults.break_device(0)
    uses: list[Callable[[torch.Tensor], object]] = [
        lambda t: t + 1,
        lambda t: t.cpu(),
        lambda t: t[0].item(),
        lambda t: t.copy_(other),
        lambda t: torch.empty(1, device=t.device),
        lambda t: torch.sim.synchronize(t.device),
        lambda t: torch.sim.current_stream(t.device).synchronize(),
        lambda t: torch.Event("sim").record(torch.sim.current_stream(t.device)),
    ]
    for use in uses:
        with pytest.raises(torch.AcceleratorError, match="sim:0"):
            use(tensor)
    assert (other + 1).sum().item() == 8
    del tensor
    assert torch.sim.memory_allocated(0) == 0
    sim.faults.clear()
    assert torch.ones(4, device="sim:0").sum().item() == 4


def test_copies_queued_on_a_device_that_breaks_end_without_writing() -> None:
    stream = torch.sim.current_stream(0)
    source = torch.full((8,), 1.0).pin_memory()
    target = torch.zeros(8, device="sim:0")
    with sim.hold_stream(stream):
        target.copy_(source, non_blocking=True)
        sim.faults.break_device(0)
        with pytest.raises(torch.AcceleratorError):
            torch.sim.synchronize(0)  # the queue comes to its end though the stream is held
        sim.faults.clear()
    assert target.sum().item() == 0
