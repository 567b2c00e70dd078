"""Minutes of pools, submitters, faults and cancellations on two small devices: exact values, and nothing left."""

from __future__ import annotations

import gc
import random
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from conftest import Kind, allocated_bytes, eventually

from managed_exec import GPUPoolExecutor, sim
from managed_exec.memory.manager import MemoryManager, configure
from managed_exec.memory.policy import MemoryPolicy

DEVICE_BYTES = 512 * 1024
HOST_BYTES = 1024 * 1024
SUBMITTERS = 4
MOST_KEPT = 12  # results of a submitter that are alive at once
ROUND_S = 8  # the life of a pool
DURATION_S = 64
WAIT_S = 100


class Kept(NamedTuple):
    """A task and the value that its result must have."""

    future: Future[Any]
    expected: list[torch.Tensor]


def make(seed: int, elements: int) -> list[torch.Tensor]:
    """Return a tensor and two views of it."""
    base = torch.randn(elements, generator=torch.Generator().manual_seed(seed)).to("cuda") * 2
    return [base, base[1::2], base.view(4, -1).t()]


def combine(values: list[torch.Tensor], others: list[torch.Tensor]) -> list[torch.Tensor]:
    """Read results of other tasks, which others read too."""
    n = min(values[0].numel(), others[0].numel())
    a, b = values[0].reshape(-1)[:n].to("cuda"), others[0].reshape(-1)[:n].to("cuda")
    parts = [a * 0.5 + b * 0.25, torch.cat([a[: n // 2], b[n // 2 :]])]
    for _ in range(3):
        parts[0] = parts[0].tanh() + b
    return [*parts, parts[0][::3]]


def sort(values: list[torch.Tensor]) -> list[torch.Tensor]:
    ordered, places = values[0].reshape(-1).to("cuda").sort()
    return [ordered, places, ordered.cumsum(0)]


def change(value: torch.Tensor, before: threading.Event, after: threading.Event) -> list[torch.Tensor]:
    """Change a result of another task in place when it is this one's turn."""
    assert before.wait(WAIT_S)
    try:
        value.mul_(0.5).add_(1)
        value[::2].sub_(0.25)
        return [value.clone()]
    finally:
        after.set()


def train(seed: int, width: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    layers = [torch.nn.Linear(width, width) for _ in range(4)]
    with torch.no_grad():
        for layer in layers:
            for parameter in layer.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / width)
    model = torch.nn.Sequential(*layers).to("cuda")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    x = torch.randn(width, width, generator=generator).to("cuda")
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def on_cpu(call: Callable[..., list[torch.Tensor]], *args: Any) -> list[torch.Tensor]:
    """Return what *call* returns on the CPU, from a thread pool that has no accelerator."""
    with Kind("cpu").pool(1) as pool:
        return pool.submit(call, *args).result(WAIT_S)


class Submitter:
    """One thread that submits tasks to whichever pool there is, and checks their results."""

    def __init__(self, seed: int, stop: threading.Event) -> None:
        self.random = random.Random(seed)
        self.stop = stop
        self.pool: GPUPoolExecutor | None = None
        self.kept: list[Kept] = []
        self.checked = self.cancelled = 0
        self.error = ""

    def run(self) -> None:
        try:
            while not self.stop.is_set():
                self.step()
            while self.kept:
                self.check(self.kept.pop())
        except BaseException:
            self.error = traceback.format_exc()
        finally:
            self.kept.clear()

    def step(self) -> None:
        kind = self.random.choice(["make", "make", "combine", "combine", "sort", "change", "train", "check", "cancel"])
        if kind == "make":
            self.submit(make, self.random.randrange(1000), 4 * self.random.choice([64, 1000, 4000, 6000]))
        elif kind == "train":
            self.submit(train, self.random.randrange(1000), self.random.choice([16, 48]))
        elif kind == "check" or len(self.kept) < 2 or len(self.kept) > MOST_KEPT:
            if self.kept:
                self.check(self.kept.pop(self.random.randrange(len(self.kept))))
        elif kind == "cancel":
            kept = self.kept.pop()
            if kept.future.cancel():
                self.cancelled += 1
            else:
                self.check(kept)
        else:
            self.consume(kind)

    def consume(self, kind: str) -> None:
        """Submit a task that works on results of others."""
        for kept in self.kept[:]:
            self.value(kept)  # none is cancelled from here on
        first, second = self.random.sample(self.kept, 2)
        values, others = self.value(first), self.value(second)
        if kind == "combine":
            self.submit(combine, (values, first.expected), (others, second.expected))
        elif kind == "sort":
            self.submit(sort, (values, first.expected))
        elif values[0].is_floating_point():
            self.change_in_turns(values[0], first)
        del values, others

    def change_in_turns(self, value: torch.Tensor, kept: Kept) -> None:
        """Have tasks change one result in place, each after the other, in streams of their own."""
        # No task is left that reads it: ``consume`` has waited for all.
        turns = [threading.Event() for _ in range(4)]
        turns[0].set()
        before = kept.expected[0]
        pairs = list(pairwise(turns))
        futures = [self.submit_to_pool(change, value, *pair) for pair in pairs]
        for future, pair in zip(futures, pairs, strict=True):
            try:
                result = future.result(WAIT_S)
            except CancelledError:  # by the shutdown of its pool
                pair[1].set()
                continue
            expected = on_cpu(change, before, *pair)
            assert_equal(result, expected)
            del result

    def submit_to_pool(self, call: Callable[..., list[torch.Tensor]], *args: Any) -> Future[Any]:
        """Submit to the pool there is; if it is being shut down, to the next."""
        while True:
            pool = self.pool
            assert pool is not None
            try:
                return pool.submit(call, *args)
            except RuntimeError as error:
                if "after shutdown" not in str(error):
                    raise
                time.sleep(0.005)

    def submit(self, call: Callable[..., list[torch.Tensor]], *args: Any) -> None:
        """Submit *call*; of arguments that are pairs the second is the model of the first."""
        models = [arg[1] if isinstance(arg, tuple) else arg for arg in args]
        values = [arg[0] if isinstance(arg, tuple) else arg for arg in args]
        future = self.submit_to_pool(call, *values)
        self.kept.append(Kept(future, on_cpu(call, *models)))

    def value(self, kept: Kept) -> list[torch.Tensor]:
        try:
            return list(kept.future.result(WAIT_S))
        except CancelledError:  # by the shutdown of its pool
            index = self.kept.index(kept)
            values = [value.clone() for value in kept.expected]
            future: Future[Any] = Future()
            future.set_result(values)
            self.kept[index] = Kept(future, [value.clone() for value in values])
            return values

    def check(self, kept: Kept) -> None:
        try:
            result = kept.future.result(WAIT_S)
        except CancelledError:
            self.cancelled += 1
            return
        assert_equal(result, kept.expected)
        self.checked += 1


def assert_equal(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
        assert torch.equal(a.cpu(), b), f"largest difference: {(a.cpu() - b).abs().max().item()}"


def files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file() and path.name != "in-use"]


@pytest.mark.slow
@pytest.mark.timeout(DURATION_S + 3 * WAIT_S)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_minutes_of_everything(seed: int, simulator: Kind, tmp_path: Path) -> None:
    print(f"seed {seed}")
    sim.enable(devices=2, memory=DEVICE_BYTES)
    policy = MemoryPolicy(min_bytes=1024, host_limit=HOST_BYTES, spill_dir=tmp_path, wait_s=20)
    manager = configure(policy, [torch.device("sim", i) for i in range(2)])
    chance = random.Random(seed)
    stop = threading.Event()
    submitters = [Submitter(chance.randrange(2**30), stop) for _ in range(SUBMITTERS)]
    threads = [threading.Thread(target=submitter.run, daemon=True) for submitter in submitters]
    end = time.monotonic() + DURATION_S
    pools: list[GPUPoolExecutor] = []
    while time.monotonic() < end and not any(submitter.error for submitter in submitters):
        pool = Kind("sim").pool(chance.choice([2, 4, 8]), memory=policy, placement="round-robin")
        for submitter in submitters:
            submitter.pool = pool
        if not pools:
            for thread in threads:
                thread.start()
        else:
            pools.pop().shutdown(wait=chance.random() < 0.7, cancel_futures=chance.random() < 0.5)
        pools.append(pool)
        sim.faults.clear()
        sim.faults.fail_share(chance.choice([0.0, 0.01, 0.1]), chance.randrange(100))
        sim.faults.fail_allocation(chance.randrange(1, 50))
        stop.wait(ROUND_S * chance.random())
    stop.set()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive(), f"a submitter hangs, seed {seed}"
    pools.pop().shutdown()
    sim.faults.clear()
    errors = [submitter.error for submitter in submitters if submitter.error]
    assert not errors, f"seed {seed}\n" + "\n".join(errors)
    print(manager.statistics())
    print("checked", sum(s.checked for s in submitters), "cancelled", sum(s.cancelled for s in submitters))
    submitters.clear()
    del pool, submitter, thread
    check_nothing_left(manager, tmp_path)


def check_nothing_left(manager: MemoryManager, directory: Path) -> None:
    gc.collect()
    assert eventually(lambda: not manager.table.live())
    assert eventually(lambda: allocated_bytes() == 0)
    for i in range(2):
        assert torch.accelerator.max_memory_allocated(i) <= DEVICE_BYTES
    assert not manager.table.in_flight_elsewhere()
    statistics = manager.statistics()
    assert statistics.tier_bytes == {"peer": 0, "host": 0, "disk": 0}
    assert statistics.spilled_count["host"] > 100
    assert statistics.spilled_count["disk"] > 10
    assert not files(directory)
