"""What a type checker says of programs that use the package. Read by mypy, in .ci/run, and not run by pytest."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from typing_extensions import assert_type

from managed_exec import (
    GPUPoolExecutor,
    ManagedModule,
    ManagedTensor,
    MemoryPolicy,
    current_task,
    device_manager,
    errors,
    gpu_task,
    manage,
    sim,
)
from managed_exec.events import logging_hook
from managed_exec.telemetry.prometheus import PoolMetrics
from managed_exec.telemetry.statistics import PoolStatistics
from managed_exec.telemetry.watch import View


@gpu_task(memory="1GiB", priority=3, device=0, retries=1, on_oom="retry")
def solve(n: int, *, scale: float = 1.0) -> torch.Tensor:
    return torch.ones(n) * scale


@gpu_task
def plain(n: int) -> str:
    return str(n)


@gpu_task()
def bare(n: int) -> list[int]:
    return [n]


class Solver:
    @gpu_task(device=lambda device: device.index != 0)
    def run(self, n: int) -> float:
        return float(n)


def decorated() -> None:
    assert_type(solve(3, scale=2.0), torch.Tensor)
    assert_type(solve.options(priority=1, device="cuda:1")(3), torch.Tensor)
    assert_type(plain(3), str)
    assert_type(bare(3), list[int])
    assert_type(Solver().run(3), float)
    assert_type(Solver.run.options(priority=1)(Solver(), 3), float)
    Solver().run("3")  # type: ignore[arg-type]
    solve("3")  # type: ignore[arg-type]
    solve(3, size=2)  # type: ignore[call-arg]
    plain("3")  # type: ignore[arg-type]
    solve.options(prioritty=1)  # type: ignore[call-arg]
    gpu_task(on_oom="never")  # type: ignore[call-overload]


def submitted(pool: GPUPoolExecutor) -> None:
    assert_type(pool.submit(solve, 3, scale=2.0), Future[torch.Tensor])
    assert_type(pool.submit(plain, 3), Future[str])
    assert_type(pool.submit(plain.options(priority=1), 3), Future[str])
    assert_type(pool.submit(solve.options(priority=2), 3).result(), torch.Tensor)
    assert_type(pool.submit(Solver().run, 3), Future[float])
    assert_type(pool.submit(functools.partial(plain, 3)), Future[str])
    assert_type(pool.map(plain, [1, 2]), Iterator[str])
    as_stock: ThreadPoolExecutor = pool
    as_stock.shutdown(wait=False, cancel_futures=True)


def constructed() -> None:
    placement: Callable[..., int] = lambda devices, request: devices[0].position  # noqa: E731 as a user may write it
    with GPUPoolExecutor(4, "name", print, ("argument",), devices=["cuda:0", 1], placement=placement) as pool:
        assert_type(pool, GPUPoolExecutor)
    GPUPoolExecutor(tasks_per_device=2, placement="pack", inherit_context=False, memory=False)
    GPUPoolExecutor(memory=MemoryPolicy(limit=0.8, spill=("host", "disk"), host_limit="12GiB", wait_s=1))
    GPUPoolExecutor(memory=True)  # type: ignore[arg-type]
    sim.enable(devices=2, memory="1GiB")


def observed(pool: GPUPoolExecutor) -> None:
    now = pool.statistics()
    assert_type(now, PoolStatistics)
    assert_type(now.tasks.waited_s, float)
    assert_type(now.devices[0].free_bytes, int | None)
    assert_type(now.devices[0].spilled_bytes, Mapping[str, int])
    now.tasks.failed = 3  # type: ignore[misc]
    with pool.watch(0.5, file=sys.stdout) as view, pool.trace("run.json"):
        assert_type(view, View)
    pool.watch().start().stop()
    assert_type(pool.map(plain, [1, 2], progress=True, in_flight="1MiB"), Iterator[str])
    metrics = PoolMetrics()
    GPUPoolExecutor(hooks=[metrics.hook("training"), logging_hook()])


def in_task() -> None:
    task = current_task()
    if task is not None:
        assert_type(task.device, torch.device)
        assert_type(task.id, int)


def tensors(module: torch.nn.Module) -> None:
    x = manage(torch.ones(3))
    assert_type(x, ManagedTensor)
    assert_type(x.spill("disk").unspill().pin().unpin(), ManagedTensor)
    assert_type(x.residency, str)
    with x.hold() as held:
        assert_type(held, torch.Tensor)
    assert_type(ManagedModule.from_module(module), torch.nn.Module)
    assert_type(device_manager.find_device(2**20), torch.device)
    try:
        x.unspill()
    except errors.DeviceMemoryError as error:
        out_of_memory: torch.OutOfMemoryError = error
        raise out_of_memory from None
