"""Processes that end while they run tasks, and everything that ends a pool: nothing else is harmed, nothing is left."""

from __future__ import annotations

import ctypes
import functools
import os
import random
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from conftest import eventually, make_kind
from processes import WAIT_S, lane_pids, nothing_left_by_processes, wait_for

from managed_exec import GPUPoolExecutor, current_task, gpu_task, sim
from managed_exec.errors import TaskCancelledError, TaskTimeoutError, WorkerLostError
from managed_exec.events import Event, TaskFinished, TaskRetried, TaskStarted, TaskSubmitted
from managed_exec.scheduling import watchdog

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def pool() -> Iterator[GPUPoolExecutor]:
    """Two lanes, each on a simulated device of its own."""
    with nothing_left_by_processes():
        for _ in make_kind("sim"):
            sim.enable(devices=2, memory="64MiB")
            with GPUPoolExecutor(2, workers="processes", tasks_per_device=1) as pool:
                yield pool


@pytest.fixture(autouse=True)
def nothing_left() -> None:
    """Do not look at every test for itself: the pool of the module does so at its end."""


class TestStopping:
    """A task in a process is told to stop as one in a thread is, and ended with its process if it does not."""

    @pytest.mark.parametrize("why", ["cancelled", "timeout"])
    def test_one_that_looks_stops_and_its_process_goes_on(
        self, pool: GPUPoolExecutor, why: str, tmp_path: Path
    ) -> None:
        expected = TaskCancelledError if why == "cancelled" else TaskTimeoutError
        task = gpu_task(device=0, timeout=None if why == "cancelled" else 0.3)(look_until_stopped)
        future = pool.submit(task, tmp_path)
        assert eventually(lambda: any(tmp_path.iterdir()), WAIT_S)
        if why == "cancelled":
            assert not future.cancel()
        error = future.exception(WAIT_S)
        assert type(error) is expected
        assert "look_until_stopped" in str(error.__cause__), "with its traceback there"
        assert pool.submit(gpu_task(device=0)(functools.partial(os.getpid))).result(WAIT_S) == int(
            next(tmp_path.iterdir()).name
        )

    def test_a_managed_operation_looks(self, pool: GPUPoolExecutor, tmp_path: Path) -> None:
        future = pool.submit(compute_until_stopped, tmp_path)
        assert eventually(lambda: any(tmp_path.iterdir()), WAIT_S)
        future.cancel()
        assert isinstance(future.exception(WAIT_S), TaskCancelledError)

    def test_one_that_does_not_look_is_ended_with_its_process(
        self, pool: GPUPoolExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(watchdog, "GRACE_S", 0.3)
        future = pool.submit(gpu_task(device=1, retries=3, timeout=0.1)(never_look), tmp_path)
        assert isinstance(future.exception(WAIT_S), TaskTimeoutError)
        pids = {int(path.name) for path in tmp_path.iterdir()}
        assert len(pids) == 1, "what was to stop does not run again"
        assert eventually(lambda: pids.isdisjoint(lane_pids()), WAIT_S)
        assert pool.submit(gpu_task(device=1)(lambda: current_task().device.index)).result(WAIT_S) == 1

    def test_one_that_is_told_while_its_process_starts_never_runs(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(watchdog, "GRACE_S", 0.2)
        with nothing_left_by_processes():
            initializer = functools.partial(never_look, tmp_path)
            with GPUPoolExecutor(1, workers="processes", devices="cpu", initializer=initializer) as pool:
                future = pool.submit(os.mkdir, tmp_path / "ran")
                assert eventually(lambda: any(tmp_path.iterdir()), WAIT_S)
                assert not future.cancel()
                assert isinstance(future.exception(WAIT_S), TaskCancelledError)
        assert not (tmp_path / "ran").exists()

    def test_the_clock_starts_with_the_task(self) -> None:
        """And not with its process, which takes longer."""
        with (
            nothing_left_by_processes(),
            GPUPoolExecutor(1, workers="processes", devices="cpu") as pool,
        ):
            assert pool.submit(gpu_task(timeout=0.5)(abs_of), -3).result(WAIT_S) == 3

    @pytest.mark.parametrize("gives_up", [False, True])
    def test_while_its_process_starts(self, gives_up: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """It is not run, also if it was given up meanwhile; a timeout of its own makes no difference."""
        if gives_up:
            monkeypatch.setattr(watchdog, "GRACE_S", 0.05)
        with (
            nothing_left_by_processes(),
            GPUPoolExecutor(
                1, workers="processes", devices="cpu", initializer=come_and_wait, initargs=(tmp_path,)
            ) as pool,
        ):
            future = pool.submit(gpu_task(timeout=3600)(never_look), tmp_path)
            assert eventually((tmp_path / "came").exists, WAIT_S)
            assert not future.cancel()
            if not gives_up:
                (tmp_path / "go").touch()
            assert isinstance(future.exception(WAIT_S), TaskCancelledError)
            (tmp_path / "go").touch()
            assert pool.submit(abs_of, -1).result(WAIT_S) == 1
        assert {path.name for path in tmp_path.iterdir()} == {"came", "go"}, "it has not run"


def come_and_wait(folder: Path) -> None:
    (folder / "came").touch()
    wait_for(folder / "go")


def abs_of(x: int) -> int:
    return abs(x)


def look_until_stopped(folder: Path) -> None:
    (folder / str(os.getpid())).touch()
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        current_task().checkpoint()
        time.sleep(0.01)


def compute_until_stopped(folder: Path) -> None:
    x = torch.ones(2**16, device="cuda")
    (folder / str(os.getpid())).touch()
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        x = x * 1


def never_look(folder: Path) -> None:
    (folder / str(os.getpid())).touch()
    time.sleep(10 * WAIT_S)


def die(how: str) -> None:
    if how == "exit":
        os._exit(7)
    elif how == "crash":
        ctypes.string_at(0)
    else:
        os.kill(os.getpid(), signal.Signals[how])


def die_once(runs: Path, how: str = "SIGKILL", deaths: int = 1) -> int:
    """Die in the first *deaths* runs; return the number of the run."""
    with runs.open("a") as file:
        file.write("x")
    n_runs = len(runs.read_text())
    if n_runs <= deaths:
        die(how)
    return n_runs


class TestLost:
    def test_fails_its_one_task(self, pool: GPUPoolExecutor, tmp_path: Path) -> None:
        """All the while another one runs on the other device, in the same process from its beginning to its end."""
        other = pool.submit(gpu_task(device=1)(wait_for), tmp_path / "go")
        for how, ending in (
            ("exit", "ended with exit code 7 before"),
            ("crash", r"was ended by SIGSEGV \(exit code -11\)"),
        ):
            error = pool.submit(gpu_task(device=0)(die), how).exception(WAIT_S)
            assert isinstance(error, WorkerLostError)
            assert re.match(rf"task \d+ \(die\) on sim:0: its process {ending}", str(error))
            assert pool.submit(gpu_task(device=0)(index)).result(WAIT_S) == 0
        assert not other.done()
        (tmp_path / "go").touch()
        assert other.result(WAIT_S)
        assert [snapshot.running for snapshot in pool._loads.snapshots()] == [0, 0]

    def test_runs_again_as_often_as_allowed(self, pool: GPUPoolExecutor, tmp_path: Path) -> None:
        error = pool.submit(gpu_task(retries=1)(die_once), tmp_path / "runs", "SIGKILL", 2).exception(WAIT_S)
        assert isinstance(error, WorkerLostError)
        assert "SIGKILL (exit code -9; the system does that when main memory runs out)" in str(error)
        assert (tmp_path / "runs").read_text() == "xx"
        assert pool.submit(gpu_task(retries=1)(die_once), tmp_path / "runs", "SIGKILL", 3).result(WAIT_S) == 4

    def test_each_run_is_told(self, pool: GPUPoolExecutor, tmp_path: Path) -> None:
        seen: list[Event] = []
        key = pool._hooks.add(seen.append)
        future = pool.submit(gpu_task(retries=2)(die_once), tmp_path / "runs", "SIGKILL", 2)
        assert future.result(WAIT_S) == 3
        pool._hooks.remove(key)
        kinds = [TaskSubmitted, *[TaskStarted, TaskRetried] * 2, TaskStarted, TaskFinished]
        assert [type(event) for event in seen] == kinds
        starts = [event for event in seen if isinstance(event, TaskStarted)]
        assert [start.attempt for start in starts] == [0, 1, 2]
        assert {event.reason for event in seen if isinstance(event, TaskRetried)} == {"process lost"}
        assert starts[2].at_s == seen[-1].started_s
        assert future.receipt().retries == seen[-1].retries == 2
        assert future.receipt().ran_s < seen[-1].at_s - starts[0].at_s, "of its last run"

    def test_cancelled_by_who_hears_of_it(self, pool: GPUPoolExecutor, tmp_path: Path) -> None:
        """It does not begin again, and nobody is told that it does."""
        seen: list[Event] = []
        futures: list[Future[int]] = []
        submitted = threading.Event()

        def hook(event: Event) -> None:
            seen.append(event)
            if isinstance(event, TaskRetried):
                assert submitted.wait(WAIT_S)
                futures[0].cancel()

        key = pool._hooks.add(hook)
        futures.append(pool.submit(gpu_task(retries=2)(die_once), tmp_path / "runs"))
        submitted.set()
        assert isinstance(futures[0].exception(WAIT_S), TaskCancelledError)
        pool._hooks.remove(key)
        assert [type(event) for event in seen] == [TaskSubmitted, TaskStarted, TaskRetried, TaskFinished]

    def test_the_start_of_another_process_is_none_of_the_run_s_time(self, tmp_path: Path) -> None:
        """The first run has most of its time, and the next process takes longer to start than what is left."""

        def start() -> None:
            if (tmp_path / "runs").exists():
                time.sleep(3)

        def task() -> str:
            if not (tmp_path / "runs").exists():
                time.sleep(1.5)
            die_once(tmp_path / "runs")
            return "done"

        with GPUPoolExecutor(1, workers="processes", devices="cpu", initializer=start) as pool:
            assert pool.submit(gpu_task(retries=1, timeout=4)(task)).result(WAIT_S) == "done"

    def test_lost_on_the_cpu_after_it_was_out_of_memory(self, pool: GPUPoolExecutor, tmp_path: Path) -> None:
        """The run on the CPU is not one of the retries."""

        def task(runs: Path) -> str:
            torch.ones(2**25, device="cuda")  # 128 MiB
            die_once(runs)
            return current_task().device.type

        future = pool.submit(gpu_task(retries=1, on_oom="cpu")(task), tmp_path / "runs")
        assert future.result(WAIT_S) == "cpu"
        assert future.receipt().retries == 2

    def test_idle_one_is_replaced(self, pool: GPUPoolExecutor) -> None:
        before = pool.submit(gpu_task(device=0)(pid)).result(WAIT_S)
        os.kill(before, signal.SIGKILL)
        assert eventually(lambda: before not in lane_pids())
        assert pool.submit(gpu_task(device=0)(pid)).result(WAIT_S) not in (before, os.getpid())

    def test_process_of_a_broken_device_is_replaced(self, pool: GPUPoolExecutor) -> None:
        def break_device() -> None:
            sim.faults.break_device(current_task().device.index)
            torch.ones(3, device="cuda")

        before = pool.submit(gpu_task(device=1)(pid)).result(WAIT_S)
        error = pool.submit(gpu_task(device=1, retries=3)(break_device)).exception(WAIT_S)
        assert isinstance(error, torch.AcceleratorError)
        after, total = pool.submit(gpu_task(device=1)(pid_and_sum)).result(WAIT_S)
        assert after != before
        assert total == 3


def index() -> int:
    return current_task().device.index


def pid() -> int:
    return os.getpid()


def pid_and_sum() -> tuple[int, float]:
    return os.getpid(), torch.ones(3, device="cuda").sum().item()


# -- a fault run ------------------------------------------------------------------------------------------------------


def work(i: int, x: torch.Tensor) -> torch.Tensor:
    y = x.cuda()
    for _ in range(20):
        y = y * 1.0
    return y + i


class Killer:
    """Kills lanes at random, each some completed tasks after the last: so that there are some, however slow it goes."""

    def __init__(self, seed: int, every: tuple[int, int]) -> None:
        self._random = random.Random(seed)
        self._every = every
        self._next = self._random.randint(*every)
        self.kills = 0
        self.ended: Counter[int] = Counter()  # by task, how often its future was done
        self._lock = threading.Lock()  # guards all of it

    def __call__(self, i: int, future: Future[torch.Tensor]) -> None:
        """Be told that the future of task *i* is done."""
        with self._lock:
            self.ended[i] += 1
            if self.ended.total() < self._next:
                return
            self._next += self._random.randint(*self._every)
            victims = sorted(lane_pids())
            if victims:
                os.kill(self._random.choice(victims), signal.SIGKILL)
                self.kills += 1


def fault_run(n_tasks: int, seed: int, every: tuple[int, int], retries: int) -> tuple[int, int]:
    """Return how many lanes were killed, and how many tasks have failed for it."""
    killer = Killer(seed, every)
    sizes = random.Random(seed)
    with nothing_left_by_processes():
        for _ in make_kind("sim"):
            sim.enable(devices=2, memory="64MiB")
            task = gpu_task(retries=retries)(work)
            with GPUPoolExecutor(3, workers="processes") as pool:
                futures: list[Future[torch.Tensor]] = []
                for i in range(n_tasks):
                    futures.append(pool.submit(task, i, torch.full((sizes.choice([10, 50_000]),), 0.5)))
                    futures[-1].add_done_callback(lambda future, i=i: killer(i, future))
                lost = 0
                for i, future in enumerate(futures):
                    error = future.exception(WAIT_S)
                    if error is None:
                        assert future.result().sub(i).eq(0.5).all()
                        continue
                    assert isinstance(error, WorkerLostError)
                    assert f"task {i} (work) on sim:" in str(error)
                    assert "SIGKILL" in str(error)
                    lost += 1
                assert [snapshot.running for snapshot in pool._loads.snapshots()] == [0, 0]
    assert killer.ended == Counter(range(n_tasks)), "each future ends once"
    return killer.kills, lost


def test_small_fault_run() -> None:
    kills, lost = fault_run(40, seed=5, every=(8, 20), retries=3)
    assert kills >= 2
    assert lost == 0


@pytest.mark.slow
@pytest.mark.parametrize("retries", [0, 3])
def test_fault_run(retries: int) -> None:
    start = time.monotonic()
    kills, lost = fault_run(200, seed=11, every=(10, 30), retries=retries)
    print(f"retries={retries}: 200 tasks, {kills} lanes killed, {lost} tasks lost, {time.monotonic() - start:.0f} s")
    assert kills >= 6
    assert lost <= (kills if retries == 0 else 0)
