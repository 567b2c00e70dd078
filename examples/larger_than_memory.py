"""Train small transformers on a device a tenth the size that they need, and get the same weights, bit for bit.

    python examples/larger_than_memory.py --sim 1x256MiB       # one simulated device
    python examples/larger_than_memory.py --sim 2x256MiB       # two of them
    python examples/larger_than_memory.py --width 2048 --batch 512 --tasks 16    # the machine's GPUs

Each task trains one model with Adam, at a learning rate of its own, to continue the sequences that the rule
`next = 3 * last + 5 (mod 17)` makes of random first numbers.

The tasks run first with room, on devices of the size that --sim says, which shows what they need. Then every device
is made a tenth of that size. A pool without a `MemoryPolicy` fails there. One with it moves what no kernel is using to
main memory, then to disk, and back when a kernel wants it; that run's losses and weights are compared with the first's.

On a real GPU nothing is made smaller: choose sizes that do not fit, and the first run fails where the last does not.
On the CPU a policy has no effect.
"""

from __future__ import annotations

import argparse
import copy
import time
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from options import parsed
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  # everybody's name for it

from managed_exec import GPUPoolExecutor, MemoryPolicy, sim
from managed_exec.memory.manager import manager

MODULUS = 17
SHARE = 10  # of what the tasks need, the part that the devices have in the end
SMALLEST_MANAGED_BYTES = 4096  # below the default: this model is a toy, and so are its tensors


# The model and its data


class Transformer(torch.nn.Module):
    """Predict the next number of a sequence from those before it."""

    def __init__(self, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.numbers = torch.nn.Embedding(MODULUS, width)
        self.positions = torch.nn.Parameter(torch.randn(length, width) / width**0.5)
        self.layers = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = torch.nn.Linear(width, MODULUS)
        self.register_buffer("mask", torch.nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, numbers: Tensor) -> Tensor:
        """Return scores [batch, length, MODULUS] for *numbers* [batch, length]."""
        x = self.numbers(numbers) + self.positions
        for layer in self.layers:
            x = layer(x, src_mask=self.mask)
        return self.head(x)


def sequences(count: int, length: int, generator: torch.Generator) -> Tensor:
    """Make *count* sequences by the rule, [count, length]."""
    numbers = [torch.randint(MODULUS, (count,), generator=generator)]
    for _ in range(length - 1):
        numbers.append((3 * numbers[-1] + 5) % MODULUS)
    return torch.stack(numbers, dim=1)


# The task, and the program that submits it


@dataclass(frozen=True)
class Sizes:
    width: int
    layers: int
    length: int
    batch: int
    steps: int


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    weights: dict[str, Tensor]
    device: torch.device


def train(model: Transformer, sizes: Sizes, learning_rate: float, seed: int) -> Trained:
    """Train a copy of *model* on the task's device."""
    # Without an index ("cuda"): the task's own device.
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    model = copy.deepcopy(model).to(device)
    # One parameter at a time: a kernel that takes all of them would need all of them on the device at once.
    optimizer = torch.optim.Adam(model.parameters(), learning_rate, foreach=False, fused=False)
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(sizes.steps):
        numbers = sequences(sizes.batch, sizes.length + 1, generator).to(device)
        optimizer.zero_grad()
        scores = model(numbers[:, :-1])
        loss = F.cross_entropy(scores.flatten(0, 1), numbers[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    weights = {name: value.cpu() for name, value in model.state_dict().items()}
    return Trained(losses, weights, loss.device)


Memory: TypeAlias = MemoryPolicy | Literal[False]


@dataclass(frozen=True)
class Run:
    trained: list[Trained]
    seconds: float


def train_all(model: Transformer, sizes: Sizes, learning_rates: list[float], memory: Memory) -> Run:
    """Train one copy of *model* for each learning rate, all at once."""
    start = time.perf_counter()
    with GPUPoolExecutor(len(learning_rates), memory=memory) as pool:
        futures = [pool.submit(train, model, sizes, rate, seed) for seed, rate in enumerate(learning_rates)]
        trained = [future.result() for future in futures]
    return Run(trained, time.perf_counter() - start)


def same(run: Run, expected: Run) -> bool:
    """Return whether the losses and weights of two runs are the same, bit for bit."""
    return all(
        one.losses == other.losses
        and one.weights.keys() == other.weights.keys()
        and all(torch.equal(one.weights[name], other.weights[name]) for name in one.weights)
        for one, other in zip(run.trained, expected.trained, strict=True)
    )


# The report


def peaks() -> list[int]:
    """Return the most bytes that tensors took on each device since `reset_peaks`."""
    return [torch.accelerator.max_memory_allocated(index) for index in range(torch.accelerator.device_count())]


def reset_peaks() -> None:
    for index in range(torch.accelerator.device_count()):
        torch.accelerator.reset_peak_memory_stats(index)


def attempt(name: str, model: Transformer, sizes: Sizes, rates: list[float], memory: Memory) -> Run | None:
    """Train, print what it took, and return the run; None if a device had no room and nothing is managed."""
    reset_peaks()
    try:
        run = train_all(model, sizes, rates, memory)
    except torch.OutOfMemoryError as failure:
        if memory is not False:
            raise
        print(f"{name}: out of memory: {str(failure).splitlines()[0]}")
        return None
    first, last = (sum(one.losses[step] for one in run.trained) / len(run.trained) for step in (0, -1))
    print(f"{name}: {run.seconds:.1f} s, mean loss {first:.3f} to {last:.3f}, peak bytes {describe(peaks())}")
    return run


def describe(n_bytes: list[int]) -> str:
    return ", ".join(f"{count:,}" for count in n_bytes) or "not counted"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train transformers on a device a tenth the size that they need.")
    parser.add_argument("--tasks", type=int, default=4, help="models, trained at the same time (%(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="steps of Adam in a task (%(default)s)")
    parser.add_argument("--width", type=int, default=64, help="of the model, a multiple of 4 (%(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="of the model (%(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="sequences in a step (%(default)s)")
    options = parsed(parser, arguments, "1x256MiB, with room at first")
    if min(options.tasks, options.steps, options.layers, options.batch) < 1 or options.width < 4 or options.width % 4:
        parser.error("--tasks, --steps, --layers and --batch must be at least 1, --width a multiple of 4")
    torch.set_num_threads(1)  # tasks run side by side already

    sizes = Sizes(options.width, options.layers, length=24, batch=options.batch, steps=options.steps)
    rates = [3e-3 / (1 + task / 2) for task in range(options.tasks)]
    torch.manual_seed(0)
    model = Transformer(sizes.width, sizes.layers, sizes.length)
    weights = sum(parameter.numel() for parameter in model.parameters())
    print(f"{options.tasks} tasks, each a model of {weights:,} weights and {sizes.steps} steps of Adam\n")

    expected = attempt("with room", model, sizes, rates, False)
    if options.simulated and expected is not None:
        limit = max(peaks()) // SHARE
        for index in range(torch.accelerator.device_count()):
            sim.set_capacity(index, limit)
        print(f"\ndevices of {limit:,} bytes each from here on")
        attempt("not managed", model, sizes, rates, False)
    run = attempt("managed", model, sizes, rates, MemoryPolicy(min_bytes=SMALLEST_MANAGED_BYTES))
    print(f"\nwhere the bytes went:\n{manager().statistics()}\n")
    if expected is not None and run is not None:
        if not same(run, expected):
            raise SystemExit(
                "losses or weights differ; a GPU needs torch.use_deterministic_algorithms for them to agree"
            )
        print("losses and weights are the same, bit for bit")


if __name__ == "__main__":
    main()
