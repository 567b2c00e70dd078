"""What must not move, and tasks whose memory comes and goes between two looks of the manager."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Kind, run_python

from managed_exec.errors import DeviceMemoryError, NotMovableError
from managed_exec.memory.manager import MemoryManager, configure
from managed_exec.memory.policy import MemoryPolicy
from managed_exec.tensors.managed import ManagedTensor, manage

WAIT_S = 100


def on_device(elements: int, value: float) -> ManagedTensor:
    return manage(torch.full((elements,), value)).to("sim:0")


@pytest.mark.parametrize("workers", [2, 8])
def test_short_lived_tensors_of_many_tasks(small_device: MemoryManager, workers: int) -> None:
    """Each holds a third of the device for the length of a kernel: there is always room in a moment."""

    def task(i: int) -> float:
        total = 0.0
        for k in range(5):
            total += torch.full((160 * 1024,), float(i + k), device="cuda").max().item()
        return total

    with Kind("sim").pool(max_workers=workers, memory=small_device.policy) as pool:
        assert list(pool.map(task, range(48), timeout=WAIT_S)) == [5.0 * i + 10 for i in range(48)]


def test_reading_a_spilled_tensor_while_its_device_is_full(small_device: MemoryManager) -> None:
    first = on_device(256 * 1024, 1.0).spill()
    rest = [on_device(240 * 1024, 2.0) for _ in range(2)]
    assert first.cpu().eq(1).all()
    assert all(tensor.eq(2).all() for tensor in rest)


def test_tensor_that_got_another_storage(small_device: MemoryManager) -> None:
    for change in (lambda x, y: x.set_(y), lambda x, y: setattr(x, "data", y)):
        x, y = on_device(4096, 1.0), on_device(4096, 2.0)
        old = x.detach()
        change(x, y)
        with x.hold() as plain:
            with pytest.raises(NotMovableError):
                y.spill()
            assert plain.eq(2).all()
        del plain
        assert old.spill().eq(1).all()
        assert x.eq(2).all()


def test_storage_that_grew(small_device: MemoryManager) -> None:
    x = on_device(1024, 1.0)
    x.resize_(4096).fill_(3)
    assert x.spill().eq(3).all()


def test_memory_that_torch_cannot_free(tmp_path: Path) -> None:
    configure(MemoryPolicy(min_bytes=1, spill_dir=tmp_path))
    x = manage(torch.from_numpy(np.ones(4096, dtype=np.float32)))
    with pytest.raises(NotMovableError, match="comes from elsewhere"):
        x.spill("disk")
    assert x.sum().item() == 4096


def test_storage_object_that_somebody_holds(small_device: MemoryManager) -> None:
    plain = torch.ones(4096, device="sim:0")
    storage = plain.untyped_storage()
    x = manage(plain)
    del plain
    with pytest.raises(NotMovableError, match="somebody holds its storage"):
        x.spill()
    del storage
    assert x.spill().sum().item() == 4096


def test_default_device_is_not_where_copies_go(small_device: MemoryManager) -> None:
    x = on_device(4096, 1.0)
    with torch.device("sim:0"):
        for tier in ("host", "disk"):
            assert x.spill(tier).residency == tier
            x.unspill()


def test_managed_tensor_in_a_destructor_of_the_collector(small_device: MemoryManager) -> None:
    """The collector may run anywhere, also where the manager's lock is held."""
    kept = on_device(4096, 1.0)

    class UsesIt:
        def __del__(self) -> None:
            kept.sum()

    done = threading.Event()

    def work() -> None:
        with small_device.table.lock:
            del_me = UsesIt()
            del del_me
        done.set()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert done.wait(WAIT_S)
    thread.join()


def test_pools_with_other_policies_one_after_the_other(simulator: Kind) -> None:
    for min_bytes in (1024, 2048):
        with simulator.pool(max_workers=1, memory=MemoryPolicy(min_bytes=min_bytes)) as pool:
            assert pool.submit(lambda: torch.ones(4096, device="cuda").sum().item()).result(WAIT_S) == 4096


def test_forked_child_spills_to_a_directory_of_its_own(tmp_path: Path) -> None:
    code = (
        "import os, sys, torch\n"
        "from managed_exec.memory.manager import configure\n"
        "from managed_exec.memory.policy import MemoryPolicy\n"
        "from managed_exec.tensors.managed import manage\n"
        "configure(MemoryPolicy(min_bytes=1, spill_dir=sys.argv[1]))\n"
        "first = manage(torch.ones(4096)).spill('disk')\n"
        "child = os.fork()\n"
        "mine = [manage(torch.full((4096,), 2.0 if child else 3.0)).spill('disk') for _ in range(3)]\n"
        "assert all(x.sum().item() == 4096 * (2 if child else 3) for x in mine)\n"
        "if not child: os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "assert first.sum().item() == 4096\n"
    )
    run = run_python(code, str(tmp_path))
    assert (run.returncode, run.stderr) == (0, "")


def test_memory_that_was_not_handed_out_still_moves(small_device: MemoryManager) -> None:
    """There was no room to bring it back, so nobody has a pointer."""
    tensor = manage(torch.ones(2**18, device="sim:0"))
    tensor.spill()
    plain = torch.ones(400 * 2**10, device="sim:0")
    with pytest.raises(DeviceMemoryError):
        tensor.data_ptr()
    del plain
    tensor.unspill()
    tensor.spill()
    assert tensor.residency == "host"
    assert tensor.data_ptr()
    with pytest.raises(NotMovableError, match="handed out"):
        tensor.spill()
