"""Other devices: their memory as a tier, calls made on them, and reads that need not go home."""

from __future__ import annotations

import threading

import pytest
import torch
from conftest import Kind, allocated_bytes, eventually

from managed_exec import GPUPoolExecutor, MemoryPolicy, current_task, manage, sim
from managed_exec.errors import DeviceMemoryError, TensorLostError, TierFullError
from managed_exec.memory.manager import MemoryManager, configure
from managed_exec.sim import faults

WAIT_S = 30
KIB = 1024


def devices(count: int) -> list[torch.device]:
    return [torch.device("sim", i) for i in range(count)]


def on(device: str, kib: int, value: float = 1.0) -> torch.Tensor:
    return manage(torch.full((kib * KIB // 4,), value, device=device))


@pytest.fixture
def three(simulator: Kind) -> MemoryManager:
    """The manager of three devices of 1 MiB."""
    sim.enable(devices=3, memory="1MiB")
    return configure(MemoryPolicy(min_bytes=1024, wait_s=0.2), devices(3))


class TestPeerTier:
    def test_there_and_back(self, three: MemoryManager) -> None:
        x = on("sim:0", 100, 3.0)
        view = x[10:20]
        x.spill("peer")
        assert x.residency == view.residency == "peer"
        assert three.statistics().tier_bytes["peer"] == 100 * KIB
        assert torch.accelerator.memory_allocated(0) == 0
        assert allocated_bytes() == 100 * KIB, "in another device's memory"
        assert view.tolist() == [3.0] * 10
        x += 1
        assert x.residency == "device"
        assert view.tolist() == [4.0] * 10
        assert three.statistics().tier_bytes["peer"] == 0
        assert allocated_bytes() == 100 * KIB

    def test_the_emptiest_peer_is_chosen_and_a_quarter_of_it_stays_free(self, three: MemoryManager) -> None:
        filled = on("sim:1", 400)
        x, y = on("sim:0", 300), on("sim:0", 300)
        x.spill("peer")
        assert torch.accelerator.memory_allocated(2) == 300 * KIB
        y.spill("peer")
        assert torch.accelerator.memory_allocated(1) == 700 * KIB or torch.accelerator.memory_allocated(2) == 600 * KIB
        z = on("sim:0", 400)
        with pytest.raises(TierFullError, match="no tier has room"):
            z.spill("peer")
        assert z.residency == "device"
        assert [float(t.sum()) for t in (filled, x, y, z)] == [t.numel() for t in (filled, x, y, z)]

    def test_makes_way_for_the_peer_s_own(self, three: MemoryManager) -> None:
        x = on("sim:0", 500, 7.0)
        x.spill("peer")
        peer = next(i for i in (1, 2) if torch.accelerator.memory_allocated(i))
        own = on(f"sim:{peer}", 400)
        big = own.new_empty(600 * KIB // 4)
        assert x.residency == "host", "sunk, not brought home"
        assert three.statistics().spilled_bytes["host"] >= 500 * KIB
        assert own.residency == "device" or own[0].item() == 1
        assert big.numel() == 600 * KIB // 4
        assert x.tolist() == [7.0] * x.numel()

    def test_from_a_peer_to_the_disk(self, three: MemoryManager) -> None:
        x = on("sim:0", 100, 2.0)
        x.spill("peer").spill("disk")
        assert x.residency == "disk"
        assert three.statistics().tier_bytes == {"peer": 0, "host": 0, "disk": 100 * KIB}
        assert x.tolist() == [2.0] * x.numel()

    def test_peers_are_the_pools_devices_only(self, simulator: Kind) -> None:
        sim.enable(devices=3, memory="1MiB")
        configure(MemoryPolicy(min_bytes=1024), devices(1))
        x = on("sim:0", 100)
        with pytest.raises(TierFullError):
            x.spill("peer")

    def test_copy_goes_with_its_tensor(self, three: MemoryManager) -> None:
        x = on("sim:0", 100)
        x.spill("peer")
        del x
        assert eventually(lambda: allocated_bytes() == 0)
        assert three.statistics().tier_bytes["peer"] == 0

    def test_peer_that_breaks_with_the_only_copy(self, three: MemoryManager) -> None:
        lost, kept = on("sim:0", 100), on("sim:0", 100, 5.0)
        lost.spill("peer")
        peer = next(i for i in (1, 2) if torch.accelerator.memory_allocated(i))
        kept.spill("host")
        faults.break_device(peer)
        with pytest.raises(TensorLostError, match=f"were on sim:{peer}, which broke"):
            lost.unspill()
        assert lost.residency == "peer"
        assert kept.sum().item() == 5.0 * kept.numel()
        more = on("sim:0", 900)
        assert more.sum().item() == more.numel(), "the pool's other devices go on"
        del lost, kept, more
        faults.clear()


class TestReads:
    @pytest.mark.parametrize("tier", ["peer", "host", "disk"])
    def test_spilled_tensor_is_read_without_coming_home(self, three: MemoryManager, tier: str) -> None:
        x = manage(torch.arange(2 * 3 * 500, device="sim:0").reshape(2, 3, 500) * (1 + 2j)).to(torch.complex64)
        parts = {"whole": x, "view": x[:, 1, ::7], "real": x.real, "conj": x.mT.conj(), "imag": x.conj().imag}
        expected = {name: part.cpu() for name, part in parts.items()}
        x.spill(tier)
        into = torch.zeros(2, 3, 500, dtype=torch.complex64)
        into.copy_(x)
        assert torch.equal(into, expected["whole"])
        for name, part in parts.items():
            assert part.tolist() == expected[name].tolist(), name
        for name in ("whole", "view", "real"):
            assert torch.equal(parts[name].cpu(), expected[name]), name
            assert torch.equal(parts[name].to("sim:2").cpu(), expected[name]), name
            assert torch.equal(parts[name].to("cpu", torch.complex128), expected[name].to(torch.complex128)), name
        assert x.residency == tier
        for name in ("conj", "imag"):  # torch resolves these bits itself before it copies, at home
            assert torch.equal(parts[name].cpu(), expected[name]), name

    def test_backward_through_a_read(self, three: MemoryManager) -> None:
        x = on("sim:0", 100, 3.0).requires_grad_()
        x.spill("host")
        (x.cpu() ** 2).sum().backward()
        assert x.grad is not None
        assert x.grad.device == x.device
        assert x.grad.tolist() == [6.0] * x.numel()


class TestLimit:
    @pytest.mark.parametrize(
        ("limit", "limit_bytes"), [(512 * KIB, 512 * KIB), ("256KiB", 256 * KIB), (0.25, 256 * KIB)]
    )
    def test_is_kept_by_the_allocator(self, simulator: Kind, limit: object, limit_bytes: int) -> None:
        sim.enable(devices=1, memory="1MiB")
        policy = MemoryPolicy(limit=limit, min_bytes=1024)  # type: ignore[arg-type]
        with GPUPoolExecutor(max_workers=2, memory=policy) as pool:
            results = [pool.submit(torch.full, (KIB * 16,), float(i), device="cuda") for i in range(40)]
            assert [future.result(WAIT_S).sum().item() for future in results] == [i * KIB * 16 for i in range(40)]
            assert torch.accelerator.max_memory_allocated(0) <= limit_bytes
            error = pool.submit(torch.empty, limit_bytes // 4 + 1, device="cuda").exception(WAIT_S)
        assert isinstance(error, DeviceMemoryError)
        assert "more than the device has" in str(error)
        del results, error
        assert eventually(lambda: allocated_bytes() == 0)
        configure(MemoryPolicy())
        assert torch.sim.mem_get_info(0)[1] == KIB * KIB, "lifted with the manager"

    @pytest.mark.parametrize("limit", [0, -1, 0.0, 1.5, "much", True])
    def test_is_checked(self, limit: object) -> None:
        with pytest.raises((ValueError, TypeError), match="limit: "):
            MemoryPolicy(limit=limit)  # type: ignore[arg-type]


class TestMigration:
    """A device whose memory cannot be moved, beside an empty one: tasks' calls go to that, and the tasks with them."""

    @pytest.fixture
    def pool(self, simulator: Kind) -> GPUPoolExecutor:
        sim.enable(devices=2, memory="1MiB")
        return GPUPoolExecutor(
            max_workers=1, placement=lambda snapshots, request: 0, memory=MemoryPolicy(min_bytes=1024)
        )

    def run(self, pool: GPUPoolExecutor, task: object) -> object:
        """Run *task* bound to a device that a plain tensor nearly fills."""
        blocker = torch.empty(900 * KIB // 4, device="sim:0")
        try:
            with pool:
                return pool.submit(task).result(WAIT_S)  # type: ignore[arg-type]
        finally:
            del blocker

    def test_of_a_factory(self, pool: GPUPoolExecutor) -> None:
        def task() -> tuple[object, ...]:
            before = current_task()
            x = torch.full((KIB * 50,), 2.0, device="cuda")
            y = torch.ones(3, device="cuda")
            return str(before.device), str(x.device), str(current_task().device), str(y.device), x.sum().item()

        assert self.run(pool, task) == ("sim:0", "sim:1", "sim:1", "sim:1", KIB * 100.0)
        assert [snapshot.running for snapshot in pool._loads.snapshots()] == [0, 0]

    def test_of_a_transfer_with_its_gradient(self, pool: GPUPoolExecutor) -> None:
        def task() -> tuple[object, ...]:
            x = torch.full((KIB * 50,), 2.0, requires_grad=True)
            y = x.cuda()
            (y * y).sum().backward()
            return str(y.device), str(current_task().device), x.grad.sum().item()

        assert self.run(pool, task) == ("sim:1", "sim:1", KIB * 200.0)

    def test_of_a_kernel_and_its_operands(self, pool: GPUPoolExecutor) -> None:
        def task() -> tuple[object, ...]:
            x = torch.full((KIB,), 2.0, device="cuda", requires_grad=True)
            assert x.device.index == 0
            y = torch.outer(x[:300], x[:300])
            y.sum().backward()
            return str(y.device), str(x.grad.device), x.grad[0].item(), str(current_task().device)

        assert self.run(pool, task) == ("sim:1", "sim:0", 1200.0, "sim:1")
        assert [snapshot.running for snapshot in pool._loads.snapshots()] == [0, 0]

    def test_to_the_device_that_has_room_now(self, simulator: Kind) -> None:
        """Rather than to one where something could be moved; and where nothing can be, only to that."""
        for spill in ((), ("host",)):
            sim.enable(devices=3, memory="1MiB")
            policy = MemoryPolicy(min_bytes=1024, wait_s=0.2, spill=spill, host_limit=KIB)
            with GPUPoolExecutor(1, memory=policy) as pool:
                made = pool.submit(lambda: [torch.ones(250 * KIB // 4, device="cuda") for _ in range(8)]).result(60)
                assert {str(x.device) for x in made} == {"sim:0", "sim:1"}
                joined = pool.submit(lambda made=made: torch.cat([made[0], made[0]]))
                assert joined.result(60).device == torch.device("sim:2")
                del made, joined

    def test_not_of_what_names_its_device(self, pool: GPUPoolExecutor) -> None:
        def task() -> None:
            torch.empty(KIB * 50, device="cuda:0")

        with pytest.raises(DeviceMemoryError, match="sim:0"):
            self.run(pool, task)

    def test_not_of_pinned_operands(self, pool: GPUPoolExecutor) -> None:
        def task() -> None:
            x = torch.ones(KIB * 2, device="cuda").pin()
            torch.outer(x[:300], x[:300])

        with pytest.raises(DeviceMemoryError, match="pinned"):
            self.run(pool, task)

    def test_not_in_a_backward_pass(self, pool: GPUPoolExecutor) -> None:
        def task() -> None:
            x = torch.ones(300, device="cuda", requires_grad=True)
            y = torch.ones(KIB, device="cuda")
            z = x.sum() * y.sum()
            z.backward(retain_graph=True)
            x.expand(300, 300).backward(torch.ones(1, device="cuda").expand(300, 300) * 1)

        with pytest.raises(DeviceMemoryError, match="sim:0"):
            self.run(pool, task)

    def test_task_stays_where_the_other_device_takes_no_more_tasks(self, simulator: Kind) -> None:
        sim.enable(devices=2, memory="1MiB")
        blocker = torch.empty(900 * KIB // 4, device="sim:0")
        busy, done = threading.Event(), threading.Event()
        policy = MemoryPolicy(min_bytes=1024)
        places = iter([1, 0])
        with GPUPoolExecutor(tasks_per_device=1, placement=lambda s, r: next(places), memory=policy) as pool:

            def occupy() -> bool:
                busy.set()
                return done.wait(WAIT_S)

            other = pool.submit(occupy)
            assert busy.wait(WAIT_S)

            def task() -> tuple[object, ...]:
                x = torch.full((KIB * 50,), 2.0, device="cuda")
                return str(x.device), str(current_task().device), str(torch.ones(1, device="cuda").device)

            assert pool.submit(task).result(WAIT_S) == ("sim:1", "sim:0", "sim:0")
            done.set()
            assert other.result(WAIT_S)
        del blocker
