"""The executor's promises that a real accelerator can break and the CPU cannot."""

from __future__ import annotations

import gc
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from conftest import Kind, allocated_bytes

from managed_exec import current_task

from .conftest import SIMULATOR_STANDS_IN

WAIT_S = 60
EXAMPLE = Path(__file__).parents[2] / "examples" / "pde_solve.py"


def test_twice_as_many_tasks_as_devices_fill_every_device_twice(accelerator: Kind) -> None:
    tasks = 2 * accelerator.device_count
    together = threading.Barrier(tasks)

    def task() -> torch.device:
        together.wait(WAIT_S)
        return torch.ones(10).cuda().device

    with accelerator.pool(max_workers=tasks) as pool:
        used = Counter(future.result(WAIT_S) for future in [pool.submit(task) for _ in range(tasks)])
    assert used == {torch.device(accelerator.name, i): 2 for i in range(accelerator.device_count)}


def test_each_worker_has_its_own_stream(accelerator: Kind) -> None:
    together = threading.Barrier(4)

    def task() -> tuple[int, int]:
        together.wait(WAIT_S)
        current = current_task()
        assert current is not None
        assert torch.accelerator.current_stream() == current.stream
        return current.stream.device_index, current.stream.stream_id

    with accelerator.pool(max_workers=4, devices=1) as pool:
        streams = {future.result(WAIT_S) for future in [pool.submit(task) for _ in range(4)]}
    default = torch.accelerator.current_stream(0)
    assert len(streams) == 4
    assert (default.device_index, default.stream_id) not in streams


def test_submitting_thread_keeps_its_device_and_streams(accelerator: Kind) -> None:
    def state() -> tuple[object, ...]:
        streams = [torch.accelerator.current_stream(i) for i in range(accelerator.device_count)]
        return torch.accelerator.current_device_index(), *streams

    before = state()
    with accelerator.pool(max_workers=4) as pool:
        list(pool.map(lambda i: (torch.ones(i) * 2).cuda().sum().item(), range(1, 20)))
        assert state() == before
    assert state() == before


def test_values_are_the_cpu_s_whatever_runs_beside(accelerator: Kind) -> None:
    generator = torch.Generator().manual_seed(0)
    matrices = [torch.randn(60, 60, generator=generator, dtype=torch.float64) for _ in range(32)]

    def solve(matrix: torch.Tensor) -> torch.Tensor:
        matrix = matrix.cuda()
        x = torch.linalg.solve(matrix @ matrix.mT + torch.eye(60, device="cuda", dtype=torch.float64), matrix)
        return x.cpu()

    with accelerator.pool(max_workers=8) as pool:
        for matrix, solved in zip(matrices, pool.map(solve, matrices), strict=True):
            expected = torch.linalg.solve(matrix @ matrix.mT + torch.eye(60, dtype=torch.float64), matrix)
            torch.testing.assert_close(solved, expected, rtol=1e-9, atol=1e-9)


def test_gradients_of_tasks_side_by_side(accelerator: Kind) -> None:
    def gradient(scale: int) -> torch.Tensor:
        x = torch.full((1000,), float(scale), device="cuda", requires_grad=True)
        for _ in range(5):
            (x * x).sum().backward()
        return x.grad

    with accelerator.pool(max_workers=4) as pool:
        results = list(pool.map(gradient, range(1, 17)))
    assert [result.unique().tolist() for result in results] == [[10.0 * scale] for scale in range(1, 17)]


def test_result_is_read_without_synchronising(accelerator: Kind) -> None:
    with accelerator.pool(max_workers=4) as pool:
        totals = [x.sum() for x in pool.map(lambda i: torch.full((100_000,), float(i), device="cuda"), range(20))]
        assert [total.item() for total in totals] == [100_000.0 * i for i in range(20)]


def test_out_of_memory_failure_holds_no_device_memory(accelerator: Kind) -> None:
    free, total = torch.get_device_module(accelerator.name).mem_get_info(0)
    before = allocated_bytes()

    def greedy_solver() -> None:
        held = torch.empty(min(free // 4, 2**28), dtype=torch.uint8, device="cuda")
        more = torch.empty(2 * total, dtype=torch.uint8, device="cuda")
        held[0] = more[0]

    with accelerator.pool(max_workers=1, devices=1) as pool:
        future = pool.submit(greedy_solver)
        error = future.exception(WAIT_S)
        assert isinstance(error, torch.OutOfMemoryError)
        assert allocated_bytes() == before
        assert "greedy_solver" in "".join(traceback.format_exception(error))
        assert pool.submit(lambda: torch.ones(1000, device="cuda").sum().item()).result(WAIT_S) == 1000


def test_example_solves_its_equation(accelerator: Kind) -> None:
    simulated = ["--sim", "2x64MiB"] if SIMULATOR_STANDS_IN else []
    run = subprocess.run(
        [sys.executable, EXAMPLE, "--level", "3", "--patches", "8", "--sweeps", "3", *simulated],
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "largest difference between the two" in run.stdout
    assert f"{accelerator.name}:0" in run.stdout


def test_cost_of_a_task(accelerator: Kind, capsys: pytest.CaptureFixture[str]) -> None:
    """Print what a task that does nothing costs over the standard pool. A figure, not a bound: machines differ."""
    tasks, rounds = 1000, 5

    def bulk_s(pool: Executor) -> float:
        start = time.perf_counter()
        for future in [pool.submit(int) for _ in range(tasks)]:
            future.result(WAIT_S)
        return (time.perf_counter() - start) / tasks

    def round_trip_s(pool: Executor) -> float:
        start = time.perf_counter()
        for _ in range(tasks // 10):
            pool.submit(int).result(WAIT_S)
        return (time.perf_counter() - start) / (tasks // 10)

    lines = []
    gc.collect()
    with ThreadPoolExecutor(4) as stock, accelerator.pool(max_workers=4) as pool:
        for name, measure in (("in bulk", bulk_s), ("round trip", round_trip_s)):
            measure(stock), measure(pool)
            pairs = [(measure(stock), measure(pool)) for _ in range(rounds)]
            ratio = statistics.median(ours / theirs for theirs, ours in pairs)
            ours_us = statistics.median(ours for _, ours in pairs) * 1e6
            lines.append(f"no-op task {name} on {accelerator.name}: {ours_us:.0f} us, {ratio:.2f} x the standard pool")
    with capsys.disabled():
        print("", *lines, sep="\n")
