"""Try many settings of a training at once, and end the hopeless ones early.

    python examples/hyperparameter_sweep.py                      # the machine's GPUs, or its CPU
    python examples/hyperparameter_sweep.py --sim 2x256MiB       # two simulated devices

Each run is a task: a network of its own width, trained with its own learning rate for its own number of steps, so that
runs take very different times. A run reports its loss every few steps. The program ends

- a run that does worse than most others did after as many steps: it is told to stop, and does so at its next operation;
- all others, once one has reached the target: those that run are told to stop, those that wait are cancelled.

Whatever was ended around it, the run that reached the target has the losses that it has alone, which is checked, and
so is that nothing of the others is left on the devices.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue

import cifar
import torch
from cifar import Batch
from options import parsed, positive
from torch import nn

from managed_exec import GPUPoolExecutor, current_task
from managed_exec.errors import TaskCancelledError

REPORT_STEPS = 10  # from one report to the next
FEWEST = 3  # reports after as many steps, before a run is judged by them


@dataclass(frozen=True)
class Setting:
    rate: float
    channels: int
    steps: int


@dataclass(frozen=True)
class Report:
    run: int
    steps: int
    loss: float  # mean since the report before


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    was_stopped: bool


def train(
    run: int,
    setting: Setting,
    model: nn.Module,
    data: Sequence[Batch],
    reports: SimpleQueue[Report | None],
) -> Trained:
    """Train *model*; the task of a run."""
    losses: list[float] = []
    try:
        model = model.cuda()
        optimizer = torch.optim.SGD(model.parameters(), setting.rate, momentum=0.9)
        for batch in data[: setting.steps]:
            current_task().checkpoint()
            optimizer.zero_grad()
            loss = cifar.loss_share(model(batch.images.cuda()), batch.labels.cuda(), len(batch.labels))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if len(losses) % REPORT_STEPS == 0:
                reports.put(Report(run, len(losses), statistics.fmean(losses[-REPORT_STEPS:])))
    except TaskCancelledError:  # from the checkpoint, or any operation; what was learned so far is worth having
        return Trained(losses, was_stopped=True)
    return Trained(losses, was_stopped=False)


@dataclass
class Run:
    setting: Setting
    future: Future[Trained] = field(default_factory=Future)

    def outcome(self) -> str:
        if self.future.cancelled():
            return "cancelled before it started"
        trained = self.future.result()
        last = f", last loss {trained.losses[-1]:.3f}" if trained.losses else ""
        return f"{'stopped' if trained.was_stopped else 'finished'} after {len(trained.losses)} steps{last}"


class Judge:
    """Decides by the reports which runs should end."""

    def __init__(self, target: float) -> None:
        self.winner: int | None = None  # the first run that reached the target
        self._target = target
        self._losses: dict[int, list[float]] = defaultdict(list)  # reported so far, by steps

    def is_hopeless(self, report: Report) -> bool:
        """Take a report; return whether its run should end. Not so once there is a winner: then all others should."""
        others = self._losses[report.steps]
        others.append(report.loss)
        if report.loss <= self._target and self.winner is None:
            self.winner = report.run
        # Written so that a loss that is not a number is hopeless, too.
        return self.winner is None and len(others) >= FEWEST and not report.loss <= statistics.median(others)


def network(setting: Setting) -> nn.Module:
    """Make a run's network. Not in its task: the seed of the weights is the whole process's."""
    return cifar.network(hidden=32, channels=setting.channels)


def sweep(pool: GPUPoolExecutor, settings: Sequence[Setting], data: Sequence[Batch], judge: Judge) -> list[Run]:
    """Run all *settings*, and end runs as *judge* says."""
    reports: SimpleQueue[Report | None] = SimpleQueue()  # None: a run is over, in whatever way
    runs = [Run(setting) for setting in settings]
    for number, run in enumerate(runs):
        run.future = pool.submit(train, number, run.setting, network(run.setting), data, reports)
        run.future.add_done_callback(lambda _: reports.put(None))
    unfinished = len(runs)
    while unfinished:
        report = reports.get()
        if report is None:
            unfinished -= 1
        elif judge.is_hopeless(report):
            runs[report.run].future.cancel()  # if it runs, it is told to stop
        elif judge.winner == report.run:
            for number, run in reversed(list(enumerate(runs))):  # those that wait first, or a worker would begin them
                if number != report.run:
                    run.future.cancel()
    return runs


def grid(steps: int) -> list[Setting]:
    """Make twelve settings; wider networks are trained for longer."""
    rates = (0.1, 1e-4, 1e-3, 0.01)
    return [Setting(rate, channels, steps * channels // 8) for channels in (12, 4, 8) for rate in rates]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Try settings of a training, and end the hopeless ones early.")
    parser.add_argument("--steps", type=positive, default=80, help="of a run of middle length (%(default)s)")
    parser.add_argument("--batch", type=positive, default=8, help="images in a step (%(default)s)")
    parser.add_argument("--target", type=float, default=0.5, help="loss at which the sweep ends (%(default)s)")
    parser.add_argument("--workers", type=positive, default=4, help="runs at once (%(default)s)")
    options = parsed(parser, arguments, "2x256MiB")
    torch.set_num_threads(1)  # runs are side by side already

    settings = grid(options.steps)
    data = cifar.batches(max(setting.steps for setting in settings), options.batch)
    judge = Judge(options.target)
    with GPUPoolExecutor(options.workers) as pool:
        runs = sweep(pool, settings, data, judge)
        for number, run in enumerate(runs):
            print(f"{number:3}: rate {run.setting.rate:6g}, {run.setting.channels:2} channels: {run.outcome()}")
        left = sum(torch.accelerator.memory_allocated(i) for i in range(torch.accelerator.device_count()))
        print(f"bytes left on the devices: {left:,}")
        if left:
            raise SystemExit("runs left something behind")
        if judge.winner is None:
            raise SystemExit(f"no run reached the target of {options.target}")
        winner = runs[judge.winner]
        (alone,) = sweep(pool, [winner.setting], data, Judge(options.target))
    print(f"run {judge.winner} reached the target of {options.target} first")
    cifar.report(winner.future.result().losses, alone.future.result().losses, "the run alone")


if __name__ == "__main__":
    main()
