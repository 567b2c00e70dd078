"""What scheduling is worth, on simulated devices whose kernels and links take time, and what it costs.

    python tests/bench/scheduling.py [--seeds 3] [--queued 100000]

1. 400 uneven tasks on 8 devices: the makespan against max(longest, total / 8), placed by load and in turn.
2. 300 tasks of 12 functions of unknown need, a quarter of them three times larger than the rest, on two devices that
   hold two and a half large ones: two rounds, without learning, with placement guided by what was learned, and with
   tasks held back by it.
3. Tasks that are given tensors on a device: the bytes that move, with locality and without.
4. Many queued tasks that do nothing: time and bytes a task beside the standard pool, and cancelling all of them.
5. Many tasks that ask for more than half of a device, so that nearly all of them are held: time a task.

Time is the simulator's: kernels and links are waited for without a processor. Our own work is real and comes on top.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import random
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait

import torch
from overhead import nothing, queued_bytes

from managed_exec import GPUPoolExecutor, MemoryPolicy, gpu_task, sim
from managed_exec.memory.manager import configure, manager
from managed_exec.scheduling import DeviceSnapshot, PlacementRequest
from managed_exec.scheduling.placement import least_loaded

MIB = 2**20
DEVICES = 8
UNEVEN_TASKS = 400
MEAN_S = 0.2  # far more than it costs to start a task, on a machine that others use as well
UNKNOWN_TASKS = 300
FUNCTIONS = 12
SMALL_BYTES = 2 * MIB  # of argument; a task has three times that at once
LINK_BYTES_S = 400e6


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


# 1. Makespan


def print_makespan(seeds: int) -> None:
    print(f"{'400 uneven tasks on 8 devices':38}{'bound s':>9}{'time s':>9}{'ratio':>8}{'used':>7}{'ideal':>8}")
    for seed in range(seeds):
        rng = random.Random(seed)
        lengths = [MEAN_S * rng.lognormvariate(-0.32, 0.8) for _ in range(UNEVEN_TASKS)]  # of mean 1
        needs = [rng.randint(1, 24) * MIB // 8 for _ in range(UNEVEN_TASKS)]
        bound_s = max(*lengths, sum(lengths) / DEVICES)
        ideal = in_order_s(lengths) / bound_s
        for placement in ("least-loaded", "round-robin"):
            sim.enable(devices=DEVICES, memory="4MiB")
            elapsed = seconds(lambda p=placement, a=lengths, b=needs: run_uneven(p, a, b))
            most = max(torch.accelerator.max_memory_allocated(i) for i in range(DEVICES)) / (4 * MIB)
            print(
                f"  {placement}, seed {seed}".ljust(38)
                + f"{bound_s:9.2f}{elapsed:9.2f}{elapsed / bound_s:8.3f}{most:7.0%}"
                + (f"{ideal:8.3f}  at most 1.10" if placement == "least-loaded" else "")
            )


def in_order_s(lengths: Sequence[float]) -> float:
    """Return the makespan if each task starts, in order, on the first free device, and starting costs nothing."""
    free_at = [0.0] * DEVICES
    for length_s in lengths:
        heapq.heapreplace(free_at, free_at[0] + length_s)
    return max(free_at)


def run_uneven(placement: str, lengths: Sequence[float], needs: Sequence[int]) -> None:
    def task(length_s: float, n_bytes: int) -> None:
        kept = torch.empty(n_bytes // 4, device="cuda")
        sim.run_kernel(length_s)
        del kept

    # A device's kernels run one after the other here, so one task at a time keeps it busy.
    with GPUPoolExecutor(DEVICES, placement=placement) as pool:
        futures = [
            pool.submit(gpu_task(memory=n_bytes)(lambda a=length_s, b=n_bytes: task(a, b)))
            for length_s, n_bytes in zip(lengths, needs, strict=True)
        ]
        for future in futures:
            future.result()


# 2. Unknown needs


def make_function(number: int) -> Callable[[torch.Tensor], float]:
    def work(x: torch.Tensor) -> float:
        """Have three times the argument at once: read by host code and by kernels in turn, as a solver does."""
        parts = [x.cuda() for _ in range(3)]
        for _ in range(4):
            time.sleep(0.004)
            for part in parts:
                part.add_(1)
        return parts[0][0].item()

    work.__qualname__ = f"work_{number}"
    return work


def print_unknown(seed: int) -> None:
    rng = random.Random(seed)
    functions = [make_function(number) for number in range(FUNCTIONS)]
    # A function is large or small, and its arguments vary by a fifth.
    calls = []
    for _ in range(UNKNOWN_TASKS):
        number = rng.randrange(FUNCTIONS)
        size = SMALL_BYTES * (3 if number % 4 == 0 else 1)
        calls.append((functions[number], torch.zeros(int(size * rng.uniform(0.8, 1.0)) // 4)))
    capacity = int(2.5 * 3 * 3 * SMALL_BYTES)
    print(f"\n{'300 tasks of unknown need':38}{'round 1, 2 s':>16}{'spilled MiB':>16}{'out of memory':>15}")
    for name, admission, learns in (
        ("warm-up", "hints", False),
        ("not learned", "hints", False),
        ("learned, guides placement", "hints", True),
        ("learned, holds back", "learned", True),
    ):
        gc.collect()
        sim.enable(devices=2, memory=capacity, kernel_s=1e-3, host_bandwidth=LINK_BYTES_S)
        policy = MemoryPolicy(admission=admission, wait_s=60)
        times, moved = [], []
        failures = 0
        with GPUPoolExecutor(16, memory=policy) as pool:
            pool.footprints.enabled = learns
            for _ in range(2):
                before = spilled_bytes()
                start = time.perf_counter()
                futures: list[Future[float]] = [pool.submit(fn, x) for fn, x in calls]
                failures += sum(future.exception() is not None for future in futures)
                times.append(time.perf_counter() - start)
                moved.append((spilled_bytes() - before) / MIB)
        print(f"  {name:36}{times[0]:8.2f}{times[1]:8.2f}{moved[0]:8.0f}{moved[1]:8.0f}{failures:15}")
        del futures
    gc.collect()
    configure(MemoryPolicy())


def spilled_bytes() -> int:
    return sum(manager().statistics().spilled_bytes.values())


# 3. Locality


def without_locality(devices: Sequence[DeviceSnapshot], request: PlacementRequest) -> int:
    return least_loaded(devices, request._replace(local_bytes={}))


def use(x: torch.Tensor) -> int:
    """Work with *x*; return the bytes that had to be moved for it."""
    here = x.cuda()
    for _ in range(5):
        here = here * 2
    return 0 if here.device == x.device else x.nbytes


def print_locality(seed: int) -> None:
    print(f"\n{'200 tasks on 4 MiB of a device each':38}{'time s':>9}{'moved MiB':>11}")
    for name, placement in (("with locality", "least-loaded"), ("without", without_locality)):
        sim.enable(devices=4, memory="256MiB", kernel_s=1e-3, peer_bandwidth=LINK_BYTES_S, host_bandwidth=LINK_BYTES_S)
        rng = random.Random(seed)
        with GPUPoolExecutor(8, placement=placement) as pool:
            make = [gpu_task(device=i)(lambda: torch.ones(MIB, device="cuda")) for i in range(4)]
            data = [pool.submit(make[i % 4]).result() for i in range(32)]
            start = time.perf_counter()
            moved = sum(future.result() for future in [pool.submit(use, rng.choice(data)) for _ in range(200)])
            elapsed = time.perf_counter() - start
        print(f"  {name:36}{elapsed:9.2f}{moved / MIB:11.0f}")
        del data
        gc.collect()


# 4. The queue


class Argument:
    """Something whose life can be followed."""


def queued(make: Callable[[], Executor], n_tasks: int) -> tuple[float, float, float]:
    """Return microseconds and bytes a queued task, and microseconds to run it."""
    gate = threading.Event()
    with make() as pool:
        blocker = pool.submit(gate.wait)
        gc.collect()
        start = time.perf_counter()
        futures = [pool.submit(nothing) for _ in range(n_tasks)]
        queued_s = time.perf_counter() - start
        start = time.perf_counter()
        gate.set()
        for future in (blocker, *futures):
            future.result()
        run_s = time.perf_counter() - start
    return queued_s / n_tasks * 1e6, queued_bytes(make, 1, n_tasks), run_s / n_tasks * 1e6


def cancelled(make: Callable[[], Executor], n_tasks: int) -> tuple[float, bool]:
    """Return microseconds to cancel a queued task by ``shutdown``, and whether anything of them is left."""
    gate = threading.Event()
    pool = make()
    pool.submit(gate.wait)
    argument = Argument()
    left = weakref.ref(argument)
    futures = [pool.submit(nothing_with, argument) for _ in range(n_tasks)]
    del argument
    took = seconds(lambda: pool.shutdown(wait=False, cancel_futures=True))
    assert all(future.cancelled() for future in futures)
    gate.set()
    pool.shutdown()
    return took / n_tasks * 1e6, left() is not None


def nothing_with(argument: Argument) -> None:
    return None


def print_queue(n_tasks: int) -> None:
    print(
        f"\n{f'{n_tasks} queued no-op tasks':38}{'queue us':>10}{'bytes':>8}{'run us':>9}{'cancel us':>11}{'left':>7}"
    )
    sim.disable()
    pools: list[tuple[str, Callable[[], Executor]]] = [
        ("standard pool", lambda: ThreadPoolExecutor(1)),
        ("this pool, CPU", lambda: GPUPoolExecutor(1, devices="cpu")),
        ("this pool, 4 simulated devices", lambda: GPUPoolExecutor(1)),
    ]
    for name, make in pools:
        if "simulated" in name:
            sim.enable(devices=4, memory="64MiB")
        queue_us, n_bytes, run_us = queued(make, n_tasks)
        cancel_us, left = cancelled(make, n_tasks)
        print(f"  {name:36}{queue_us:10.2f}{n_bytes:8.0f}{run_us:9.2f}{cancel_us:11.2f}{'yes' if left else 'no':>7}")


# 5. Held tasks


def print_held() -> None:
    print(f"\n{'held tasks of 3 ms, 4 devices':38}{'us':>9}{'ideal us':>10}")
    sim.enable(devices=4, memory="64MiB")
    fn = gpu_task(memory="40MiB")(lambda: time.sleep(0.003))
    for n_tasks in (1000, 16_000):
        with GPUPoolExecutor(8) as pool:
            elapsed = seconds(lambda n=n_tasks, p=pool: wait([p.submit(fn) for _ in range(n)]))
        print(f"  {n_tasks:<36}{elapsed / n_tasks * 1e6:9.0f}{0.003 / 4 * 1e6:10.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3, help="of the first figure; the others use seed 0")
    parser.add_argument("--queued", type=int, default=100_000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sim.enable(devices=DEVICES, memory="4MiB")
    run_uneven("least-loaded", [0.0] * 50, [MIB] * 50)  # warm
    print_makespan(arguments.seeds)
    print_unknown(0)
    print_locality(0)
    print_queue(arguments.queued)
    print_held()


if __name__ == "__main__":
    main()
