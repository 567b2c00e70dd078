"""Capacity, cache, poison and statistics of simulated device memory."""

from __future__ import annotations

import threading

import pytest
import torch

from managed_exec import sim

pytestmark = pytest.mark.usefixtures("devices")
MIB = 2**20


def of_bytes(n: int, device: str = "sim:0") -> torch.Tensor:
    return torch.empty(n, dtype=torch.uint8, device=device)


def test_capacity_is_exact() -> None:
    held = [of_bytes(MIB // 4) for _ in range(4)]
    expected = r"Tried to allocate 1 bytes\. Device sim:0 has a total capacity of 1024\.00 KiB of which 0 bytes is free"
    with pytest.raises(torch.OutOfMemoryError, match=expected):
        of_bytes(1)
    del held[0]
    assert of_bytes(MIB // 4).numel() == MIB // 4


def test_sizes_are_rounded_to_512_bytes() -> None:
    tensor = of_bytes(1)
    assert torch.sim.memory_allocated() == 512
    del tensor
    assert torch.sim.memory_allocated() == 0
    empty = of_bytes(0)
    assert torch.sim.memory_allocated() == 0
    assert empty.data_ptr() == 0


def test_devices_have_capacities_of_their_own() -> None:
    full = of_bytes(MIB)
    other = of_bytes(MIB, "sim:1")
    assert full.device.index != other.device.index
    sim.set_capacity(1, 2 * MIB)
    more = of_bytes(MIB, "sim:1")
    with pytest.raises(torch.OutOfMemoryError, match="sim:1"):
        of_bytes(1, "sim:1")
    del other, more


def test_lowered_capacity_makes_only_further_allocations_fail() -> None:
    tensor = of_bytes(MIB)
    sim.set_capacity(0, "512KiB")
    tensor.fill_(7)
    with pytest.raises(torch.OutOfMemoryError):
        of_bytes(1)
    assert int(tensor[0]) == 7
    del tensor
    assert of_bytes(MIB // 2).numel() == MIB // 2


def test_freed_memory_is_reserved_until_it_is_needed() -> None:
    del_me = of_bytes(MIB // 2)
    del del_me
    assert torch.sim.memory_allocated() == 0
    assert torch.sim.memory_reserved() == MIB // 2
    assert torch.sim.mem_get_info() == (MIB // 2, MIB)
    whole = of_bytes(MIB)
    assert torch.sim.memory_reserved() == MIB
    del whole
    torch.sim.empty_cache()
    assert torch.sim.memory_reserved() == 0
    assert torch.accelerator.get_memory_info() == (MIB, MIB)


def test_freed_memory_is_poisoned() -> None:
    tensor = torch.ones(64, device="sim")
    address = tensor.data_ptr()
    del tensor
    again = torch.empty(64, device="sim")
    assert again.data_ptr() == address
    assert again.isnan().all()


def test_storage_resize_frees_and_allocates() -> None:
    tensor = torch.ones(MIB // 8, device="sim")
    view = tensor[1:]
    tensor.untyped_storage().resize_(0)
    assert torch.sim.memory_allocated() == 0
    with pytest.raises(RuntimeError, match="of a storage that has 0"):
        view + 1
    tensor.untyped_storage().resize_(MIB // 2)
    tensor.fill_(2)
    assert view.sum().item() == 2 * (MIB // 8 - 1)


def test_out_of_memory_leaves_the_storage_as_it_was() -> None:
    tensor = torch.ones(16, device="sim")
    with pytest.raises(torch.OutOfMemoryError):
        tensor.untyped_storage().resize_(2 * MIB)
    with pytest.raises(torch.OutOfMemoryError):
        tensor.resize_(MIB)
    assert tensor.shape == (16,)
    assert tensor.untyped_storage().nbytes() == 64
    assert tensor.sum().item() == 16


def test_statistics() -> None:
    torch.accelerator.reset_peak_memory_stats()
    tensors = [of_bytes(1024) for _ in range(3)]
    del tensors[1:]
    stats = torch.accelerator.memory_stats()
    assert stats["allocated_bytes.all.current"] == 1024
    assert stats["allocated_bytes.all.peak"] == 3 * 1024
    assert stats["allocation.all.allocated"] == 3
    with pytest.raises(torch.OutOfMemoryError):
        of_bytes(2 * MIB)
    assert torch.accelerator.memory_stats()["num_ooms"] == 1
    torch.accelerator.reset_peak_memory_stats()
    assert torch.accelerator.max_memory_allocated() == 1024


def test_an_allocation_waits_for_frees_that_are_on_their_way() -> None:
    stream = torch.Stream("sim:0")
    host = torch.ones(8).pin_memory()
    allocated = threading.Event()

    def allocate_all() -> None:
        of_bytes(MIB)
        allocated.set()

    with sim.hold_stream(stream):
        with stream:
            target = torch.empty(8, device="sim")
            target.copy_(host, non_blocking=True)
            del target
        assert torch.sim.memory_allocated() == 0
        thread = threading.Thread(target=allocate_all)
        thread.start()
        assert not allocated.wait(0.05)
        with pytest.raises(torch.OutOfMemoryError):
            of_bytes(MIB + 1)  # cannot fit whatever is freed: fails without waiting
    thread.join()
    assert allocated.is_set()


def test_current_device_and_invalid_index() -> None:
    with torch.sim.device(1):
        assert torch.empty(1, device="sim").device.index == 1
        assert torch.accelerator.current_device_index() == 1
    assert torch.empty(1, device="sim").device.index == 0
    with pytest.raises(RuntimeError, match="invalid device index 5"):
        torch.empty(1, device="sim:5")
