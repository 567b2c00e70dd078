"""Which device is found for how many bytes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import Kind

from managed_exec import GPUPoolExecutor, sim
from managed_exec.errors import DeviceMemoryError
from managed_exec.memory.manager import configure
from managed_exec.memory.policy import MemoryPolicy
from managed_exec.memory.room import Rooms, rooms, tensor_bytes
from managed_exec.tensors.managed import manage

MIB = 2**20
WAIT_S = 30


@pytest.fixture
def four(simulator: Kind) -> Rooms:
    """Four devices of 1 MiB."""
    sim.enable(devices=4, memory=MIB)
    configure(MemoryPolicy(min_bytes=1024))
    return Rooms()


def index(device: torch.device) -> int:
    return int(device.index)


def plain(n_bytes: int, device: int) -> torch.Tensor:
    return torch.zeros(n_bytes, dtype=torch.uint8, device=f"sim:{device}")


def test_current_device_while_it_has_room(four: Rooms) -> None:
    assert [index(four.find(MIB // 2, disperse=False)) for _ in range(3)] == [0, 0, 0]
    taken = plain(MIB * 3 // 4, 0)
    assert index(four.find(MIB // 4, disperse=False)) == 0
    others = [plain(MIB // 2, 1), plain(MIB // 4, 3)]
    assert index(four.find(MIB // 2, disperse=False)) == 2
    del taken, others


def test_no_limit_of_an_earlier_simulator(simulator: Kind) -> None:
    """Enabled anew, the simulator's devices have room by what they have now, though the policy is the same."""
    policy = MemoryPolicy(min_bytes=1024)
    sim.enable(devices=1, memory=MIB)
    with GPUPoolExecutor(memory=policy) as pool:
        pool.submit(int).result()
    sim.enable(devices=2, memory=2 * MIB)
    limits = configure(policy).limits
    devices = [torch.device("sim", i) for i in range(2)]
    assert [limits.total_bytes(device) for device in devices] == [2 * MIB] * 2
    assert [limits.memory(device).free_bytes for device in devices] == [2 * MIB] * 2
    found = Rooms()
    tensors = [plain(MIB // 4, index(found.find(MIB // 4, disperse=True))) for _ in range(8)]
    assert sorted(index(tensor.device) for tensor in tensors) == [0] * 4 + [1] * 4


def test_a_limit_ends_with_its_simulator(simulator: Kind) -> None:
    """Also where the simulator enabled anew has just what the limit was, or what it had before."""

    def allocator_bytes() -> int:
        total: int = torch.get_device_module("sim").mem_get_info(0)[1]
        return total

    device = torch.device("sim", 0)
    sim.enable(devices=1, memory=4 * MIB)
    for memory in (2 * MIB, 4 * MIB):
        half = MemoryPolicy(min_bytes=1024, limit=0.5)
        with GPUPoolExecutor(memory=half):
            assert configure(half).limits.total_bytes(device) == allocator_bytes() == 2 * MIB
        sim.enable(devices=1, memory=memory)
        assert configure(half).limits.total_bytes(device) == memory, "no pool has come with it yet"
        with GPUPoolExecutor(memory=half):
            assert allocator_bytes() == memory // 2
        sim.enable(devices=1, memory=memory // 2)
        with GPUPoolExecutor(memory=MemoryPolicy(min_bytes=1024)):
            assert allocator_bytes() == memory // 2, "not what it had before"
        sim.enable(devices=1, memory=4 * MIB)


def test_devices_outlive_their_simulator(simulator: Kind) -> None:
    """Those that there are again, for the pool that came with them is still there."""
    policy = MemoryPolicy(min_bytes=1024, spill=("peer",))
    sim.enable(devices=3, memory=4 * MIB)
    with GPUPoolExecutor(1, memory=policy):
        sim.enable(devices=2, memory=8 * MIB)
        limits = configure(policy).limits
        assert limits.peers(torch.device("sim", 0)) == [torch.device("sim", 1)]
        assert limits.total_bytes(torch.device("sim", 1)) == 8 * MIB


def test_what_could_be_spilled_is_room(four: Rooms) -> None:
    movable = manage(plain(MIB * 3 // 4, 0))
    assert index(four.find(MIB // 2, disperse=False)) == 0
    movable.pin()
    assert index(four.find(MIB // 2, disperse=False)) != 0
    movable.unpin()
    alias = movable.view(torch.uint8).hold()
    with alias:
        assert index(four.find(MIB // 2, disperse=False)) != 0
    # Dispersed, a tensor goes where nothing must be spilled for it, unless that is nowhere.
    assert index(four.find(MIB // 2, disperse=True)) != 0
    held = [plain(MIB * 7 // 8, i) for i in (1, 2, 3)]
    assert index(four.find(MIB // 2, disperse=True)) == 0
    del held


def test_dispersed_choices_take_turns_among_equals(four: Rooms) -> None:
    assert sorted(index(four.find(1024, disperse=True)) for _ in range(8)) == [0, 0, 1, 1, 2, 2, 3, 3]
    taken = [plain(MIB // 2, i) for i in (0, 1, 3)]
    assert {index(four.find(1024, disperse=True)) for _ in range(8)} == {2}
    del taken


def test_threads_see_each_other_s_bookings(four: Rooms) -> None:
    """All choose before any allocates: two each."""
    barrier = threading.Barrier(8)

    def choose(_: int) -> int:
        with four.booked(MIB // 2) as device:
            barrier.wait(WAIT_S)
            return index(device)

    with ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(choose, range(8))) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [index(four.find(MIB, disperse=False)) for _ in range(2)] == [0, 0], "nothing stays booked"


def test_bookings_end_with_an_error(four: Rooms) -> None:
    with pytest.raises(ZeroDivisionError), four.booked(MIB):
        raise ZeroDivisionError
    assert {index(four.find(MIB, disperse=True)) for _ in range(4)} == {0, 1, 2, 3}


def test_more_than_any_device_has(four: Rooms) -> None:
    sim.set_capacity(2, 2 * MIB)
    assert index(four.find(2 * MIB, disperse=False)) == index(four.find(2 * MIB, disperse=True)) == 2
    with pytest.raises(DeviceMemoryError, match=r"no device for 3\.0 MiB .*sim:0 has 1\.0 MiB.* sim:2 has 2\.0 MiB"):
        four.find(3 * MIB, disperse=True)
    taken = plain(2 * MIB, 2)
    assert index(four.find(2 * MIB, disperse=False)) == 2, "the allocation waits there, or says who holds what"
    del taken


def test_cpu_alone() -> None:
    assert Rooms().find(1024, disperse=True) == Rooms().find(1024, disperse=False) == torch.device("cpu")
    with pytest.raises(DeviceMemoryError, match="cpu has"):
        Rooms().find(2**60, disperse=True)


def test_one_a_process_made_on_first_use() -> None:
    first = rooms()
    assert rooms() is first
    rooms.cache_clear()
    assert rooms() is not first


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_bytes_of_sparse_tensors(layout: torch.layout) -> None:
    sparse = torch.eye(4).to_sparse(layout=layout)
    indices = 2 * 4 * 8 if layout is torch.sparse_coo else (5 + 4) * 8
    assert tensor_bytes(sparse) == 4 * 4 + indices


def test_bytes_of_other_tensors() -> None:
    assert tensor_bytes(torch.ones(3, 4)[:, :2]) == 24
    assert tensor_bytes(torch.nn.LazyLinear(3).weight) == 0
    assert tensor_bytes(torch.ones(3, device="meta")) == 12
