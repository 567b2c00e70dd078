"""Training in a fraction of the memory gives the values of training with room, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conftest import Kind

from managed_exec import sim
from managed_exec.memory.manager import configure, manager
from managed_exec.memory.policy import MemoryPolicy

WAIT_S = 100
STEPS = 3
POLICY = MemoryPolicy(min_bytes=1024)


@pytest.fixture(autouse=True)
def one_device(simulator: Kind) -> None:
    sim.enable(devices=1, memory="256MiB")
    configure(POLICY)


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class Recurrent(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = torch.nn.LSTM(32, 64, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0]


class Checkpointed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(128, 128) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(lambda x, layer=layer: layer(x).tanh(), x, use_reentrant=False)
        return x


def mlp() -> torch.nn.Module:
    return torch.nn.Sequential(*[m for _ in range(8) for m in (torch.nn.Linear(128, 128), torch.nn.Tanh())])


def cnn() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(8, 8, 3),
    )


MODELS: dict[str, tuple[Callable[[], torch.nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (128, 128)),
    "cnn": (cnn, (8, 3, 24, 24)),
    "lstm": (Recurrent, (8, 12, 32)),
    "transformer": (Attention, (4, 24, 64)),
    "checkpointed": (Checkpointed, (128, 128)),
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}


def train(model: torch.nn.Module, x: torch.Tensor, optimizer_name: str) -> tuple[list[float], list[torch.Tensor]]:
    """Train a copy of *model* on the task's device; return its losses, and its weights and buffers on the host."""
    model = model.to("cuda")
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    x = x.to("cuda")
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [value.cpu() for value in model.state_dict().values()]


def train_four(name: str, optimizer_name: str, capacity_bytes: int) -> list[tuple[list[float], list[torch.Tensor]]]:
    make, shape = MODELS[name]
    torch.manual_seed(0)
    models = [make() for _ in range(4)]
    inputs = [torch.randn(shape) for _ in range(4)]
    sim.set_capacity(0, capacity_bytes)
    torch.accelerator.memory.reset_peak_memory_stats(0)
    with Kind("sim").pool(max_workers=4, memory=POLICY) as pool:
        futures = [pool.submit(train, *pair, optimizer_name) for pair in zip(models, inputs, strict=True)]
        return [future.result(WAIT_S) for future in futures]


@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_four_tasks_on_a_device_a_tenth_the_size(name: str, optimizer_name: str) -> None:
    expected = train_four(name, optimizer_name, 256 * 2**20)
    peak_bytes = torch.accelerator.max_memory_allocated(0)
    # A tenth of what one task needs, or its largest kernel with all its operands where that is more.
    needed_bytes = max(peak_bytes // 40, LARGEST_KERNEL_BYTES[name])
    before = manager().statistics()
    actual = train_four(name, optimizer_name, needed_bytes)
    after = manager().statistics()
    assert torch.accelerator.max_memory_allocated(0) <= needed_bytes
    assert after.spilled_count["host"] > before.spilled_count.get("host", 0)
    print(f"{name}, {optimizer_name}: peak {peak_bytes}, on {needed_bytes}, {after.reruns - before.reruns} reruns")
    for (losses, values), (expected_losses, expected_values) in zip(actual, expected, strict=True):
        assert losses == expected_losses
        assert all(torch.equal(a, b) for a, b in zip(values, expected_values, strict=True))


# Found by halving: the next step down raises DeviceMemoryError in every model.
LARGEST_KERNEL_BYTES = {
    "mlp": 384 * 1024,
    "cnn": 768 * 1024,
    "lstm": 384 * 1024,
    "transformer": 512 * 1024,
    "checkpointed": 384 * 1024,
}
