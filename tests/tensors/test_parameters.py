"""Parameters stay the objects that they are when they become others or move."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from conftest import Kind

from managed_exec import GPUPoolExecutor, ManagedModule, ManagedTensor, MemoryPolicy, manage, sim
from managed_exec.memory.manager import configure
from managed_exec.tensors.parameters import become

WAIT_S = 30
POLICY = MemoryPolicy(min_bytes=1)


@pytest.fixture(autouse=True)
def everything(simulator: Kind) -> None:
    """Everything is large enough to be managed; and autograd counts the devices when it is first used."""
    configure(POLICY)


@pytest.fixture(params=["sim", "cpu"])
def place(request: pytest.FixtureRequest) -> str:
    """The device that ``.cuda()`` means."""
    if request.param == "cpu":
        sim.disable()
    return "cpu" if request.param == "cpu" else "sim:0"


def other(values: list[float]) -> torch.nn.Parameter:
    return torch.nn.Parameter(manage(torch.tensor(values)))


class TestBecome:
    def test_object_attributes_and_hooks_stay(self, place: str) -> None:
        parameter = torch.nn.Parameter(torch.ones(2))
        parameter.tag = "mine"
        parameter.register_hook(lambda gradient: gradient * 5)
        assert become(parameter, other([3.0, 4.0]), force=False) is None
        assert type(parameter) is ManagedTensor
        assert isinstance(parameter, torch.nn.Parameter)
        assert (parameter.tag, parameter.is_leaf, parameter.requires_grad) == ("mine", True, True)
        assert parameter.spill("disk").tolist() == [3, 4]
        parameter.sum().backward()
        assert parameter.grad.tolist() == [5, 5]

    def test_what_is_held_stays_as_it_is(self) -> None:
        parameter = torch.nn.Parameter(torch.ones(2))
        reference = weakref.ref(parameter)
        assert become(parameter, other([3.0, 4.0]), force=True) == "there are weak references to it"
        del reference
        y = parameter + 1
        assert become(parameter, other([3.0, 4.0]), force=False) == "a graph has it"
        del y
        y = parameter.exp() * parameter
        assert become(parameter, other([3.0, 4.0]), force=True) == "a graph, or code in C++, has it"
        y.sum().backward()
        assert (type(parameter), parameter.tolist()) == (torch.nn.Parameter, [1, 1])


MOVES: dict[str, tuple[Callable[[torch.nn.Module], torch.nn.Module], torch.dtype]] = {
    "half": (lambda m: m.half(), torch.float16),
    "double": (lambda m: m.double(), torch.float64),
    "bfloat16": (lambda m: m.bfloat16(), torch.bfloat16),
    "type": (lambda m: m.type(torch.float64), torch.float64),
    "to dtype": (lambda m: m.to(torch.float16), torch.float16),
    "to all": (lambda m: m.to("cuda", torch.float64, non_blocking=False), torch.float64),
    "to tensor": (lambda m: m.to(torch.ones(1, dtype=torch.float64)), torch.float64),
    "there and back": (lambda m: m.cuda().cpu().cuda().float(), torch.float32),
}


class TestConversion:
    @pytest.mark.parametrize("in_task", [False, True])
    @pytest.mark.parametrize("move", MOVES)
    def test_identity_gradient_and_ties(self, place: str, move: str, in_task: bool) -> None:
        module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 2))
        module[2].weight = module[0].weight
        ManagedModule.from_module(module).cuda()
        parameters = list(module.parameters())
        module[0].weight.grad = manage(torch.tensor([[1.0, 2], [3, 4]])).cuda()
        module[2].bias.requires_grad_(False)
        values = [p.tolist() for p in parameters]
        for p in parameters:
            p.spill("disk")
        call, dtype = MOVES[move]
        if in_task:
            with GPUPoolExecutor(1, memory=POLICY) as pool:
                assert pool.submit(call, module).result(WAIT_S) is module
        else:
            assert call(module) is module
        assert all(p is q for p, q in zip(module.parameters(), parameters, strict=True))
        assert module[2].weight is module[0].weight
        assert {p.dtype for p in parameters} == {dtype}
        assert module[1].running_mean.dtype is dtype
        assert module[1].num_batches_tracked.dtype in (torch.int64, dtype if move == "type" else torch.int64)
        expected = [torch.tensor(v).to(dtype).tolist() for v in values]
        assert [p.tolist() for p in parameters] == expected
        assert [p.requires_grad for p in parameters] == [p is not module[2].bias for p in parameters]
        assert module[0].weight.grad.tolist() == [[1, 2], [3, 4]]
        assert (module[0].weight.grad.dtype, module[0].weight.grad.device) == (dtype, parameters[0].device)
        assert all(p.is_leaf and p.spill("disk").residency == "disk" for p in (*parameters, *module.buffers()))

    def test_optimizer_goes_on(self, place: str) -> None:
        module = ManagedModule.from_module(torch.nn.Linear(2, 1, bias=False))
        plain = torch.nn.Linear(2, 1, bias=False)
        plain.load_state_dict(module.state_dict())
        for net in (plain, module):
            optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
            for step in range(3):
                if net is module and step == 1:
                    # Its loss is alive still, as in a loop that moves the module for a while.
                    net.cuda()
                    for state in optimizer.state.values():
                        state["momentum_buffer"] = state["momentum_buffer"].cuda()
                optimizer.zero_grad()
                loss = net(torch.ones(1, 2)).square().sum()
                loss.backward()
                optimizer.step()
        assert module.weight.device == torch.device(place)
        assert module.weight.tolist() == plain.weight.tolist()

    def test_in_use_elsewhere_it_is_replaced_as_torch_does(self, simulator: Kind) -> None:
        module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        module[1].weight = module[0].weight
        ManagedModule.from_module(module)
        reference = weakref.ref(module[0].weight)
        values = module[0].weight.tolist()
        module.cuda()
        assert reference() is None
        assert module[0].weight is module[1].weight
        assert module[0].weight.tolist() == values
        assert type(module[0].weight) is ManagedTensor

    def test_of_a_module_larger_than_the_device(self, simulator: Kind) -> None:
        sim.enable(devices=1, memory="1MiB")
        layers = [torch.nn.Linear(256, 256, bias=False) for _ in range(8)]
        expected = [layer.weight.sum().item() for layer in layers]
        module = ManagedModule.from_module(torch.nn.Sequential(*layers)).cuda()
        assert {p.device for p in module.parameters()} == {torch.device("sim:0")}
        assert [p.cpu().sum().item() for p in module.parameters()] == expected

    def test_to_empty_and_share_memory(self) -> None:
        module = ManagedModule.from_module(torch.nn.Linear(2, 2))
        weight, values = module.weight, module.weight.tolist()
        assert module.share_memory().weight is weight
        assert weight.is_shared()
        assert weight.tolist() == values
        assert module.to_empty(device="cpu").weight is weight
        assert weight.shape == (2, 2)
        assert module.to("meta").weight.device.type == "meta"
        with torch.no_grad():
            assert module.to_empty(device="cpu").weight.fill_(2).tolist() == [[2, 2], [2, 2]]
