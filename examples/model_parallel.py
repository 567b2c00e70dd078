"""Train one network whose two halves live on two devices.

    python examples/model_parallel.py                        # the machine's first two GPUs, or its CPU
    python examples/model_parallel.py --sim 2x256MiB         # two simulated devices

The halves are pinned, one to each device. Nothing else says where anything is: what the first half hands the second
meets weights that are pinned, and follows; so do images and labels, and in the backward pass the gradients. The losses
are those of one device, to rounding (see cifar.py), which is checked, and so is where everything was.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from dataclasses import dataclass

import cifar
import torch
from cifar import Batch
from options import parsed, positive
from torch import nn

from managed_exec import GPUPoolExecutor, ManagedModule, device_manager


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    activations_on: set[torch.device]  # that the first half made
    scores_on: set[torch.device]  # that the second half made
    gradients_on: list[torch.device]  # of each parameter


def train(model: nn.Sequential, data: Sequence[Batch], devices: Sequence[torch.device]) -> Trained:
    """Train a copy of *model* with its first half on the first of *devices*, the other on the second."""
    model = copy.deepcopy(model)
    first, second = (ManagedModule.from_module(half) for half in (model[:2], model[2:]))
    first.to(devices[0]).pin()
    second.to(devices[1]).pin()
    optimizer = cifar.make_optimizer(model)
    losses, activations_on, scores_on = [], set(), set()
    for batch in data:
        optimizer.zero_grad()
        activations = first(batch.images)
        scores = second(activations)
        loss = cifar.loss_share(scores, batch.labels, len(batch.labels))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        activations_on.add(activations.device)
        scores_on.add(scores.device)
    return Trained(losses, activations_on, scores_on, [parameter.grad.device for parameter in model.parameters()])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train a network whose halves live on two devices.")
    parser.add_argument("--steps", type=positive, default=200, help="of training (%(default)s)")
    parser.add_argument("--batch", type=positive, default=8, help="images in a step (%(default)s)")
    parser.add_argument("--hidden", type=positive, default=64, help="width of the network (%(default)s)")
    options = parsed(parser, arguments, "2x256MiB")
    torch.set_num_threads(1)

    model, data = cifar.network(options.hidden), cifar.batches(options.steps, options.batch)
    devices = (device_manager.devices * 2)[:2]
    with GPUPoolExecutor() as pool:
        expected = pool.submit(cifar.train_alone, model, data).result()
        trained = pool.submit(train, model, data, devices).result()
    first, second = devices
    print(f"first half on {first}, second half on {second}")
    wanted = [first] * 4 + [second] * 4  # a weight and a bias for each of two layers
    if (trained.activations_on, trained.scores_on, trained.gradients_on) != ({first}, {second}, wanted):
        raise SystemExit(f"not everything was where its half is: {trained}")
    print("activations, scores and gradients were where their half is")
    cifar.report(trained.losses, expected)


if __name__ == "__main__":
    main()
