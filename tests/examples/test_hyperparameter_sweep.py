"""The sweep: what is judged hopeless, what is cancelled, what is told to stop, and the program."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from queue import SimpleQueue
from types import ModuleType

import pytest
from conftest import Kind, allocated_bytes, eventually
from programs import imported, run_example

from managed_exec import current_task

WAIT_S = 60


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    with imported("hyperparameter_sweep") as module:
        yield module


class TestJudge:
    def test_worse_than_most_is_hopeless(self, example: ModuleType) -> None:
        judge = example.Judge(target=0.1)
        losses = [9.0, 8.0, 1.0, 5.0, 8.5, 0.5]
        verdicts = [judge.is_hopeless(example.Report(run, 10, loss)) for run, loss in enumerate(losses)]
        assert verdicts == [False, False, False, False, True, False], "of the first two nothing is known yet"
        assert not judge.is_hopeless(example.Report(6, 20, 7.0)), "the first after as many steps"
        assert judge.winner is None

    def test_not_a_number_is_hopeless(self, example: ModuleType) -> None:
        judge = example.Judge(target=0.1)
        for run in range(2):
            judge.is_hopeless(example.Report(run, 10, 1.0))
        assert judge.is_hopeless(example.Report(2, 10, float("nan")))

    def test_first_to_reach_the_target_wins(self, example: ModuleType) -> None:
        judge = example.Judge(target=0.5)
        assert not judge.is_hopeless(example.Report(4, 10, 0.5))
        assert not judge.is_hopeless(example.Report(1, 10, 0.1))
        assert judge.winner == 4


def test_run_that_waits_is_cancelled_and_one_that_runs_is_told(example: ModuleType, kind: Kind) -> None:
    runs = [example.Run(example.Setting(0.1, 4, 1)) for _ in range(2)]
    started = threading.Event()

    def work() -> object:
        started.set()
        assert eventually(lambda: current_task().cancelled, WAIT_S)
        return example.Trained([2.0], was_stopped=True)

    with kind.pool(max_workers=1) as pool:
        for run in runs:
            run.future = pool.submit(work)
        assert started.wait(WAIT_S)
        for run in runs:
            run.future.cancel()
    assert runs[0].outcome() == "stopped after 1 steps, last loss 2.000"
    assert runs[1].outcome() == "cancelled before it started"


def test_stopped_run_does_no_further_step(example: ModuleType, kind: Kind) -> None:
    setting = example.Setting(0.01, 4, 20)
    reports: SimpleQueue[object] = SimpleQueue()
    started, told = threading.Event(), threading.Event()
    data = example.cifar.batches(20, 2)

    def train(run: int) -> object:
        started.set()
        assert told.wait(WAIT_S)
        return example.train(run, setting, example.network(setting), data, reports)

    with kind.pool(max_workers=1) as pool:
        stopped = pool.submit(train, 0)
        assert started.wait(WAIT_S)
        assert not stopped.cancel()
        told.set()
        trained = stopped.result(WAIT_S)
        whole = pool.submit(train, 3)
        assert len(whole.result(WAIT_S).losses) == 20
    assert trained == example.Trained([], was_stopped=True)
    assert [(report.run, report.steps) for report in (reports.get(), reports.get())] == [(3, 10), (3, 20)]
    assert reports.empty()


class HeldUp(list):  # type: ignore[type-arg]
    """Batches that a run of more than ten steps gets only when it has been told to stop."""

    def __getitem__(self, chosen):  # type: ignore[no-untyped-def, override]
        if chosen.stop > 10:
            assert eventually(lambda: current_task().cancelled, WAIT_S)
        return super().__getitem__(chosen)


def test_winner_ends_the_sweep(example: ModuleType, simulator: Kind) -> None:
    """The first report reaches the target: of the eight runs of one worker, one may have started by then."""
    settings = [example.Setting(0.01, 4, 10), *[example.Setting(0.01, 4, 20)] * 7]
    judge = example.Judge(target=100.0)
    with simulator.pool(max_workers=1) as pool:
        runs = example.sweep(pool, settings, HeldUp(example.cifar.batches(20, 2)), judge)
    assert judge.winner == 0
    assert runs[0].outcome().startswith("finished after 10 steps")
    assert runs[1].outcome() in ("cancelled before it started", "stopped after 0 steps")
    assert [run.outcome() for run in runs[2:]] == ["cancelled before it started"] * 6
    assert allocated_bytes() == 0


@pytest.mark.timeout(400)  # the first use of the simulator compiles it
def test_program_ends_early_and_leaves_nothing() -> None:
    done = run_example("hyperparameter_sweep", "--steps", "20", "--batch", "2", "--target", "2.3", "--sim", "2x64MiB")
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = re.findall(r"^ *\d+: rate .*: (finished|stopped|cancelled) ", done.stdout, re.MULTILINE)
    assert len(outcomes) == 12
    assert "bytes left on the devices: 0" in done.stdout
    assert re.search(r"^run \d+ reached the target of 2.3 first$", done.stdout, re.MULTILINE)
    assert "largest difference from the losses of the run alone: 0.0e+00" in done.stdout


@pytest.mark.timeout(400)
def test_program_fails_where_no_run_reaches_the_target() -> None:
    done = run_example("hyperparameter_sweep", "--steps", "8", "--batch", "1", "--target", "-1")
    assert done.returncode == 1
    assert "no run reached the target of -1.0" in done.stderr
