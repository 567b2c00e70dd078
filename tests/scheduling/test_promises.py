"""What a thread pool promises, and what scheduling adds to it, whatever was learned: without a clock, by gates."""

from __future__ import annotations

import queue
import random
import threading
import weakref
from concurrent.futures import Future, wait

import pytest
import torch
from conftest import Kind, eventually

from managed_exec import GPUPoolExecutor, gpu_task, sim
from managed_exec.scheduling import DeviceSnapshot, PlacementRequest
from managed_exec.scheduling.footprints import function_name
from managed_exec.scheduling.held import MAX_PASSED

WAIT_S = 60
MIB = 2**20
WORKERS = 8


class Waiting:
    """Functions whose tasks wait for each other, each with memory of the device."""

    def __init__(self) -> None:
        self.together = threading.Barrier(WORKERS)
        self.items: queue.SimpleQueue[int | None] = queue.SimpleQueue()

    def meet(self, megabytes: int) -> int:
        kept = torch.empty(megabytes * MIB // 4, device="cuda")
        try:
            return self.together.wait(WAIT_S)
        finally:
            del kept

    def produce(self, n: int) -> None:
        kept = torch.empty(MIB // 4, device="cuda")
        for i in range(n):
            self.items.put(i)
        self.items.put(None)
        del kept

    def consume(self) -> list[int]:
        kept = torch.empty(MIB // 4, device="cuda")
        got: list[int] = []
        while (item := self.items.get(timeout=WAIT_S)) is not None:
            got.append(item)
        del kept
        return got


class TestTasksThatWaitForEachOther:
    """Two devices of 64 MiB, default settings."""

    @pytest.mark.parametrize("learned_bytes", [0, MIB, 60 * MIB, 2**50])
    def test_barrier_of_all_workers(self, simulator: Kind, learned_bytes: int) -> None:
        tasks = Waiting()
        with simulator.pool(max_workers=WORKERS, devices=2) as pool:
            pool.footprints.note(function_name(tasks.meet), 0, learned_bytes)
            for _ in range(3):
                futures = [pool.submit(tasks.meet, 4) for _ in range(WORKERS)]
                assert sorted(future.result(WAIT_S) for future in futures) == list(range(WORKERS))

    @pytest.mark.parametrize("learned_bytes", [0, 60 * MIB, 2**50])
    def test_consumer_before_its_producer(self, simulator: Kind, learned_bytes: int) -> None:
        tasks = Waiting()
        with simulator.pool(max_workers=2, devices=1) as pool:
            for fn in (tasks.consume, tasks.produce):
                pool.footprints.note(function_name(fn), 0, learned_bytes)
            for _ in range(3):
                consumer = pool.submit(tasks.consume)
                pool.submit(tasks.produce, 20).result(WAIT_S)
                assert consumer.result(WAIT_S) == list(range(20))

    def test_barrier_beside_tasks_that_are_held(self, simulator: Kind) -> None:
        """Those that ask for more than is left wait; those that ask for nothing are passed to the workers."""
        tasks = Waiting()
        gate = threading.Event()
        with simulator.pool(max_workers=WORKERS + 1, devices=1) as pool:
            first = pool.submit(gpu_task(memory="60MiB")(lambda: gate.wait(WAIT_S)))
            held = [pool.submit(gpu_task(memory="60MiB")(lambda: 1)) for _ in range(4)]
            futures = [pool.submit(tasks.meet, 0) for _ in range(WORKERS)]
            assert sorted(future.result(WAIT_S) for future in futures) == list(range(WORKERS))
            gate.set()
            assert [future.result(WAIT_S) for future in held] == [1] * 4
            assert first.result(WAIT_S)


class TestPriority:
    @pytest.mark.parametrize("workers", [1, 3])
    def test_flood_of_low_ones_delays_a_high_one_by_one_task(self, kind: Kind, workers: int) -> None:
        """Of those that run when it comes: the first to end makes room for it, before any other starts."""
        started: queue.SimpleQueue[object] = queue.SimpleQueue()
        gates = [threading.Event() for _ in range(200)]

        def low(i: int) -> None:
            started.put(i)
            assert gates[i].wait(WAIT_S)

        with kind.pool(max_workers=workers) as pool:
            flood = [pool.submit(gpu_task(priority=-1)(lambda i=i: low(i))) for i in range(len(gates))]
            running = [started.get(timeout=WAIT_S) for _ in range(workers)]
            high = pool.submit(gpu_task(priority=5)(lambda: started.put("high")))
            gates[running[-1]].set()  # type: ignore[call-overload]
            assert started.get(timeout=WAIT_S) == "high"
            for gate in gates:
                gate.set()
            assert wait([high, *flood], WAIT_S).not_done == set()


class TestLargeAmongSmall:
    """A large one that needs all of a device, so that none starts beside it before it says that it runs."""

    @pytest.mark.parametrize("seed", range(3))
    def test_among_small_ones_on_two_devices(self, simulator: Kind, seed: int) -> None:
        """One is kept for it after so many have passed; on the other they go on."""
        rng = random.Random(seed)
        order: list[tuple[str, int]] = []
        workers = 6

        def note(name: str) -> None:
            order.append((name, torch.accelerator.current_device_index()))

        with simulator.pool(max_workers=workers, devices=2) as pool:
            gates = [threading.Event(), threading.Event()]
            blockers = [
                pool.submit(gpu_task(memory="30MiB", device=i)(lambda gate=gate: gate.wait(WAIT_S)))
                for i, gate in enumerate(gates)
            ]
            assert eventually(lambda: pool._loads.running == 2)
            large = pool.submit(gpu_task(memory="64MiB")(lambda: note("large")))
            assert eventually(lambda: pool._tasks._held)
            small = [
                pool.submit(gpu_task(memory=f"{rng.randint(1, 8)}MiB")(lambda: note("small")))
                for _ in range(6 * MAX_PASSED)
            ]
            assert eventually(lambda: pool._loads._kept_for)
            (kept,) = pool._loads._kept_for
            gates[kept].set()
            large.result(WAIT_S)
            gates[1 - kept].set()
            assert wait([*small, *blockers], WAIT_S).not_done == set()
        passed = [device for _, device in order[: order.index(("large", kept))] if device == kept]
        # Each worker may have booked one more before it counted the last.
        assert len(passed) <= MAX_PASSED + workers
        assert len(order) == 1 + len(small)
        assert not pool._loads._kept_for
        assert [snapshot.reserved_bytes for snapshot in pool._loads.snapshots()] == [0, 0]

    def test_no_more_than_the_bound_pass_on_one_device(self, simulator: Kind) -> None:
        """Beside the one that runs a single worker is left, so starts are counted one by one."""
        order: list[str] = []
        gate = threading.Event()
        with simulator.pool(max_workers=2, devices=1) as pool:
            blocker = pool.submit(gpu_task(memory="30MiB")(lambda: gate.wait(WAIT_S)))
            assert eventually(lambda: pool._loads.running == 1)
            large = pool.submit(gpu_task(memory="64MiB")(lambda: order.append("large")))
            small = [pool.submit(gpu_task(memory="2MiB")(lambda: order.append("small"))) for _ in range(5 * MAX_PASSED)]
            assert eventually(lambda: len(order) == MAX_PASSED)
            gate.set()
            assert wait([large, blocker, *small], WAIT_S).not_done == set()
        assert order.index("large") == MAX_PASSED


class TestNoIdleDevice:
    def test_a_task_starts_on_an_idle_device_while_there_is_one(self, simulator: Kind) -> None:
        """With as many workers as devices. From this the makespan of list scheduling follows."""
        sim.enable(devices=8, memory="8MiB")
        rng = random.Random(0)
        beside: list[int] = []

        def task(n: int) -> int:
            index = torch.accelerator.current_device_index()
            beside.append(pool._loads.snapshots()[index].running)
            kept = torch.empty(n * MIB // 32, device="cuda")
            return kept.numel()

        with simulator.pool(max_workers=8) as pool:
            sizes = [rng.randint(1, 60) for _ in range(400)]
            for future in [pool.submit(task, n) for n in sizes]:
                future.result(WAIT_S)
        assert beside == [1] * 400


class TestLimits:
    def test_uneven_tasks_never_take_more_than_the_limit(self, simulator: Kind) -> None:
        """Eight devices, 400 seeded tasks that say what they need: by the bookings, and by the allocator."""
        sim.enable(devices=8, memory="8MiB")
        rng = random.Random(0)
        most = [0] * 8

        def task(n: int) -> int:
            kept = torch.empty(n * MIB // 32, device="cuda")
            for snapshot in pool._loads.snapshots():
                most[snapshot.position] = max(most[snapshot.position], snapshot.reserved_bytes)
            return kept.device.index

        with simulator.pool(max_workers=24) as pool:
            sizes = [rng.randint(1, 30) for _ in range(400)]
            futures = [pool.submit(gpu_task(memory=n * MIB // 8)(lambda n=n: task(n))) for n in sizes]
            assert {future.result(WAIT_S) for future in futures} == set(range(8))
            assert pool.submit(lambda: 1).result(WAIT_S) == 1
        assert max(most) <= 8 * MIB
        assert max(torch.accelerator.max_memory_allocated(i) for i in range(8)) <= 8 * MIB
        assert [snapshot.reserved_bytes for snapshot in pool._loads.snapshots()] == [0] * 8


class Argument:
    pass


class TestCancelling:
    N = 100_000

    def filled(self, pool: GPUPoolExecutor) -> tuple[threading.Event, Future[bool], list[Future[None]], weakref.ref]:
        gate, started = threading.Event(), threading.Event()
        blocker = pool.submit(lambda: started.set() or gate.wait(WAIT_S))
        assert started.wait(WAIT_S)
        argument = Argument()
        futures = [pool.submit(_nothing, argument) for _ in range(self.N)]
        assert pool._tasks.qsize() == self.N
        return gate, blocker, futures, weakref.ref(argument)

    def test_by_shutdown(self) -> None:
        pool = GPUPoolExecutor(1, devices="cpu")
        gate, blocker, futures, argument = self.filled(pool)
        pool.shutdown(wait=False, cancel_futures=True)
        assert all(future.cancelled() for future in futures)
        assert argument() is None, "nothing of the tasks is held, though their futures are"
        gate.set()
        pool.shutdown()
        assert blocker.result(WAIT_S)
        assert pool._loads.running == 0

    def test_one_by_one(self) -> None:
        with GPUPoolExecutor(1, devices="cpu") as pool:
            gate, blocker, futures, argument = self.filled(pool)
            assert all(future.cancel() for future in futures)
            gate.set()
            assert blocker.result(WAIT_S)
            assert wait(futures, WAIT_S).not_done == set()
            assert pool.submit(abs, -1).result(WAIT_S) == 1, "the worker has come through all of them"
            assert eventually(lambda: argument() is None)
            assert pool._tasks.qsize() == 0
            assert pool._loads.running == 0


def _nothing(argument: Argument) -> None:
    raise AssertionError("a cancelled task ran")


def test_what_waits_behind_a_kept_device_starts_beside_the_task_it_was_kept_for(simulator: Kind) -> None:
    """Also if it is looked at while that one is being placed."""
    gate, placing, placed, ran = (threading.Event() for _ in range(4))

    def place(devices: list[DeviceSnapshot], request: PlacementRequest) -> int:
        if request.expected_bytes == 40 * MIB and gate.is_set():
            placing.set()
            placed.wait(WAIT_S)
        return 0

    with simulator.pool(max_workers=2, devices=1, placement=place) as pool:
        pool.submit(gpu_task(memory="30MiB")(lambda: gate.wait(WAIT_S)))
        large = pool.submit(gpu_task(memory="40MiB")(lambda: ran.wait(WAIT_S)))
        for _ in range(MAX_PASSED):
            pool.submit(abs, -1).result(WAIT_S)
        small = pool.submit(ran.set)
        assert eventually(lambda: len(pool._tasks._held) == 2)
        gate.set()
        assert placing.wait(WAIT_S)
        assert eventually(pool._tasks._tokens.empty), "the other worker has looked"
        placed.set()
        assert large.result(WAIT_S), "they ran side by side"
        assert small.result(WAIT_S) is None
