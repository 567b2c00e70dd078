"""A device that breaks for good: what has a copy elsewhere is read from there, what has none is a clear error.

Nobody waits for ever, whatever breaks in the middle of what, and the other devices go on. Everything that could wait
for a record in a state that it never leaves runs in a thread of its own, so that a failure here is no hang.
"""

from __future__ import annotations

import gc
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Kind, eventually
from halted import out_stream, start, stopped

from managed_exec import sim
from managed_exec.errors import DeviceOutOfServiceError
from managed_exec.memory import mover
from managed_exec.memory.manager import MemoryManager, configure
from managed_exec.memory.policy import MemoryPolicy
from managed_exec.tensors.managed import ManagedTensor, manage

WAIT_S = 20
DEVICE_BYTES = 2 * 2**20
VALUES = torch.arange(24000.0).view(100, 240)
TIERS = pytest.mark.parametrize("tier", ["host", "disk"])


@pytest.fixture
def devices(simulator: Kind, tmp_path: Path) -> Iterator[MemoryManager]:
    """The manager of two simulated devices of 2 MiB; checks that nothing stays in a tier."""
    sim.enable(devices=2, memory=DEVICE_BYTES)
    keeper = configure(MemoryPolicy(min_bytes=1024, spill_dir=tmp_path, wait_s=5))
    yield keeper
    sim.faults.clear()
    assert eventually(lambda: keeper.statistics().tier_bytes == {"peer": 0, "host": 0, "disk": 0}), keeper.statistics()
    assert not files(tmp_path)


def files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file() and path.name != "in-use"]


def on_device(values: torch.Tensor = VALUES, index: int = 0) -> ManagedTensor:
    return manage(values.clone()).to(f"sim:{index}")


def assert_broken(fn: Callable[..., object], *args: object) -> None:
    """Check that *fn* fails, soon, with the device's own error."""
    error = start(fn, *args).exception(WAIT_S)
    assert isinstance(error, torch.AcceleratorError), error
    assert "sim:0" in str(error)


def assert_values_survive(tensor: ManagedTensor, tier: str) -> None:
    """Check that the values can be read, and that the device has them back once it works again."""
    assert tensor.residency == tier
    assert torch.equal(start(tensor.cpu).result(WAIT_S), VALUES)
    sim.faults.clear()
    assert start(tensor.unspill).result(WAIT_S).residency == "device"
    assert torch.equal(tensor.cpu(), VALUES)


# Reads of what was spilled


def copied_into(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    return target.copy_(source)


def saved_and_loaded(values: Any) -> Any:
    file = io.BytesIO()
    torch.save(values, file)
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=True)


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "cpu": lambda t: t.cpu(),
    "to cpu": lambda t: t.to("cpu"),
    "to cpu as another type": lambda t: t.to("cpu", torch.float64).float(),
    "to another device": lambda t: t.to("sim:1"),
    "copy to cpu": lambda t: copied_into(torch.empty(t.shape), t),
    "copy to another device": lambda t: copied_into(torch.empty(t.shape, device="sim:1"), t),
    "copy to a managed tensor": lambda t: copied_into(on_device(torch.empty(t.shape), 1), t),
    "tolist": lambda t: torch.tensor(t.tolist()),
    "cpu, numpy": lambda t: torch.from_numpy(t.cpu().numpy().copy()),
    "numpy": lambda t: torch.from_numpy(t.numpy(force=True).copy()),
    "save": saved_and_loaded,
}
VIEWS: list[Callable[[torch.Tensor], torch.Tensor]] = [lambda t: t, lambda t: t[3:90:2].t()[5:]]


@TIERS
@pytest.mark.parametrize("read", READS)
def test_what_was_spilled_is_read_from_its_copy(devices: MemoryManager, tier: str, read: str) -> None:
    tensor = on_device()
    parts = [view(tensor) for view in VIEWS]
    tensor.spill(tier)
    sim.faults.break_device(0)
    for view, part in zip(VIEWS, parts, strict=True):
        result = start(READS[read], part).result(WAIT_S)
        assert tensor.residency == tier, "a read from the copy moves nothing"
        assert torch.equal(start(result.cpu).result(WAIT_S), view(VALUES))
        assert part.device == torch.device("sim:0")
        del result
    assert_values_survive(tensor, tier)


@TIERS
def test_weights_and_their_gradients_are_saved_from_their_copies(devices: MemoryManager, tier: str) -> None:
    layer = torch.nn.Linear(64, 64)
    layer.weight = torch.nn.Parameter(on_device(torch.ones(64, 64)))
    layer.weight.grad = on_device(torch.full((64, 64), 2.0))
    for tensor in (layer.weight, layer.weight.grad):
        tensor.spill(tier)
    sim.faults.break_device(0)
    state = start(saved_and_loaded, layer.weight).result(WAIT_S)
    assert isinstance(state, torch.nn.Parameter)
    assert torch.equal(state, torch.ones(64, 64))
    moved = start(layer.weight.to, "sim:1").result(WAIT_S)
    assert moved.sum().item() == 64 * 64
    saved = start(saved_and_loaded, layer.state_dict(keep_vars=True)).result(WAIT_S)
    assert torch.equal(saved["weight"], torch.ones(64, 64))
    assert torch.equal(start(layer.weight.grad.cpu).result(WAIT_S), torch.full((64, 64), 2.0))


@TIERS
def test_a_state_dict_is_saved_from_copies(devices: MemoryManager, tier: str) -> None:
    """``state_dict`` detaches every parameter: a view, which needs no bytes."""
    layer = torch.nn.Linear(64, 64)
    layer.weight = torch.nn.Parameter(on_device(torch.ones(64, 64)))
    layer.weight.spill(tier)
    sim.faults.break_device(0)
    state = start(lambda: saved_and_loaded(layer.state_dict())).result(WAIT_S)
    assert torch.equal(state["weight"], torch.ones(64, 64))
    assert layer.weight.residency == tier


@TIERS
def test_a_kernel_on_what_was_spilled_fails_and_loses_nothing(devices: MemoryManager, tier: str) -> None:
    tensor = on_device().spill(tier)
    sim.faults.break_device(0)
    assert_broken(lambda: tensor + 1)
    assert_broken(lambda: tensor.mul_(2))
    assert_broken(tensor.unspill)
    assert_broken(tensor.pin)
    assert not tensor.pinned
    assert_broken(tensor.data_ptr)
    assert tensor.residency == tier
    sim.faults.clear()
    assert start(tensor.unspill).result(WAIT_S).residency == "device"
    assert torch.equal(tensor.cpu(), VALUES)


@TIERS
def test_what_was_spilled_is_dropped_without_the_device(devices: MemoryManager, tmp_path: Path, tier: str) -> None:
    tensor = on_device()
    view = tensor.detach()
    tensor.spill(tier)
    sim.faults.break_device(0)
    assert devices.statistics().tier_bytes[tier] > 0
    del tensor, view
    assert eventually(lambda: devices.statistics().tier_bytes == {"peer": 0, "host": 0, "disk": 0})
    assert not files(tmp_path)
    assert torch.accelerator.memory_allocated(0) == 0


# What was on the device


def test_what_was_on_the_device_is_a_clear_error(devices: MemoryManager) -> None:
    tensor, healthy = on_device(), on_device(index=1)
    sim.faults.break_device(0)
    for read in READS.values():
        assert_broken(read, tensor)
    for tier in ("host", "disk", None):
        assert_broken(tensor.spill, tier)
        assert tensor.residency == "device"
    assert devices.statistics().tier_bytes == {"peer": 0, "host": 0, "disk": 0}
    assert torch.equal(healthy.spill().unspill().cpu(), VALUES)
    del tensor
    assert torch.accelerator.memory_allocated(0) == 0


def test_the_pool_goes_on_with_the_other_device(devices: MemoryManager) -> None:
    def work(i: int) -> tuple[str, float]:
        """Take twice the device."""
        parts = [torch.full((2**16,), float(i), device="cuda") for _ in range(16)]
        return str(parts[0].device), sum(part.mean().item() for part in parts)

    with Kind("sim").pool(max_workers=4, memory=devices.policy, placement="round-robin") as pool:
        assert {device for device, _ in pool.map(work, range(8))} == {"sim:0", "sim:1"}
        kept = [future.result(WAIT_S) for future in [pool.submit(torch.ones, 1000, device="cuda") for _ in range(4)]]
        sim.faults.break_device(0)
        futures = [pool.submit(work, i) for i in range(8)]
        errors = [future.exception(WAIT_S) for future in futures]
        assert {type(error) for error in errors} == {torch.AcceleratorError, type(None)}
        done = [future.result() for future, error in zip(futures, errors, strict=True) if error is None]
        assert {device for device, _ in done} == {"sim:1"}
        assert [sum_ for _, sum_ in done] == [
            16.0 * i for i, error in zip(range(8), errors, strict=True) if error is None
        ]
        healthy = [result for result in kept if result.device.index == 1]
        assert [result.sum().item() for result in healthy] == [1000] * len(healthy)
        del errors, futures
    with Kind("sim").pool(max_workers=2, devices=["sim:1"], memory=devices.policy) as pool:
        assert [sum_ for _, sum_ in pool.map(work, range(4))] == [16.0 * i for i in range(4)]


# Breaking in the middle


@TIERS
def test_breaking_while_a_tensor_is_copied_out(devices: MemoryManager, tmp_path: Path, tier: str) -> None:
    tensor = on_device()
    with stopped(out_stream()):
        spill = start(tensor.spill, tier)
        assert eventually(lambda: tensor.residency == "leaving")
        waiting = [start(lambda: tensor + 1), start(tensor.cpu), start(tensor.sum)]
        sim.faults.break_device(0)
        assert isinstance(spill.exception(WAIT_S), torch.AcceleratorError)
    for future in waiting:
        assert isinstance(future.exception(WAIT_S), torch.AcceleratorError)
    assert tensor.residency == "device", "the copy is not complete"
    assert eventually(lambda: devices.statistics().tier_bytes == {"peer": 0, "host": 0, "disk": 0})
    assert not files(tmp_path)
    sim.faults.clear()
    assert torch.equal(tensor.cpu(), VALUES)


@TIERS
def test_breaking_while_a_tensor_is_copied_in(devices: MemoryManager, tier: str) -> None:
    tensor = on_device().spill(tier)
    stream = torch.Stream("sim:0")

    def unspill() -> None:
        with stream:
            tensor.unspill()

    with stopped(stream):
        back = start(unspill)
        assert eventually(lambda: torch.accelerator.memory_allocated(0) >= VALUES.nbytes)
        waiting = [start(lambda: tensor + 1), start(tensor.unspill)]
        sim.faults.break_device(0)
        assert isinstance(back.exception(WAIT_S), torch.AcceleratorError)
    for future in waiting:
        assert isinstance(future.exception(WAIT_S), torch.AcceleratorError)
    assert torch.accelerator.memory_allocated(0) < VALUES.nbytes, "what was allocated for it is free again"
    assert_values_survive(tensor, tier)


@TIERS
def test_breaking_once_a_tensor_is_copied_out(
    devices: MemoryManager, monkeypatch: pytest.MonkeyPatch, tier: str
) -> None:
    """The copy is complete, and the memory not yet freed: now it is the copy that counts."""
    tensor = on_device()
    copy_out = mover.copy_out

    def copy_out_and_break(*args: Any) -> None:
        copy_out(*args)
        sim.faults.break_device(0)

    monkeypatch.setattr(mover, "copy_out", copy_out_and_break)
    assert start(tensor.spill, tier).exception(WAIT_S) is None
    assert torch.accelerator.memory_allocated(0) == 0
    assert_values_survive(tensor, tier)


@TIERS
def test_breaking_before_a_tensor_is_copied_in(
    devices: MemoryManager, monkeypatch: pytest.MonkeyPatch, tier: str
) -> None:
    """The memory is allocated, and nothing is in it."""
    tensor = on_device().spill(tier)

    def break_and_copy_in(*args: Any) -> None:
        sim.faults.break_device(0)
        copy_in(*args)

    copy_in = mover.copy_in
    with monkeypatch.context() as patch:
        patch.setattr(mover, "copy_in", break_and_copy_in)
        assert_broken(tensor.unspill)
    assert torch.accelerator.memory_allocated(0) == 0
    assert_values_survive(tensor, tier)


def test_breaking_while_a_task_makes_room(devices: MemoryManager) -> None:
    """It has the device's turn, and others wait for theirs: all of them fail, and none hangs."""
    cold = on_device(torch.ones(300_000))  # of the 524,288 that fit
    with Kind("sim").pool(max_workers=3, devices=["sim:0"], memory=devices.policy) as pool:

        def large() -> float:
            return torch.ones(400_000, device="cuda").sum().item()

        with stopped(out_stream()):
            futures = [pool.submit(large)]
            assert eventually(lambda: cold.residency == "leaving")
            futures += [pool.submit(large), pool.submit(large)]
            sim.faults.break_device(0)
            assert all(isinstance(future.exception(WAIT_S), torch.AcceleratorError) for future in futures)
        del futures  # the errors' frames refer to the memory
        gc.collect()
        assert cold.residency == "device"
        assert isinstance(pool.submit(large).exception(WAIT_S), DeviceOutOfServiceError)
    sim.faults.clear()
    with Kind("sim").pool(max_workers=3, devices=["sim:0"], memory=devices.policy) as pool:
        assert pool.submit(large).result(WAIT_S) == 400_000
    assert cold.sum().item() == 300_000
