"""Train one network cut in stages, one a device, that work at the same time on different parts of the batch.

    python examples/pipeline_parallel.py                         # the machine's GPUs, or its CPU
    python examples/pipeline_parallel.py --sim 2x256MiB          # two simulated devices
    python examples/pipeline_parallel.py --sim 4x256MiB --stages 4 --parts 8

A step cuts its batch in parts (micro-batches). Each is a task for each stage, forward (F), and another, backward (B);
the last stage does both in one, with the loss between them:

    stage 0:  F0 F1 F2 F3    B0 B1 B2 B3  update
    stage 1:     FB FB FB FB  update

A stage keeps nothing from forward to backward: as in GPipe, B computes F again from the same input, so that a graph
lives no longer than a task. All tasks of a step are submitted at once. They are given the futures of those that they
need and wait for them. They only wait for tasks submitted before them, which is safe in any pool of threads, because
tasks start in the order of submission.

The losses are those of one device, to rounding (see cifar.py), which is checked. Then a step is timed, on simulated
devices with kernels that take time there and none of the CPU, so that devices overlap as they would: the time from its
first task to its last is printed beside the sum of all tasks' times, and that stages did work at once is checked there.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import cifar
import torch
from cifar import Batch
from options import parsed, positive
from torch import Tensor, nn

from managed_exec import GPUPoolExecutor, current_task, device_manager, gpu_task, sim


@dataclass(frozen=True)
class Span:
    """When a task of a stage had what it needed, and when its device was done; seconds of ``time.perf_counter``."""

    stage: int
    start_s: float
    end_s: float


class Stage:
    """A stage of the network. Its tasks run on one device, in the order in which they were submitted."""

    def __init__(self, pool: GPUPoolExecutor, number: int, module: nn.Module, kernel_s: float) -> None:
        self.number = number
        self.spans: list[Span] = []
        self.losses: list[float] = []  # of the parts of a batch, in the last stage
        self._pool = pool
        self._place = number % len(device_manager.devices)
        self._kernel_s = kernel_s  # of simulated time
        self._latest: Future[Any] | None = None
        self.submit(self._move, module).result()
        self.spans.clear()

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Submit ``call(*arguments)``; futures among the arguments stand for their results."""
        task = gpu_task(device=self._place)(partial(self._run, self._latest, call))
        self._latest = self._pool.submit(task, *arguments)
        return self._latest

    def _run(self, before: Future[Any] | None, call: Callable[..., Any], *arguments: Any) -> Any:
        if before is not None:
            before.exception()  # waits; the error, if there is one, is for those who need the result
        values = [value.result() if isinstance(value, Future) else value for value in arguments]
        start_s = time.perf_counter()
        with sim.kernel_time(self._kernel_s) if self._kernel_s else contextlib.nullcontext():
            result = call(*values)
        stream = current_task().stream
        if stream is not None:
            stream.synchronize()
        self.spans.append(Span(self.number, start_s, time.perf_counter()))
        return result

    # The tasks

    def _move(self, module: nn.Module) -> None:
        self._module = copy.deepcopy(module).cuda()
        self._optimizer = cifar.make_optimizer(self._module)

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            return self._module(inputs.cuda())

    def backward(self, inputs: Tensor, gradient: Tensor) -> Tensor | None:
        """Add to the parameters' gradients; return that of *inputs*, which the first stage has not."""
        inputs = self._leaf(inputs)
        self._module(inputs).backward(gradient.cuda())
        return inputs.grad

    def learn(self, inputs: Tensor, labels: Tensor, batch_size: int) -> Tensor | None:
        """Go forward and backward, in the last stage, and note the loss; return the gradient of *inputs*."""
        inputs = self._leaf(inputs)
        loss = cifar.loss_share(self._module(inputs), labels.cuda(), batch_size)
        loss.backward()
        self.losses.append(loss.item())
        return inputs.grad

    def update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _leaf(self, inputs: Tensor) -> Tensor:
        return inputs.detach().cuda().requires_grad_(self.number > 0)


def step(stages: Sequence[Stage], batch: Batch, parts: int) -> float:
    """Train one step, and return its loss."""
    *inner, last = stages
    learned: list[tuple[Future[Any], list[Any]]] = []
    for part in batch.split(parts):
        inputs: list[Any] = [part.images]  # of each stage
        for stage in inner:
            inputs.append(stage.submit(stage.forward, inputs[-1]))
        learned.append((last.submit(last.learn, inputs.pop(), part.labels, len(batch.labels)), inputs))
    ends = []
    for gradient, inputs in learned:
        for stage in reversed(inner):
            gradient = stage.submit(stage.backward, inputs.pop(), gradient)
        ends.append(gradient)
    updates = [stage.submit(stage.update) for stage in stages]
    for future in (*ends, *updates):
        future.result()
    loss = sum(last.losses)
    last.losses.clear()
    return loss


def make_stages(pool: GPUPoolExecutor, model: nn.Sequential, count: int, kernel_s: float = 0.0) -> list[Stage]:
    """Cut *model* in *count* stages."""
    cuts = [len(model) * i // count for i in range(count + 1)]
    return [Stage(pool, i, model[a:b], kernel_s) for i, (a, b) in enumerate(itertools.pairwise(cuts))]


def at_once(spans: Sequence[Span]) -> int:
    """Return the most stages that were at work at any one time."""
    return max(len({span.stage for span in spans if span.start_s <= at.start_s < span.end_s}) for at in spans)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train a network in stages that work at the same time.")
    parser.add_argument("--steps", type=positive, default=200, help="of training (%(default)s)")
    parser.add_argument("--batch", type=positive, default=8, help="images in a step (%(default)s)")
    parser.add_argument("--hidden", type=positive, default=64, help="width of the network (%(default)s)")
    parser.add_argument("--stages", type=int, choices=(2, 3, 4), default=2, help="of the network (%(default)s)")
    parser.add_argument("--parts", type=positive, default=4, help="of a batch (%(default)s)")
    parser.add_argument("--kernel-ms", type=positive, default=5, help="of each kernel, where simulated (%(default)s)")
    options = parsed(parser, arguments, "2x256MiB")
    if options.batch < options.parts:
        parser.error(f"--batch {options.batch}: each of {options.parts} parts needs an image")
    torch.set_num_threads(1)  # stages run side by side already

    model, data = cifar.network(options.hidden), cifar.batches(options.steps, options.batch)
    with GPUPoolExecutor(2 * options.stages) as pool:  # tasks that work, and as many that wait for those
        expected = pool.submit(cifar.train_alone, model, data).result()
        stages = make_stages(pool, model, options.stages)
        losses = [step(stages, batch, options.parts) for batch in data]
        timed = make_stages(pool, model, options.stages, options.kernel_ms / 1e3 if options.simulated else 0.0)
        step(timed, data[0], options.parts)
    places = ", ".join(map(str, device_manager.devices))
    print(f"{options.stages} stages on {places}, batches of {options.batch} images in {options.parts} parts")
    cifar.report(losses, expected)

    spans = [span for stage in timed for span in stage.spans]
    work_s = sum(span.end_s - span.start_s for span in spans)
    makespan_s = max(span.end_s for span in spans) - min(span.start_s for span in spans)
    for stage in timed:
        busy_s = sum(span.end_s - span.start_s for span in stage.spans)
        print(f"stage {stage.number}: {len(stage.spans)} tasks, {busy_s:.3f} s")
    print(f"one step: work {work_s:.3f} s, makespan {makespan_s:.3f} s; stages at work at once: {at_once(spans)}")
    if options.simulated and at_once(spans) < 2:
        raise SystemExit("the stages did not overlap")


if __name__ == "__main__":
    main()
