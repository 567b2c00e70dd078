"""Code of the user's that autograd runs in a backward pass: on the task's device, and once."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from conftest import Kind, allocated_bytes, eventually

from managed_exec import ManagedTensor, MemoryPolicy, current_task, manage, sim
from managed_exec.errors import NotMovableError

POLICY = MemoryPolicy(min_bytes=1024, wait_s=5)


class AddOnes(torch.autograd.Function):
    """Doubles; its backward adds ones that it makes on the bare "cuda"."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2 + torch.ones(gradient.shape, device="cuda")


def leaf(elements: int = 3) -> torch.Tensor:
    return torch.ones(elements, device="cuda", requires_grad=True)


def in_custom_function() -> torch.Tensor:
    x = leaf()
    AddOnes.apply(x).sum().backward()
    return x.grad


def in_hook() -> torch.Tensor:
    x = leaf()
    y = x * 2
    y.register_hook(lambda gradient: gradient + torch.ones(3).cuda())
    y.sum().backward(retain_graph=True)
    return x.grad


def in_checkpoint() -> torch.Tensor:
    x = leaf()
    torch.utils.checkpoint.checkpoint(
        lambda x: (x * torch.full((3,), 3.0, device="cuda")).sum(), x, use_reentrant=False
    ).backward()
    return x.grad


def in_autograd_grad() -> torch.Tensor:
    x = leaf()
    return torch.autograd.grad(AddOnes.apply(x).sum(), x)[0]


def in_second_derivative() -> torch.Tensor:
    x = leaf()
    (first,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    first.sum().backward()
    return x.grad


WAYS: dict[Callable[[], torch.Tensor], float] = {
    in_custom_function: 3.0,
    in_hook: 4.0,
    in_checkpoint: 3.0,
    in_autograd_grad: 3.0,
    in_second_derivative: 6.0,
}


@pytest.mark.parametrize("memory", [None, POLICY], ids=["plain", "managed"])
@pytest.mark.parametrize("way", WAYS)
def test_bare_cuda_is_the_task_s_device(
    kind: Kind, way: Callable[[], torch.Tensor], memory: MemoryPolicy | None
) -> None:
    def task() -> tuple[bool, list[float], int]:
        gradient = way()
        return gradient.device == current_task().device, gradient.tolist(), torch._C._len_torch_function_stack()

    with kind.pool(max_workers=1, memory=memory) as pool:
        on_device, values, modes = pool.submit(task).result()
        assert on_device
        assert values == [WAYS[way]] * 3
        assert pool.submit(torch._C._len_torch_function_stack).result() == modes, "the pass leaves no mode behind"


def test_pass_that_found_no_room_is_not_run_again(simulator: Kind) -> None:
    """A second run would add the first gradients twice."""
    sim.enable(devices=1, memory="2MiB")

    def task(failing: int) -> tuple[float, float]:
        a, b = leaf(64 * 1024), leaf(64 * 1024)
        loss = (AddOnes.apply(a) * 3 + b).sum() + b.sum()
        sim.faults.fail_allocation(failing)
        try:
            loss.backward(retain_graph=True)
        finally:
            sim.faults.clear()
        return a.grad.max().item(), b.grad.max().item()

    with simulator.pool(max_workers=1, memory=POLICY) as pool:
        for failing in range(1, 12):
            assert pool.submit(task, failing).result() == (7.0, 2.0)


def test_pointer_asked_for_in_a_pass_is_that_of_the_bytes(small_device: object, simulator: Kind) -> None:
    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            ctx.other = other
            return x * 1

        @staticmethod
        def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            assert ctx.other.data_ptr() != 0
            with pytest.raises(NotMovableError):
                ctx.other.spill()
            return gradient, None

    def task() -> float:
        other = torch.ones(4096, device="cuda")
        x = leaf()
        y = Reads.apply(x, other).sum()
        other.spill()
        y.backward()
        return x.grad.sum().item()

    with simulator.pool(max_workers=1, memory=POLICY) as pool:
        assert pool.submit(task).result() == 3


def test_pass_whose_error_a_task_has_caught_leaves_nothing(simulator: Kind) -> None:
    """Autograd keeps the nodes that were still to run, with what they have saved, until the thread's next pass."""

    def fail(grad: torch.Tensor) -> None:
        raise ValueError("mine")

    def task() -> str:
        x = torch.ones(2**16, device="cuda", requires_grad=True)
        branches = [x.exp(), x.exp()]
        for branch in branches:
            branch.register_hook(fail)
        with pytest.raises(ValueError, match="mine"):
            (branches[0] + branches[1]).sum().backward()
        return "caught"

    with simulator.pool(max_workers=1) as pool:
        assert pool.submit(task).result(60) == "caught"
        assert eventually(lambda: allocated_bytes() == 0)


def saved_results(node: torch.autograd.graph.Node) -> list[torch.Tensor]:
    """Return what the nodes of a graph, from *node* on, have saved of their own results."""
    found = [node._saved_result] if hasattr(node, "_saved_result") else []
    return found + [saved for following, _ in node.next_functions if following for saved in saved_results(following)]


def test_pass_from_a_small_loss_brings_back_what_is_spilled(simulator: Kind) -> None:
    """A call that makes large tensors may return a small one, which is not managed, and the pass starts there."""

    def gradient(device: str) -> list[float]:
        x = torch.linspace(0, 1, 16, device=device)[:, None].requires_grad_()
        loss = torch.nn.functional.poisson_nll_loss(x.expand(16, 1024), torch.ones(16, 1, device=device))
        if device != "cpu":
            assert type(loss) is torch.Tensor
            (saved,) = saved_results(loss.grad_fn)
            assert saved.spill("host").residency == "host"
            del saved
        loss.backward()
        return x.grad.flatten().tolist()

    with simulator.pool(max_workers=1, memory=POLICY) as pool:
        assert pool.submit(gradient, "cuda").result(60) == pytest.approx(gradient("cpu"))


@pytest.mark.parametrize(("device", "tier"), [("cuda", "host"), ("cpu", "disk")])
def test_detached_in_a_pass_while_it_is_spilled(simulator: Kind, device: str, tier: str) -> None:
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: torch.Tensor, by: ManagedTensor) -> torch.Tensor:
            ctx.by = by
            return x * 2

        @staticmethod
        def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            by = ctx.by.detach()
            assert by.residency == ctx.by.residency == tier
            return gradient * by[:3], None

    def task() -> list[float]:
        x = torch.ones(3, device=device, requires_grad=True)
        by = manage(torch.arange(1024.0, device=device))
        y = Scale.apply(x, by).sum()
        by.spill(tier)
        y.backward()
        return x.grad.tolist()

    with simulator.pool(max_workers=1, memory=MemoryPolicy(min_bytes=1024, spill=("host", "disk"))) as pool:
        assert pool.submit(task).result(60) == [0, 1, 2]


def test_gradient_of_zeros_that_have_no_memory(simulator: Kind) -> None:
    """Autograd does not write down the zeros of a step function's gradient."""

    def task() -> list[float]:
        x = torch.ones(1024, device="cuda", requires_grad=True)
        (gradient,) = torch.autograd.grad(x.sgn(), x, torch.ones(1024, device="cuda"))
        assert gradient._is_zerotensor()
        return gradient.detach().cpu().tolist()

    with simulator.pool(max_workers=1, memory=POLICY) as pool:
        assert pool.submit(task).result(60) == [0.0] * 1024


@pytest.mark.parametrize("how", ["backward", "grad"])
def test_small_graph_on_a_device_that_another_has_filled(simulator: Kind, how: str) -> None:
    """No tensor of the graph is managed, and all that is in its way could be spilled: also for the first gradient."""
    sim.enable(devices=1, memory="8MiB")
    made, full = threading.Event(), threading.Event()

    def small() -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)).cuda()
        loss = model(torch.ones(4, 8, device="cuda")).sum()
        made.set()
        assert full.wait(30)
        if how == "grad":
            return [gradient.sum().item() for gradient in torch.autograd.grad(loss, list(model.parameters()))]
        loss.backward()
        return [parameter.grad.sum().item() for parameter in model.parameters()]

    def big() -> list[torch.Tensor]:
        assert made.wait(30)
        parts = [torch.ones(2**18, device="cuda") for _ in range((8 * 2**20 - allocated_bytes()) // 2**20)]
        parts.append(torch.ones((8 * 2**20 - allocated_bytes()) // 4, device="cuda"))
        assert allocated_bytes() == 8 * 2**20
        full.set()
        return parts

    with simulator.pool(max_workers=2) as pool:
        first, second = pool.submit(small), pool.submit(big)
        gradients = first.result(60)
        assert all(part.min().item() == 1 for part in second.result(60))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    model(torch.ones(4, 8)).sum().backward()
    assert gradients == pytest.approx([parameter.grad.sum().item() for parameter in model.parameters()])
