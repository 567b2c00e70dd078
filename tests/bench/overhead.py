"""What the pool costs over the standard thread pool, as ratios within one run.

    python tests/bench/overhead.py [--sim 4x64MiB] [--rounds 15]

Each figure alternates between the two pools, round by round, and prints the median of the rounds' ratios: a noisy
machine then disturbs both sides alike. The budgets are the design's.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import threading
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor

import torch
from torch.overrides import TorchFunctionMode

from managed_exec import GPUPoolExecutor, sim

BULK_TASKS = 5_000
ROUND_TRIPS = 500
QUEUED_TASKS = 20_000
OPERATIONS = 20_000
WORKERS = 4


def nothing() -> None:
    return None


def bulk_s(pool: Executor) -> float:
    """Seconds a task, many submitted at once."""
    start = time.perf_counter()
    for future in [pool.submit(nothing) for _ in range(BULK_TASKS)]:
        future.result()
    return (time.perf_counter() - start) / BULK_TASKS


def round_trip_s(pool: Executor) -> float:
    """Seconds a task, each waited for before the next."""
    start = time.perf_counter()
    for _ in range(ROUND_TRIPS):
        pool.submit(nothing).result()
    return (time.perf_counter() - start) / ROUND_TRIPS


class EmptyMode(TorchFunctionMode):
    """The least that a function mode can do; what it costs is torch's part of what ours costs."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **kwargs) if kwargs else func(*args)


def add_s() -> float:
    a = torch.ones(4)
    start = time.perf_counter()
    for _ in range(OPERATIONS):
        torch.add(a, a)
    return (time.perf_counter() - start) / OPERATIONS


def operation_s(pool: Executor) -> float:
    """Seconds a plain operation on four numbers, in a task."""
    return pool.submit(add_s).result()


def operation_in_empty_mode_s() -> float:
    with EmptyMode():
        return add_s()


def first_result_s(make: Callable[[], Executor]) -> float:
    """Seconds from construction to the first result."""
    start = time.perf_counter()
    pool = make()
    pool.submit(nothing).result()
    elapsed = time.perf_counter() - start
    pool.shutdown()
    return elapsed


def queued_bytes(make: Callable[[], Executor], workers: int = WORKERS, n_tasks: int = QUEUED_TASKS) -> float:
    """Bytes of Python memory a task that waits in the queue, *workers* all being busy."""
    gate = threading.Event()
    with make() as pool:
        blockers = [pool.submit(gate.wait) for _ in range(workers)]
        gc.collect()
        tracemalloc.start()
        futures = [pool.submit(nothing) for _ in range(n_tasks)]
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        gate.set()
        for future in blockers + futures:
            future.result()
    return held / n_tasks


def compare(rounds: int, stock: Callable[[], float], ours: Callable[[], float]) -> tuple[float, float, float]:
    """Return the medians of both, and of the rounds' ratios."""
    pairs = []
    for i in range(rounds):
        # Whoever comes second finds warmer caches, so they take turns.
        if i % 2:
            second = ours()
            pairs.append((stock(), second))
        else:
            first = stock()
            pairs.append((first, ours()))
    return (
        statistics.median(a for a, _ in pairs),
        statistics.median(b for _, b in pairs),
        statistics.median(b / a for a, b in pairs),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sim", metavar="4x64MiB", help="simulated devices and their memory")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    if arguments.sim:
        count, _, memory = arguments.sim.partition("x")
        sim.enable(devices=int(count), memory=memory)
    torch.set_num_threads(1)

    def stock_pool() -> Executor:
        return ThreadPoolExecutor(max_workers=WORKERS)

    def our_pool() -> Executor:
        return GPUPoolExecutor(max_workers=WORKERS)

    print(f"{'':34}{'stock':>10}{'pool':>10}{'ratio':>8}  budget")
    with stock_pool() as stock, our_pool() as ours:
        for pool in (stock, ours):
            bulk_s(pool)
        rows = [
            ("no-op task in bulk, us", bulk_s, "at most 2, aim 1.5"),
            ("round trip of a no-op task, us", round_trip_s, "at most 1.5, aim 1.2"),
            ("plain operation in a task, us", operation_s, ""),
        ]
        for name, measure, budget in rows:
            a, b, ratio = compare(arguments.rounds, lambda m=measure: m(stock), lambda m=measure: m(ours))
            more = budget or f"+{(b - a) * 1e6:.2f} us of at most +1.5, aim +1.0"
            print(f"{name:34}{a * 1e6:10.2f}{b * 1e6:10.2f}{ratio:8.2f}  {more}")
        a, b, ratio = compare(arguments.rounds, lambda: operation_s(stock), operation_in_empty_mode_s)
        print(
            f"{'  the same in an empty mode, us':34}{a * 1e6:10.2f}{b * 1e6:10.2f}{ratio:8.2f}  +{(b - a) * 1e6:.2f} us"
        )
    a, b, _ = compare(arguments.rounds, lambda: first_result_s(stock_pool), lambda: first_result_s(our_pool))
    print(f"{'construction to first result, ms':34}{a * 1e3:10.2f}{b * 1e3:10.2f}{b / a:8.2f}  under 5 ms more")
    a, b, ratio = compare(3, lambda: queued_bytes(stock_pool), lambda: queued_bytes(our_pool))
    print(f"{'queued task, bytes':34}{a:10.0f}{b:10.0f}{ratio:8.2f}  at most 2")


if __name__ == "__main__":
    main()
