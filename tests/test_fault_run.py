"""Tasks that fail in every way at once: the pool ends with all its capacity but the broken device's."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, wait
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from conftest import Kind, allocated_bytes, eventually

from managed_exec import GPUPoolExecutor, MemoryPolicy, current_task, gpu_task, sim
from managed_exec.errors import TaskCancelledError, TaskTimeoutError
from managed_exec.memory.manager import manager
from managed_exec.scheduling import watchdog

WAIT_S = 60
TASKS = 200
WORKERS = 6
DEVICES = 3
DEVICE_BYTES = 4 * 2**20
NUMEL = 2**16  # of float32: a sixteenth of a device


def compute(i: int) -> float:
    """Train a step, with more than a device's tensors in all tasks together."""
    parts = [torch.full((NUMEL,), float(i), device="cuda") for _ in range(4)]
    weight = torch.ones(NUMEL, device="cuda", requires_grad=True)
    sum((part * weight).sum() for part in parts).backward()
    return weight.grad[0].item()


class Outcome(NamedTuple):
    """A task, and what it may end with besides the broken device's errors."""

    task: Callable[[], Any]
    errors: tuple[type[BaseException], ...] = ()  # one of these, if there are any
    value: float | None = None
    options: dict[str, Any] = {}  # noqa: RUF012 never changed


class Hang:
    """A task that looks at nothing, and returns some time after it was given up."""

    def __init__(self, threads: list[threading.Thread]) -> None:
        self.threads = threads
        self.given_up = threading.Event()

    def __call__(self) -> None:
        x = torch.ones(NUMEL, device="cuda")
        self.threads.append(threading.current_thread())
        self.given_up.wait(WAIT_S)
        x.add_(1)


class FaultRun:
    """Seeded tasks of all kinds, and what each may end with."""

    def __init__(self, seed: int, managed: bool) -> None:
        self.random = random.Random(seed)
        self.managed = managed
        self.threads: list[threading.Thread] = []  # of what was stuck
        self.breaks_at = self.random.randrange(TASKS // 4, TASKS // 2)
        self.broken: list[int] = []

    def task(self, i: int) -> Outcome:
        """Return the task with the number *i*."""
        if i == self.breaks_at:
            return Outcome(self.break_device, (torch.AcceleratorError,))
        options = self.random.choice([{}, {"memory": "1MiB"}, {"priority": 1}, {"memory": "3MiB", "priority": -1}])
        kinds: list[Outcome] = [
            *[Outcome(partial(compute, i), (), 4.0 * i)] * 6,
            Outcome(partial(self.fail, i), (ZeroDivisionError,)),
            Outcome(partial(self.run_out, i), (torch.OutOfMemoryError,), None, {"on_oom": "retry", "retries": 1}),
            Outcome(partial(self.run_out, i), (torch.OutOfMemoryError,)),
            Outcome(lambda: None),
            Outcome(partial(sys.exit, i), (SystemExit,)),
            *[Outcome(self.never_end, (TaskCancelledError, CancelledError))] * 2,
            Outcome(self.never_end, (TaskTimeoutError,), None, {"timeout": 0.05}),
            Outcome(Hang(self.threads), (TaskTimeoutError,), None, {"timeout": 0.05}),
        ]
        outcome = self.random.choice(kinds)
        return outcome._replace(options={**options, **outcome.options})

    def fail(self, i: int) -> None:
        x = torch.ones(NUMEL, device="cuda")
        i / int(x.sum().item() - NUMEL)

    def run_out(self, i: int) -> None:
        x = torch.ones(NUMEL, device="cuda")
        torch.ones(10 * DEVICE_BYTES, device="cuda")
        x.add_(i)

    def never_end(self) -> None:
        x = torch.ones(NUMEL, device="cuda")
        while True:
            x = x * 1.0
            if not self.managed:
                current_task().checkpoint()

    def break_device(self) -> None:
        self.broken.append(current_task().device.index)
        sim.faults.break_device(self.broken[0])
        compute(1)

    def start(self, pool: GPUPoolExecutor) -> list[tuple[Future[Any], Outcome]]:
        """Submit everything, and cancel what is to be cancelled, queued or running, from another thread."""
        outcomes = [self.task(i) for i in range(TASKS)]
        started = []
        for outcome in outcomes:
            task = outcome.task
            future = pool.submit(gpu_task(**outcome.options)(lambda task=task: task()))
            if isinstance(task, Hang):
                future.add_done_callback(lambda _, task=task: task.given_up.set())
            started.append((future, outcome))
        to_cancel = [future for future, outcome in started if TaskCancelledError in outcome.errors]
        delays = [self.random.uniform(0, 0.02) for _ in to_cancel]

        def cancel() -> None:
            for future, delay in zip(to_cancel, delays, strict=True):
                time.sleep(delay)
                while not (future.cancel() or future.running() or future.done()):
                    time.sleep(delay)

        canceller = threading.Thread(target=cancel)
        canceller.start()
        canceller.join(WAIT_S)
        return started


@pytest.fixture
def devices(simulator: Kind, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kind]:
    """Three small simulated devices, mended afterwards."""
    sim.enable(devices=DEVICES, memory=DEVICE_BYTES)
    monkeypatch.setattr(watchdog, "GRACE_S", 0.2)
    yield simulator
    sim.faults.clear()


def check_capacity(pool: GPUPoolExecutor, broken: int) -> None:
    """Check that as many tasks as ever run at once, on all devices but the broken one."""
    together = threading.Barrier(WORKERS)

    def meet() -> int:
        together.wait(WAIT_S)
        return int(torch.ones(NUMEL, device="cuda").device.index)

    found = [future.result(WAIT_S) for future in [pool.submit(meet) for _ in range(WORKERS)]]
    assert set(found) == set(range(DEVICES)) - {broken}


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 30))])
@pytest.mark.parametrize("managed", [True, False], ids=["managed", "unmanaged"])
def test_pool_survives_its_tasks(devices: Kind, seed: int, managed: bool) -> None:
    run = FaultRun(seed, managed)
    memory = MemoryPolicy(min_bytes=1024, wait_s=1) if managed else False
    with devices.pool(max_workers=WORKERS, memory=memory) as pool:
        started = run.start(pool)
        assert not wait([future for future, _ in started], WAIT_S).not_done
        for future, outcome in started:
            check_outcome(future, outcome, managed)
        del future, outcome
        outcomes = len(started)
        check_capacity(pool, run.broken[0])
        assert eventually(lambda: not any(thread.is_alive() for thread in run.threads))
        snapshots = pool._loads.snapshots()
        assert [(s.running, s.reserved_bytes) for s in snapshots] == [(0, 0)] * DEVICES
        assert not pool._watchdog.running
        assert len(pool._threads) == WORKERS
        started.clear()
        assert eventually(lambda: allocated_bytes() == 0), allocated_bytes()
    assert outcomes == TASKS
    if managed:
        assert not any(manager().statistics().tier_bytes.values())


def check_outcome(future: Future[Any], outcome: Outcome, managed: bool) -> None:
    """Check that a task ended with its value, or with an error of its own or of the broken device."""
    if future.cancelled():
        assert CancelledError in outcome.errors
        return
    error = future.exception(0)
    if error is None:
        assert not outcome.errors
        assert future.result() == outcome.value
        return
    # Where nothing is managed, what the tasks need together is more than a device has.
    others = (torch.AcceleratorError,) if managed else (torch.AcceleratorError, torch.OutOfMemoryError)
    assert isinstance(error, (*outcome.errors, *others)), repr(error)
