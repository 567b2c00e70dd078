"""What a pool learns of the memory that its tasks need, and what it does with that."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import Kind, eventually

from managed_exec import GPUPoolExecutor, MemoryPolicy, gpu_task, sim
from managed_exec.memory.manager import configure
from managed_exec.options import Need
from managed_exec.scheduling.footprints import function_name

WAIT_S = 30
MIB = 2**20
LEARNED = MemoryPolicy(admission="learned", wait_s=5)


@pytest.fixture(autouse=True)
def policy_as_before(simulator: Kind):
    yield
    gc.collect()
    configure(MemoryPolicy())


def empty(megabytes: float) -> torch.Tensor:
    return torch.empty(int(megabytes * MIB // 4), device="cuda")


def three_at_once(megabytes: float = 1) -> None:
    """Have three at once, five in all."""
    first, second, third = (empty(megabytes) for _ in range(3))
    del first, second
    fourth = empty(megabytes)
    del third
    fifth = empty(megabytes)
    del fourth, fifth


def peak_of(pool: GPUPoolExecutor, fn: Callable[..., object]) -> int:
    return max(footprint.peak_bytes for footprint in pool.footprints.snapshot()[function_name(fn)])


class TestMeasuring:
    def test_most_bytes_at_once(self, simulator: Kind) -> None:
        with simulator.pool(max_workers=1) as pool:
            pool.submit(three_at_once).result(WAIT_S)
            assert peak_of(pool, three_at_once) == 3 * MIB
            pool.submit(three_at_once, 2).result(WAIT_S)
            assert peak_of(pool, three_at_once) == 6 * MIB

    def test_known_when_the_future_is_done(self, simulator: Kind) -> None:
        known: list[bool] = []
        gate = threading.Event()

        def task() -> None:
            gate.wait(WAIT_S)
            empty(1)

        with simulator.pool(max_workers=1) as pool:
            future = pool.submit(task)
            future.add_done_callback(lambda _: known.append(len(pool.footprints) == 1))
            gate.set()
        assert known == [True]

    def test_spilled_bytes_count(self, simulator: Kind) -> None:
        """With room the task would have had them on the device."""
        sim.enable(devices=1, memory="4MiB")

        def task() -> float:
            parts = [torch.ones(MIB // 4, device="cuda") for _ in range(8)]
            return sum(part[0].item() for part in parts)

        with simulator.pool(max_workers=1) as pool:
            assert pool.submit(task).result(WAIT_S) == 8
            assert peak_of(pool, task) == 8 * MIB

    def test_results_of_operations_on_arguments_count_for_the_task_that_runs(self, simulator: Kind) -> None:
        """Though they belong to the task that made the argument, to the memory manager."""

        def doubled(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        with simulator.pool(max_workers=1) as pool:
            x = pool.submit(empty, 2).result(WAIT_S)
            y = pool.submit(doubled, x).result(WAIT_S)
            assert pool.footprints.snapshot()[function_name(doubled)] == ((2 * MIB, 2 * MIB),)
        del x, y

    def test_backward_pass_and_copies_to_the_cpu(self, simulator: Kind) -> None:
        def task() -> torch.Tensor:
            x = torch.ones(MIB // 4, device="cuda", requires_grad=True)
            x.sum().backward()
            assert x.grad is not None
            return x.grad.cpu().repeat(8)

        with simulator.pool(max_workers=1) as pool:
            pool.submit(task).result(WAIT_S)
            assert 2 * MIB <= peak_of(pool, task) <= 3 * MIB, "the gradient, and nothing of the CPU"

    def test_small_tensors_and_tasks_without_any_leave_no_trace(self, simulator: Kind) -> None:
        with simulator.pool(max_workers=1) as pool:
            pool.submit(empty, 0.01).result(WAIT_S)
            pool.submit(abs, -1).result(WAIT_S)
            assert not pool.footprints.snapshot()

    def test_freed_by_another_thread(self, simulator: Kind) -> None:
        held: list[torch.Tensor] = []

        def task() -> None:
            for _ in range(4):
                held.append(empty(1))
                thread = threading.Thread(target=held.clear)
                thread.start()
                thread.join()

        with simulator.pool(max_workers=1) as pool:
            pool.submit(task).result(WAIT_S)
            assert peak_of(pool, task) == MIB

    @pytest.mark.parametrize("options", [{"memory": False}, {"devices": "cpu"}], ids=["unmanaged", "cpu"])
    def test_nothing_where_nothing_is_managed(self, simulator: Kind, options: dict[str, object]) -> None:
        with simulator.pool(max_workers=1, **options) as pool:
            pool.submit(three_at_once).result(WAIT_S)
            pool.submit(torch.empty, 2**60).exception(WAIT_S)
            assert not pool.footprints.snapshot()

    def test_switched_off(self, simulator: Kind) -> None:
        with simulator.pool(max_workers=1) as pool:
            pool.footprints.enabled = False
            pool.submit(three_at_once).result(WAIT_S)
            assert not pool.footprints.snapshot()

    def test_failed_task_shows_at_least_that(self, simulator: Kind) -> None:
        def task(megabytes: int, fails: bool) -> None:
            empty(megabytes)
            if fails:
                raise ValueError

        with simulator.pool(max_workers=1) as pool:
            seen = []
            for megabytes, fails in [(2, True), (3, False), (1, True), (4, True)]:
                pool.submit(task, megabytes, fails).exception(WAIT_S)
                seen.append(len(pool.footprints.snapshot()[function_name(task)]))
            assert seen == [1, 2, 2, 3]
            assert peak_of(pool, task) == 4 * MIB

    def test_goes_up_after_out_of_memory_and_not_beyond_the_device(self, simulator: Kind) -> None:
        def task(megabytes: int) -> None:
            kept = empty(10)
            empty(megabytes)
            del kept

        with simulator.pool(max_workers=1, devices=1) as pool:
            estimates = []
            for megabytes in (1, 500, 500, 500):
                pool.submit(task, megabytes).exception(WAIT_S)
                estimates.append(pool.footprints.estimate(function_name(task), 0))
        assert estimates == [11 * MIB, 22 * MIB, 44 * MIB, 64 * MIB]

    def test_error_of_an_argument_does_not_lose_the_task(self, simulator: Kind) -> None:
        """Whatever is looked at to learn may be an object of the user's."""

        class Odd(torch.nn.Module):
            def __getattr__(self, name: str) -> object:
                raise RuntimeError("no attributes")

        class Tuple(tuple):
            def __getitem__(self, key: object) -> object:
                raise SystemError("not even items")

        with simulator.pool(max_workers=2) as pool:
            pool.submit(three_at_once).result(WAIT_S)
            for odd in (Odd(), Tuple((1,))):
                assert pool.submit(lambda x: empty(1).numel(), odd).result(WAIT_S) == MIB // 4


class TestFiles:
    def test_next_pool_goes_on_with_what_was_saved(self, simulator: Kind, tmp_path: Path) -> None:
        with simulator.pool(max_workers=1) as pool:
            pool.submit(three_at_once).result(WAIT_S)
            pool.footprints.save(tmp_path / "footprints.json")
        with simulator.pool(max_workers=1) as pool:
            pool.footprints.load(tmp_path / "footprints.json")
            assert peak_of(pool, three_at_once) == 3 * MIB


class TestGuidance:
    """By default nothing is held back; a task goes where there is room for what it is expected to need."""

    def test_goes_where_there_is_room(self, simulator: Kind) -> None:
        gate = threading.Event()
        started = threading.Barrier(4)
        places: dict[str, int] = {}

        def large(megabytes: int) -> None:
            places["large"] = torch.accelerator.current_device_index()
            started.wait(WAIT_S)
            gate.wait(WAIT_S)

        def small() -> None:
            started.wait(WAIT_S)
            gate.wait(WAIT_S)

        def later() -> int:
            return torch.accelerator.current_device_index()

        with simulator.pool(max_workers=4, devices=2) as pool:
            for fn, megabytes in ((large, 60), (small, 1), (later, 30)):
                pool.footprints.note(function_name(fn), 0, megabytes * MIB)
            futures = [pool.submit(large, 60), *[pool.submit(small) for _ in range(2)]]
            assert eventually(lambda: pool._loads.running == 3)
            # Two on one device, the large one by itself on the other.
            started.wait(WAIT_S)
            snapshots = {snapshot.position: snapshot for snapshot in pool._loads.snapshots()}
            assert snapshots[places["large"]].running == 1
            assert snapshots[places["large"]].expected_bytes == 60 * MIB
            assert snapshots[1 - places["large"]].expected_bytes == 2 * MIB
            assert {snapshot.limit_bytes for snapshot in snapshots.values()} == {64 * MIB}
            assert {snapshot.reserved_bytes for snapshot in snapshots.values()} == {0}
            assert pool.submit(later).result(WAIT_S) == 1 - places["large"]
            gate.set()
            for future in futures:
                future.result(WAIT_S)
        assert [snapshot.expected_bytes for snapshot in pool._loads.snapshots()] == [0, 0]

    def test_nothing_is_held_back(self, simulator: Kind) -> None:
        """Eight tasks, each expected to need all of a device, wait for each other on two."""
        together = threading.Barrier(8)

        def task() -> int:
            return together.wait(WAIT_S)

        with simulator.pool(max_workers=8, devices=2) as pool:
            pool.footprints.note(function_name(task), 0, 500 * MIB)
            futures = [pool.submit(task) for _ in range(8)]
            assert sorted(future.result(WAIT_S) for future in futures) == list(range(8))
        assert [snapshot.expected_bytes for snapshot in pool._loads.snapshots()] == [0, 0]


class Holding:
    """Tasks that stay until they are let go, and how many of them there were at once."""

    def __init__(self, megabytes: float) -> None:
        self.megabytes = megabytes
        self.lock = threading.Lock()
        self.running = self.most = 0
        self.gate = threading.Semaphore(0)

    def __call__(self) -> None:
        with self.lock:
            self.running += 1
            self.most = max(self.most, self.running)
        kept = empty(self.megabytes)
        assert self.gate.acquire(timeout=WAIT_S)
        with self.lock:
            self.running -= 1
        del kept


class TestLearnedAdmission:
    def test_unknown_ones_one_to_a_device_until_one_has_shown_its_footprint(self, simulator: Kind) -> None:
        task = Holding(20)
        with simulator.pool(max_workers=8, devices=2, memory=LEARNED) as pool:
            futures = [pool.submit(task) for _ in range(12)]
            assert eventually(lambda: task.running == 2 and len(pool._tasks._held) == 10)
            assert [snapshot.reserved_bytes for snapshot in pool._loads.snapshots()] == [64 * MIB] * 2
            assert pool.submit(gpu_task(memory="1MiB")(lambda: 1)).running() is False
            task.gate.release()
            # One device is still the other unknown one's; the first takes three of 20 MiB now.
            assert eventually(lambda: task.running == 4)
            assert sorted(snapshot.running for snapshot in pool._loads.snapshots())[0] == 1
            task.gate.release(11)
            for future in futures:
                future.result(WAIT_S)
            assert peak_of(pool, task) == 20 * MIB
        assert task.most <= 6
        assert [snapshot.reserved_bytes for snapshot in pool._loads.snapshots()] == [0, 0]
        assert not pool._loads._kept_for

    def test_known_ones_as_many_as_have_room(self, simulator: Kind) -> None:
        task = Holding(20)
        with simulator.pool(max_workers=8, devices=2, memory=LEARNED) as pool:
            pool.footprints.note(function_name(task), 0, 20 * MIB)
            futures = [pool.submit(task) for _ in range(12)]
            assert eventually(lambda: task.running == 6 and len(pool._tasks._held) == 6)
            task.gate.release(12)
            for future in futures:
                future.result(WAIT_S)
        assert task.most == 6
        assert [snapshot.reserved_bytes for snapshot in pool._loads.snapshots()] == [0, 0]

    def test_guess_beyond_every_device_is_capped(self, simulator: Kind) -> None:
        task = Holding(1)
        task.gate.release(3)
        with simulator.pool(max_workers=2, memory=LEARNED) as pool:
            pool.footprints.note(function_name(task), 0, 2**50)
            for future in [pool.submit(task) for _ in range(3)]:
                future.result(WAIT_S)

    def test_hint_counts_more_than_a_guess(self, simulator: Kind) -> None:
        task = Holding(1)
        hinted = gpu_task(memory="30MiB")(task)
        with simulator.pool(max_workers=4, devices=1, memory=LEARNED) as pool:
            pool.footprints.note(function_name(hinted), 0, 60 * MIB)
            futures = [pool.submit(hinted) for _ in range(3)]
            assert eventually(lambda: task.running == 2 and pool._tasks._held)
            assert pool._loads.snapshots()[0].reserved_bytes == 60 * MIB
            task.gate.release(3)
            for future in futures:
                future.result(WAIT_S)

    def test_functions_without_device_memory_become_known(self, simulator: Kind) -> None:
        together = threading.Barrier(4)

        def task(waits: bool) -> None:
            if waits:
                together.wait(WAIT_S)

        with simulator.pool(max_workers=4, devices=1, memory=LEARNED) as pool:
            pool.submit(task, False).result(WAIT_S)
            assert dict(pool.footprints.snapshot()) == {function_name(task): ((0, 0),)}
            for future in [pool.submit(task, True) for _ in range(4)]:
                future.result(WAIT_S)

    def test_switched_off_while_tasks_are_held(self, simulator: Kind) -> None:
        task = Holding(1)
        with simulator.pool(max_workers=4, devices=1, memory=LEARNED) as pool:
            futures = [pool.submit(task) for _ in range(6)]
            assert eventually(lambda: task.running == 1 and len(pool._tasks._held) == 5)
            pool.footprints.enabled = False
            task.gate.release()
            assert eventually(lambda: task.running == 4)
            task.gate.release(5)
            for future in futures:
                future.result(WAIT_S)

    def test_retried_task_after_out_of_memory(self, simulator: Kind) -> None:
        runs: list[int] = []

        @gpu_task(on_oom="retry", retries=1)
        def task() -> int:
            runs.append(len(pool._loads._kept_for))
            if len(runs) == 1:
                empty(500)
            return len(runs)

        with simulator.pool(max_workers=4, devices=2, memory=LEARNED) as pool:
            assert pool.submit(task).result(WAIT_S) == 2
            assert pool.footprints.estimate(function_name(task), 0) == 64 * MIB
        assert [snapshot.reserved_bytes for snapshot in pool._loads.snapshots()] == [0, 0]

    def test_failing_function_does_not_stay_unknown(self, simulator: Kind) -> None:
        def task() -> None:
            raise ValueError

        with simulator.pool(max_workers=4, devices=2, memory=LEARNED) as pool:
            futures = [pool.submit(task) for _ in range(20)]
            assert all(isinstance(future.exception(WAIT_S), ValueError) for future in futures)
            assert function_name(task) in pool.footprints

    def test_cancelled_while_held(self, simulator: Kind) -> None:
        task = Holding(1)
        with simulator.pool(max_workers=4, devices=1, memory=LEARNED) as pool:
            futures = [pool.submit(task) for _ in range(6)]
            assert eventually(lambda: task.running == 1 and len(pool._tasks._held) == 5)
            assert all(future.cancel() for future in futures[1:])
            task.gate.release()
            futures[0].result(WAIT_S)
        assert task.most == 1
        assert not pool._tasks._held


@pytest.mark.parametrize("admission", ["always", None, True])
def test_unknown_admission(admission: object) -> None:
    with pytest.raises(ValueError, match=f"admission: expected 'hints' or 'learned', got {admission!r}"):
        MemoryPolicy(admission=admission)  # type: ignore[arg-type]


def test_needs_of_their_own_share_nothing() -> None:
    assert Need() == Need(0, None, False, None, 0, {})
    with pytest.raises(TypeError):
        Need().local_bytes[0] = 1  # type: ignore[index]
