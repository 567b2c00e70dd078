"""The two programs of the predecessor library's quickstart, with the import line changed, against plain torch."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import pytest
import torch
from conftest import Kind

from managed_exec import GPUPoolExecutor, MemoryPolicy, sim
from managed_exec import ManagedModule as mm
from managed_exec import ManagedTensor as mt
from managed_exec.memory.manager import configure

WAIT_S = 100
N = 48
POINTS = [0.5 + i / 8 for i in range(16)]
POLICY = MemoryPolicy(min_bytes=1024)


# -- a PDE with a parameter: a dense matrix for each of its values -----------------------------------------------------


def construct(x: float) -> torch.Tensor:
    """Return the matrix of -u'' + x u on N inner points of the unit interval, on the CPU."""
    h = 1 / (N + 1)
    main, beside = torch.full((N,), 2 / h**2 + x, dtype=torch.float64), torch.full((N - 1,), -1 / h**2).double()
    return torch.diag(main) + torch.diag(beside, 1) + torch.diag(beside, -1)


def right_side(x: float) -> torch.Tensor:
    return torch.linspace(0, x, N, dtype=torch.float64).unsqueeze(1)


def solve(x: float) -> tuple[mt, torch.device]:
    matrix = construct(x).as_subclass(mt).cuda(disperse=True)
    b = right_side(x).as_subclass(mt).cuda(matrix.device)
    return torch.linalg.solve(matrix, b), matrix.device


def expected_solutions() -> list[torch.Tensor]:
    return [torch.linalg.solve(construct(x), right_side(x)) for x in POINTS]


def check_solutions(solutions: list[torch.Tensor]) -> None:
    for solution, expected in zip(solutions, expected_solutions(), strict=True):
        assert isinstance(solution, mt)
        assert torch.equal(solution.cpu(), expected)


class TestPde:
    @pytest.fixture(autouse=True)
    def policy(self) -> None:
        configure(POLICY)

    def test_list_of_matrices_outside_a_pool(self, simulator: Kind) -> None:
        """All matrices are alive at once: each goes where the most room is, so each device has a quarter of them."""
        matrices = [construct(x).as_subclass(mt).cuda(disperse=True) for x in POINTS]
        sides = [right_side(x).as_subclass(mt).cuda(m.device) for x, m in zip(POINTS, matrices, strict=True)]
        devices = [matrix.device.index for matrix in matrices]
        assert sorted(devices) == sorted([0, 1, 2, 3] * 4)
        assert [side.device.index for side in sides] == devices
        solutions = [torch.linalg.solve(m, b) for m, b in zip(matrices, sides, strict=True)]
        assert [solution.device.index for solution in solutions] == devices
        check_solutions(solutions)
        for tensor in (*matrices, *sides, *solutions):
            if tensor.is_registered:
                tensor.spill("disk")
        check_solutions([torch.linalg.solve(m, b) for m, b in zip(matrices, sides, strict=True)])

    @pytest.mark.parametrize("memory", [POLICY, False], ids=["managed", "unmanaged"])
    def test_list_of_matrices_through_a_pool(self, simulator: Kind, memory: MemoryPolicy | Literal[False]) -> None:
        with GPUPoolExecutor(memory=memory) as pool:
            matrices = list(pool.map(lambda x: construct(x).as_subclass(mt).cuda(disperse=True), POINTS))
            # A tensor that has just arrived may still be booked when the next one is placed, and count twice.
            counts = Counter(matrix.device.index for matrix in matrices)
            assert set(counts) == {0, 1, 2, 3}
            assert max(counts.values()) - min(counts.values()) <= 2
            sides = [right_side(x).as_subclass(mt).cuda(m.device) for x, m in zip(POINTS, matrices, strict=True)]
            solutions = list(pool.map(torch.linalg.solve, matrices, sides))
        assert [solution.device for solution in solutions] == [matrix.device for matrix in matrices]
        check_solutions(solutions)

    @pytest.mark.parametrize("executor", [GPUPoolExecutor, ThreadPoolExecutor])
    def test_whole_solves(self, kind: Kind, executor: Callable[[int], ThreadPoolExecutor]) -> None:
        """In tasks of both pools, on the simulator and on the CPU."""
        with executor(8) as pool:
            results = list(pool.map(solve, POINTS))
        check_solutions([solution for solution, _ in results])
        assert all(solution.device == device for solution, device in results)
        assert {device.type for _, device in results} == {kind.name}

    def test_more_matrices_than_memory(self, simulator: Kind) -> None:
        """Sixteen of 18 KiB, on four devices that hold three each."""
        sim.enable(devices=4, memory="64KiB")
        matrices = [construct(x).as_subclass(mt).cuda(disperse=True) for x in POINTS]
        solutions = [torch.linalg.solve(m, right_side(x)) for x, m in zip(POINTS, matrices, strict=True)]
        check_solutions(solutions)
        assert {matrix.device.index for matrix in matrices} == {0, 1, 2, 3}


# -- many small models ------------------------------------------------------------------------------------------------


class Layers:
    def __init__(self) -> None:
        super().__init__()
        self.hidden = torch.nn.Linear(16, 32)
        self.out = torch.nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.hidden(x).tanh())


class Model(Layers, mm):
    pass


class PlainModel(Layers, torch.nn.Module):
    pass


def train(model: torch.nn.Module, seed: int) -> list[float]:
    model.cuda()
    if isinstance(model, mm):
        model.pin()
    points = torch.randn(64, 16, generator=torch.Generator().manual_seed(seed)).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = (model(points) - points.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class TestModels:
    def test_a_hundred_through_one_pool(self, simulator: Kind) -> None:
        configure(POLICY)
        torch.manual_seed(0)
        plain = [PlainModel() for _ in range(100)]
        models = [Model() for _ in range(100)]
        for model, other in zip(models, plain, strict=True):
            model.load_state_dict(other.state_dict())
        untouched = copy.deepcopy(plain[0].state_dict())
        with GPUPoolExecutor() as pool:
            expected = list(pool.map(train, plain, range(100)))
        with GPUPoolExecutor(memory=POLICY) as pool:
            assert list(pool.map(train, models, range(100))) == expected
        assert len({tuple(losses) for losses in expected}) == 100
        assert all(losses[0] > losses[-1] for losses in expected)
        for model, other in zip(models, plain, strict=True):
            state = other.state_dict()
            assert all(torch.equal(value.cpu(), state[name].cpu()) for name, value in model.state_dict().items())
        assert not torch.equal(untouched["out.bias"], models[0].out.bias.cpu())
        assert len({p.device.index for model in models for p in model.parameters()}) == 4
        assert all(model.hidden.weight.pinned for model in models)
        assert not any(model.unpin().hidden.weight.pinned for model in models)
