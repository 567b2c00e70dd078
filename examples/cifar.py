"""What the training examples share: a small convolutional network, images of CIFAR's shape, training on one device.

Everything is in double precision. Programs that split the work add the same numbers in another order, so their losses
differ from those of one device by rounding, which training amplifies from step to step. In double precision it stays
far below what any mistake would do: a sample counted twice changes the first losses in the second digit.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

CLASSES = 10
# Relative. The rounding of one sum, 1e-16, grew to 2e-12 at the worst that was seen in two hundred steps.
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Batch:
    images: Tensor  # [n, 3, 32, 32]
    labels: Tensor  # [n], from 0 to 9

    def split(self, parts: int) -> list[Batch]:
        """Cut the batch in *parts* of about the same size."""
        return [
            Batch(images, labels)
            for images, labels in zip(self.images.tensor_split(parts), self.labels.tensor_split(parts), strict=True)
        ]


def batches(count: int, size: int, seed: int = 0) -> list[Batch]:
    """Make *count* batches of *size* images, each one of ten coarse patterns under noise."""
    generator = torch.Generator().manual_seed(seed)
    patterns = nn.functional.interpolate(
        torch.randn(CLASSES, 3, 4, 4, generator=generator, dtype=torch.float64), (32, 32)
    )
    made = []
    for _ in range(count):
        labels = torch.randint(CLASSES, (size,), generator=generator)
        noise = torch.randn(size, 3, 32, 32, generator=generator, dtype=torch.float64)
        made.append(Batch(patterns[labels] + 2 * noise, labels))
    return made


def network(hidden: int, channels: int = 16, seed: int = 0) -> nn.Sequential:
    """Make the network of many tutorials, as four parts: two convolutions, two linear layers.

    Args:
        hidden: width between the linear layers.
        channels: of the first convolution; the second has twice as many.
        seed: of the weights.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            nn.Sequential(nn.Conv2d(channels, 2 * channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
            nn.Sequential(nn.Linear(2 * channels * 8 * 8, hidden), nn.ReLU()),
            nn.Linear(hidden, CLASSES),
        ).double()


def make_optimizer(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.005, momentum=0.9)


def loss_share(scores: Tensor, labels: Tensor, batch_size: int) -> Tensor:
    """Return what these samples add to the mean loss of a batch of *batch_size*, so that parts add up to the whole."""
    return nn.functional.cross_entropy(scores, labels, reduction="sum") / batch_size


def train_alone(model: nn.Module, data: Sequence[Batch]) -> list[float]:
    """Train a copy of *model* on the task's device, one step a batch; return the losses."""
    model = copy.deepcopy(model).cuda()
    optimizer = make_optimizer(model)
    losses = []
    for batch in data:
        optimizer.zero_grad()
        loss = loss_share(model(batch.images.cuda()), batch.labels.cuda(), len(batch.labels))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def report(losses: Sequence[float], expected: Sequence[float], whose: str = "one device") -> None:
    """Print how *losses* fell and how far they are from *expected*; end the program with an error where that is far."""
    print(f"loss of {len(losses)} steps: {losses[0]:.4f} to {losses[-1]:.4f}")
    differences = [abs(a - b) / max(1.0, abs(b)) for a, b in zip(losses, expected, strict=True)]
    print(f"largest difference from the losses of {whose}: {max(differences):.1e}, allowed {TOLERANCE:.0e}")
    if not all(difference <= TOLERANCE for difference in differences):  # not so where a loss is not a number
        raise SystemExit(f"the losses are not those of {whose}")
