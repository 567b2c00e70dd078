"""Train one network on every device: a replica on each, a part of the batch for each, gradients added up.

    python examples/data_parallel.py                         # the machine's GPUs, or its CPU
    python examples/data_parallel.py --sim 2x256MiB          # two simulated devices
    python examples/data_parallel.py --sim 4x256MiB --batch 16 --steps 50

A step is two tasks a replica: one computes the gradients of its part of the batch, one takes the sum of all parts' and
updates the replica. All replicas take the same sums, so their weights stay the same, bit for bit; and the losses are
those of one device that takes whole batches, to rounding (see cifar.py). Both are checked.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import cifar
import torch
from cifar import Batch
from options import parsed, positive
from torch import Tensor, nn

from managed_exec import GPUPoolExecutor, device_manager, gpu_task

# The tasks


class Replica:
    """A copy of the model, on the device of the task that makes it. The same device runs its tasks."""

    def __init__(self, model: nn.Module) -> None:
        self.model = copy.deepcopy(model).cuda()
        self.optimizer = cifar.make_optimizer(self.model)


@gpu_task
def replicate(model: nn.Module) -> Replica:
    return Replica(model)


@gpu_task
def differentiate(replica: Replica, part: Batch, batch_size: int) -> tuple[float, list[Tensor]]:
    """Return what *part* adds to the loss of its batch, and to each gradient."""
    loss = cifar.loss_share(replica.model(part.images.cuda()), part.labels.cuda(), batch_size)
    gradients = torch.autograd.grad(loss, list(replica.model.parameters()))
    return loss.item(), [gradient.cpu() for gradient in gradients]


@gpu_task
def update(replica: Replica, gradients: Sequence[Tensor]) -> None:
    for parameter, gradient in zip(replica.model.parameters(), gradients, strict=True):
        parameter.grad = gradient.to(parameter.device)
    replica.optimizer.step()


@gpu_task
def weights(replica: Replica) -> list[Tensor]:
    return [parameter.detach().cpu() for parameter in replica.model.parameters()]


# The program that submits them


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    weights: list[list[Tensor]]  # of each replica


def everywhere(pool: GPUPoolExecutor, task: Any, rows: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Run *task* once with each of *rows*, the first on the first device and so on; return the results."""
    places = len(device_manager.devices)
    futures = [pool.submit(task.options(device=i % places), *row) for i, row in enumerate(rows)]
    return [future.result() for future in futures]


def train(pool: GPUPoolExecutor, model: nn.Module, data: Sequence[Batch], count: int) -> Trained:
    """Train *count* replicas of *model*, one step a batch."""
    replicas = everywhere(pool, replicate, [(model,)] * count)
    losses = []
    for batch in data:
        parts = [(replica, part, len(batch.labels)) for replica, part in zip(replicas, batch.split(count), strict=True)]
        shares = everywhere(pool, differentiate, parts)
        losses.append(sum(loss for loss, _ in shares))
        total = [sum(gradients) for gradients in zip(*(gradients for _, gradients in shares), strict=True)]
        everywhere(pool, update, [(replica, total) for replica in replicas])
    return Trained(losses, everywhere(pool, weights, [(replica,) for replica in replicas]))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train replicas of one network on parts of each batch.")
    parser.add_argument("--steps", type=positive, default=200, help="of training (%(default)s)")
    parser.add_argument("--batch", type=positive, default=8, help="images in a step (%(default)s)")
    parser.add_argument("--hidden", type=positive, default=64, help="width of the network (%(default)s)")
    parser.add_argument("--replicas", type=positive, help="of the network (one a device, at least two)")
    options = parsed(parser, arguments, "2x256MiB")
    count = options.replicas or max(2, len(device_manager.devices))
    if options.batch < count:
        parser.error(f"--batch {options.batch}: each of {count} replicas needs an image")
    torch.set_num_threads(1)  # tasks run side by side already

    model, data = cifar.network(options.hidden), cifar.batches(options.steps, options.batch)
    with GPUPoolExecutor(count) as pool:
        expected = pool.submit(cifar.train_alone, model, data).result()
        trained = train(pool, model, data, count)
    print(f"{count} replicas on {', '.join(map(str, device_manager.devices))}, {options.batch} images a step")
    first, *others = trained.weights
    if not all(map(torch.equal, first * len(others), [weight for other in others for weight in other])):
        raise SystemExit("the replicas' weights differ")
    print("the replicas' weights are the same, bit for bit")
    cifar.report(trained.losses, expected)


if __name__ == "__main__":
    main()
