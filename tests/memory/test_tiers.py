"""The tiers below the devices: budgets, files, faults of the disk, and what a killed process leaves."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
import torch
from conftest import Kind, eventually, identity, run_python

from managed_exec import GPUPoolExecutor, sim
from managed_exec.errors import DeviceMemoryError, NotMovableError, TierFullError
from managed_exec.memory.manager import MemoryManager, configure
from managed_exec.memory.policy import MemoryPolicy
from managed_exec.memory.tiers import DiskTier, HostTier
from managed_exec.tensors.managed import ManagedTensor, manage

WAIT_S = 30


def files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file() and path.name != "in-use"]


def on_device(values: torch.Tensor) -> ManagedTensor:
    return manage(values.clone()).to("sim:0")


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_there_and_back(small_device: MemoryManager, tier: str) -> None:
    tensor = on_device(torch.arange(1000.0))
    held = torch.accelerator.memory_allocated(0)
    assert tensor.spill(tier) is tensor
    assert tensor.residency == tier
    assert torch.accelerator.memory_allocated(0) == held - 4096
    assert tensor.shape == (1000,)
    assert tensor.device == torch.device("sim:0")
    assert tensor.unspill().residency == "device"
    assert tensor.tolist() == list(range(1000))
    assert small_device.statistics().tier_bytes == {"peer": 0, "host": 0, "disk": 0}


def test_between_tiers(small_device: MemoryManager) -> None:
    tensor = on_device(torch.arange(1000.0))
    for tier in ("host", "disk", "host", "host"):
        tensor.spill(tier)
        assert tensor.residency == tier
    assert tensor.tolist() == list(range(1000))


def test_pinned_rounding_counts() -> None:
    tier = HostTier(limit_bytes=4096)
    copy = tier.allocate(2049, torch.device("cpu"))
    assert tier.used_bytes == 2049
    with pytest.raises(TierFullError, match=r"asked for 4\.0 KiB"):
        # 2,048 bytes are left, and pinned memory comes in powers of two.
        tier.allocate(2049, torch.device("sim:0"))
    tier.release(copy)
    assert tier.used_bytes == 0


@pytest.mark.parametrize(
    "policy", [{"host_limit": 4096}, {"spill": ("disk",), "disk_limit": 4096}], ids=["host", "disk"]
)
def test_spent_budget_leaves_the_tensor_where_it_was(simulator: Kind, tmp_path: Path, policy: dict) -> None:
    configure(MemoryPolicy(min_bytes=1024, spill_dir=tmp_path, **{"spill": ("host",), **policy}))
    small, large = on_device(torch.ones(1000)), on_device(torch.arange(2000.0))
    small.spill()
    with pytest.raises(TierFullError, match="no tier has room"):
        large.spill()
    assert large.residency == "device"
    assert large.tolist() == list(range(2000))
    assert small.tolist() == [1] * 1000


def test_directory_that_cannot_be_written(simulator: Kind, tmp_path: Path) -> None:
    not_a_directory = tmp_path / "file"
    not_a_directory.write_text("")
    configure(MemoryPolicy(min_bytes=1024, spill_dir=not_a_directory / "below"))
    tensor = on_device(torch.arange(1000.0))
    with pytest.raises(TierFullError):
        tensor.spill("disk")
    assert tensor.spill().residency == "host", "the other tier is as good as ever"
    assert tensor.tolist() == list(range(1000))


def test_full_disk(monkeypatch: pytest.MonkeyPatch, simulator: Kind, tmp_path: Path) -> None:
    configure(MemoryPolicy(min_bytes=1024, spill=("disk",), spill_dir=tmp_path))
    tensor = on_device(torch.arange(1000.0))

    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", no_space)
        with pytest.raises(TierFullError):
            tensor.spill("disk")
    assert not files(tmp_path)
    assert tensor.tolist() == list(range(1000))
    assert tensor.spill("disk").residency == "disk"


def test_file_goes_with_its_tensor(simulator: Kind, tmp_path: Path) -> None:
    manager = configure(MemoryPolicy(min_bytes=1024, spill_dir=tmp_path))
    first, second = on_device(torch.ones(1000)).spill("disk"), on_device(torch.ones(1000)).spill("disk")
    view = second[:10]
    assert len(files(tmp_path)) == 1, "a view needs the bytes back on the device"
    second.spill("disk")
    assert len(files(tmp_path)) == 2
    del first
    assert len(files(tmp_path)) == 1
    del second
    assert view.sum().item() == 10
    assert not files(tmp_path)
    assert manager.statistics().tier_bytes["disk"] == 0


def test_result_on_disk_outlives_its_pool(simulator: Kind, tmp_path: Path) -> None:
    """https://github.com/rapidsai/dask-cuda/pull/853 , https://github.com/dask/distributed/issues/7182"""
    policy = MemoryPolicy(min_bytes=1024, spill_dir=tmp_path)
    with simulator.pool(max_workers=1, memory=policy) as pool:
        a, b = (pool.submit(torch.ones, 1000, device="cuda").result() for _ in range(2))
        a.spill("disk")
        b.spill("disk")
        del a
        assert eventually(lambda: len(files(tmp_path)) <= 1)
    part = b[:10].clone()
    assert (b.sum().item(), part.sum().item()) == (1000, 10)
    b.spill("disk")
    assert b.sum().item() == 1000
    del b
    assert eventually(lambda: not files(tmp_path))


def test_tensor_of_the_cpu_goes_to_disk_only(tmp_path: Path) -> None:
    configure(MemoryPolicy(min_bytes=1024, spill_dir=tmp_path))
    tensor = manage(torch.arange(1000.0))
    assert tensor.spill("host").residency == "device", "it is in main memory"
    assert tensor.spill("disk").residency == "disk"
    assert tensor.tolist() == list(range(1000))


def test_refusals_say_why(small_device: MemoryManager) -> None:
    plain = torch.ones(1000, device="sim:0")
    tensor = manage(plain)
    with pytest.raises(NotMovableError, match="a plain tensor"):
        tensor.spill()
    del plain
    tensor.pin()
    assert tensor.pinned
    with pytest.raises(NotMovableError, match="pinned"):
        tensor.spill()
    tensor.unpin()
    with pytest.raises(ValueError, match="not pinned"):
        tensor.unpin()
    with pytest.raises(ValueError, match="expected one of peer, host, disk, got 'tape'"):
        tensor.spill("tape")
    tensor.data_ptr()
    with pytest.raises(NotMovableError, match="handed out by data_ptr"):
        tensor.spill()
    with pytest.raises(NotMovableError, match="never moved"):
        on_device(torch.ones(2)).spill()


def test_killed_process_leaves_nothing_for_long(tmp_path: Path) -> None:
    code = (
        "import sys, os, signal, torch\n"
        "from managed_exec.memory.manager import configure\n"
        "from managed_exec.memory.policy import MemoryPolicy\n"
        "from managed_exec.tensors.managed import manage\n"
        "configure(MemoryPolicy(min_bytes=1024, spill_dir=sys.argv[1]))\n"
        "kept = [manage(torch.ones(1000)).spill('disk') for _ in range(3)]\n"
        "if sys.argv[2] == 'kill': os.kill(os.getpid(), signal.SIGKILL)\n"
    )

    def run(how: str) -> int:
        return run_python(code, str(tmp_path), how).returncode

    assert run("exit") == 0
    assert not list(tmp_path.iterdir()), "removed at exit"
    assert run("kill") == -signal.SIGKILL
    assert len(files(tmp_path)) == 3
    tier = DiskTier(tmp_path, None)
    copy = tier.allocate(1000, torch.device("cpu"))
    assert len(files(tmp_path)) == 1, "the dead process's files are gone, this one's are there"
    tier.release(copy)
    other = DiskTier(tmp_path, None)
    other.release(other.allocate(1000, torch.device("cpu")))
    assert len(list(tmp_path.iterdir())) == 2, "a living process's directory is left alone"
    del tier, other
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"spill": ("tape",)}, ValueError),
        ({"spill": ("host", "host")}, ValueError),
        ({"spill": "disk"}, TypeError),
        ({"spill": {"host"}}, TypeError),
        ({"spill": None}, TypeError),
        ({"host_limit": "much"}, ValueError),
        ({"host_limit": 0}, ValueError),
        ({"min_bytes": -1}, ValueError),
        ({"min_bytes": 1.5}, TypeError),
        ({"min_bytes": None}, TypeError),
        ({"wait_s": -1}, ValueError),
        ({"wait_s": float("nan")}, ValueError),
        ({"wait_s": "10"}, TypeError),
        ({"spill_dir": 3}, TypeError),
        ({"spill_dir": __file__}, ValueError),
    ],
    ids=identity,
)
def test_policy_is_checked(wrong: dict, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"{next(iter(wrong))}: expected|cannot read"):
        MemoryPolicy(**wrong)


def test_sizes_as_text() -> None:
    policy = MemoryPolicy(min_bytes="1KiB", host_limit="2MiB", limit="3GiB")
    assert (policy.smallest_bytes, policy.host_limit_bytes, policy.limit_bytes(2**40)) == (2**10, 2**21, 3 * 2**30)


def test_policy_changes_while_nothing_is_spilled(small_device: MemoryManager) -> None:
    kept = on_device(torch.ones(1000))
    changed = MemoryPolicy(min_bytes=2048)
    assert configure(changed) is small_device
    assert small_device.policy == changed
    kept.spill()
    with pytest.raises(ValueError, match=r"tensors \(1 now\) are spilled under .*give every pool the same policy"):
        configure(MemoryPolicy(min_bytes=4096))
    assert configure(changed) is configure(None) is small_device
    kept.unspill()
    configure(MemoryPolicy(min_bytes=4096))
    assert kept.tolist() == [1] * 1000
    assert on_device(torch.ones(1000)).record is None


def test_open_pool_keeps_its_policy(small_device: MemoryManager) -> None:
    first, second = MemoryPolicy(spill=("disk",)), MemoryPolicy(spill=("host",))
    with GPUPoolExecutor(1, memory=first):
        with pytest.raises(ValueError, match=r"an open pool has it under .*shut that pool down first"):
            GPUPoolExecutor(1, memory=second)
        with GPUPoolExecutor(1), GPUPoolExecutor(1, memory=first):
            assert small_device.policy == first
    with GPUPoolExecutor(1, memory=second):
        assert small_device.policy == second
    dropped = GPUPoolExecutor(1, memory=first)
    del dropped
    assert eventually(lambda: not small_device.holders)
    configure(second)


@pytest.mark.parametrize(
    "policy", [{"spill": ()}, {"spill": ("host",), "host_limit": 2**18}, {"spill": ("peer",)}], ids=identity
)
def test_results_that_no_tier_takes(simulator: Kind, policy: dict) -> None:
    """The error comes, says what is full, and the pool goes on; the results are untouched."""
    sim.enable(devices=1, memory="2MiB")
    with GPUPoolExecutor(1, memory=MemoryPolicy(min_bytes=1024, wait_s=0.1, **policy)) as pool:
        results = []
        for i in range(20):
            future = pool.submit(torch.full, (2**16,), float(i), device="cuda")
            if future.exception(WAIT_S) is not None:
                break
            results.append(future.result())
        error = future.exception()
        assert isinstance(error, DeviceMemoryError)
        assert "no tier has room for what could be moved" in str(error)
        assert re.search(r"task \d: 256\.0 KiB, movable, but no tier takes it", str(error))
        helps = "a larger host_limit or disk_limit, or one more tier" if policy["spill"] else "tiers to spill to"
        assert f"What helps: {helps}" in str(error)
        assert 7 <= len(results) <= 10
        assert [result.cpu()[0].item() for result in results] == list(range(len(results)))
        results.clear()
        assert pool.submit(lambda: torch.ones(2**16, device="cuda").sum().item()).result(WAIT_S) == 2**16
    del error, future


def test_directory_that_cannot_be_used(simulator: Kind, caplog: pytest.LogCaptureFixture) -> None:
    """It is said once."""
    sim.enable(devices=1, memory="2MiB")
    policy = MemoryPolicy(min_bytes=1024, wait_s=0.1, spill=("disk",), spill_dir="/proc/no/such")
    with GPUPoolExecutor(1, memory=policy) as pool:
        future = pool.submit(lambda: [torch.ones(2**16, device="cuda") for _ in range(10)])
        assert isinstance(future.exception(WAIT_S), DeviceMemoryError)
    (record,) = [record for record in caplog.records if record.name == "managed_exec.memory.tiers"]
    assert "cannot write 256.0 KiB below /proc/no/such: [Errno 2]" in record.getMessage()


def test_error_names_what_is_not_managed(simulator: Kind) -> None:
    sim.enable(devices=1, memory="2MiB")
    with GPUPoolExecutor(1, memory=MemoryPolicy(wait_s=0.1)) as pool:
        error = pool.submit(lambda: [torch.ones(2**13, device="cuda") for _ in range(100)]).exception(WAIT_S)
    assert isinstance(error, DeviceMemoryError)
    assert re.search(r"not managed \(plain tensors, and storages below min_bytes=65536\): 2\.0 MiB", str(error))
    assert "What helps: a smaller min_bytes in MemoryPolicy" in str(error)
