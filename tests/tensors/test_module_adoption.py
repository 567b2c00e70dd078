"""What becomes managed, and when; and what is left alone or refused."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import Kind

from managed_exec import ManagedModule, ManagedTensor, MemoryPolicy, sim
from managed_exec.memory.manager import configure
from managed_exec.tensors.module_adoption import adopt

WAIT_S = 30
parametrizations = torch.nn.utils.parametrizations


@pytest.fixture(autouse=True)
def everything(simulator: Kind) -> None:
    """Everything is large enough to be managed; and autograd counts the devices when it is first used."""
    configure(MemoryPolicy(min_bytes=1))


@pytest.fixture(params=["sim", "cpu"])
def place(request: pytest.FixtureRequest) -> str:
    """The device that ``.cuda()`` means."""
    if request.param == "cpu":
        sim.disable()
    return "cpu" if request.param == "cpu" else "sim:0"


def all_managed(module: torch.nn.Module) -> bool:
    """Return whether every tensor of *module* is managed and can move, without asking the module for them."""
    own = [t for part in module.modules() for t in (*part._parameters.values(), *part._buffers.values())]
    return all(type(t) is ManagedTensor and t.spill("disk").residency == "disk" for t in own if t is not None)


class TestWhen:
    def test_assigned(self) -> None:
        module = ManagedModule()
        module.layer = torch.nn.BatchNorm1d(3)
        module.add_module("other", torch.nn.Linear(2, 2))
        module.weight = torch.nn.Parameter(torch.ones(2))
        module.register_parameter("bias", torch.nn.Parameter(torch.ones(2)))
        module.register_parameter("nothing", None)
        module.register_buffer("state", torch.ones(2))
        assert all_managed(module)
        module.state = torch.zeros(3)
        module.weight = torch.nn.Parameter(torch.zeros(1))
        module.buffer = torch.nn.Buffer(torch.ones(2), persistent=False)
        assert all_managed(module)
        own = [name for name in module.state_dict() if "." not in name]
        assert own == ["weight", "bias", "state"]
        module.plain = torch.ones(2)
        assert type(module.plain) is torch.Tensor

    @pytest.mark.parametrize(
        "ask",
        [lambda m: list(m.parameters()), lambda m: list(m.buffers()), lambda m: m.cuda(), lambda m: m.half(),
         lambda m: m.load_state_dict(m.state_dict()), lambda m: m.pin().unpin(), lambda m: m.zero_grad()],
    )  # fmt: skip
    def test_added_to_a_plain_part(self, ask: Callable[[ManagedModule], object]) -> None:
        module = ManagedModule()
        module.layers = torch.nn.ModuleList()
        module.layers.append(torch.nn.BatchNorm1d(2))
        module.layers[0].weight = torch.nn.Parameter(torch.ones(2))
        ask(module)
        assert all_managed(module)

    def test_shared_buffers_stay_shared(self) -> None:
        module = torch.nn.Sequential(torch.nn.Module(), torch.nn.Module())
        shared = torch.zeros(2)
        for part in module:
            part.register_buffer("b", shared)
        del shared
        ManagedModule.from_module(module).half()
        assert module[0].b is module[1].b
        assert all_managed(module)

    def test_attributes_stay(self) -> None:
        layer = torch.nn.Linear(2, 2)
        layer.weight.kind = "special"
        ManagedModule.from_module(layer)
        assert layer.weight.kind == "special"

    def test_plain_gradients_become_managed(self) -> None:
        layer = torch.nn.Linear(2, 1)
        layer(torch.ones(1, 2)).sum().backward()
        ManagedModule.from_module(layer)
        assert type(layer.weight.grad) is ManagedTensor
        assert layer.weight.grad.spill("disk").tolist() == [[1, 1]]

    def test_in_inference_mode_it_stays_trainable(self) -> None:
        layer = torch.nn.Linear(2, 1)
        with torch.inference_mode():
            ManagedModule.from_module(layer)
        layer(torch.ones(1, 2)).sum().backward()
        assert layer.weight.grad.tolist() == [[1, 1]]

    def test_one_module_in_two_threads(self) -> None:
        for _ in range(20):
            module = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(5)))
            expected = [p.tolist() for p in module.parameters()]
            barrier = threading.Barrier(4)

            def manage_it(_: int, module: torch.nn.Module = module, barrier: threading.Barrier = barrier) -> object:
                barrier.wait(WAIT_S)
                return ManagedModule.from_module(module)

            with ThreadPoolExecutor(4) as pool:
                assert all(result is module for result in pool.map(manage_it, range(4)))
            assert [p.tolist() for p in module.parameters()] == expected
            assert all_managed(module)


class TestKindsOfModules:
    @pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
    def test_recurrent(self, place: str, kind: type[torch.nn.RNNBase]) -> None:
        torch.manual_seed(0)
        plain = kind(4, 4, 2)
        managed = ManagedModule.from_module(copy.deepcopy(plain)).cuda()
        x = torch.randn(3, 2, 4)
        for net in (plain, managed):
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            for _ in range(2):
                assert net is plain or all_managed(net)
                optimizer.zero_grad()
                net(x)[0].square().sum().backward()
                optimizer.step()
        assert all(w is p for w, p in zip(managed._flat_weights, managed.parameters(), strict=True))
        assert torch.allclose(managed(x)[0].cpu(), plain(x)[0], atol=1e-6)
        assert copy.deepcopy(managed)(x)[0].device == torch.device(place)

    def test_lazy_parts(self, place: str) -> None:
        class Lazy(ManagedModule):
            def __init__(self) -> None:
                super().__init__()
                self.linear, self.norm = torch.nn.LazyLinear(2), torch.nn.LazyBatchNorm1d()

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.norm(self.linear(x))

        module = Lazy().cuda()
        loss = module(torch.ones(2, 3)).sum()
        assert (type(module.linear), type(module.norm)) == (torch.nn.Linear, torch.nn.BatchNorm1d)
        assert module.linear.weight.device == torch.device(place)
        assert not module.linear._forward_pre_hooks
        loss.backward()
        assert module.norm.bias.grad.tolist() == [2, 2]
        assert all_managed(module)
        whole = torch.nn.Sequential(torch.nn.LazyLinear(2))
        ManagedModule.from_module(whole)(torch.ones(1, 3))
        assert all_managed(whole)

    @pytest.mark.parametrize(
        "normalise", [parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal]
    )
    def test_parametrized(self, place: str, normalise: Callable[[torch.nn.Module], torch.nn.Module]) -> None:
        torch.manual_seed(0)
        plain, x = torch.nn.Sequential(normalise(torch.nn.Linear(3, 3))), torch.randn(2, 3)
        plain.eval()  # or spectral_norm takes a step of its own
        module = copy.deepcopy(plain)
        ManagedModule.from_module(module).cuda()
        assert all_managed(module)
        results = [net(x) for net in (plain, module)]
        for result in results:
            result.square().sum().backward()
        assert torch.allclose(results[0], results[1].cpu(), atol=1e-6)
        for p, q in zip(plain.parameters(), module.parameters(), strict=True):
            assert torch.allclose(p.grad, q.grad.cpu(), atol=1e-5)
        root = ManagedModule.from_module(torch.nn.Linear(3, 3))
        kind = type(root)
        normalise(root)
        weight = root.weight.tolist()
        torch.nn.utils.parametrize.remove_parametrizations(root, "weight")
        assert type(root) is kind
        assert root.weight.tolist() == weight

    def test_functional_calls_use_what_they_are_given(self) -> None:
        module = ManagedModule.from_module(torch.nn.Linear(2, 2))
        others = [dict(torch.nn.Linear(2, 2).named_parameters()) for _ in range(3)]
        stacked = {name: torch.stack([other[name].detach() for other in others]) for name in others[0]}
        x = torch.ones(1, 2)
        call = torch.func.functional_call
        batched = torch.func.vmap(lambda parameters: call(module, parameters, (x,)))(stacked)
        assert torch.allclose(batched, torch.stack([call(module, other, (x,)) for other in others]))
        assert all(type(other["weight"]) is torch.nn.Parameter for other in others)
        gradient = torch.func.grad(lambda p: call(module, p, (x,)).sum())(dict(module.named_parameters()))
        assert gradient["bias"].tolist() == [1, 1]
        assert all_managed(module)

    def test_compiled_scripted_traced(self) -> None:
        module, x = ManagedModule.from_module(torch.nn.Linear(2, 2)), torch.ones(1, 2)
        expected = module(x).tolist()
        assert torch.compile(module, backend="eager")(x).tolist() == expected
        assert torch.jit.script(module)(x).tolist() == expected
        assert torch.jit.trace(module, x)(x).tolist() == expected
        assert torch.fx.symbolic_trace(module)(x).tolist() == expected
        del module
        torch.compiler.reset()
        gc.collect()  # what torch made of it refers to itself


class TestRefused:
    def test_scripted(self) -> None:
        scripted = torch.jit.script(torch.nn.Linear(2, 2))
        plain = torch.nn.Sequential(torch.nn.Linear(2, 2), scripted)
        for make in (lambda: ManagedModule.from_module(plain), lambda: setattr(ManagedModule(), "part", plain)):
            with pytest.raises(TypeError, match=r"1 is a RecursiveScriptModule: TorchScript keeps its tensors"):
                make()
        assert type(plain) is torch.nn.Sequential
        assert type(plain[0].weight) is torch.nn.Parameter

    def test_classes_that_cannot_be_replaced(self) -> None:
        with pytest.raises(TypeError, match="LazyLinear changes its class when it is initialised; call it once first"):
            ManagedModule.from_module(torch.nn.LazyLinear(2))
        with pytest.raises(TypeError, match="make the module managed first, register its parametrizations then"):
            ManagedModule.from_module(parametrizations.weight_norm(torch.nn.Linear(2, 2)))
        with pytest.raises(TypeError, match="make managed what it was traced from"):
            ManagedModule.from_module(torch.fx.symbolic_trace(torch.nn.Linear(2, 2)))

    def test_parameters_that_somebody_holds(self) -> None:
        layer = torch.nn.Linear(2, 2)
        reference = weakref.ref(layer.bias)
        with pytest.raises(RuntimeError, match="parameter bias cannot be made managed in place: there are weak ref"):
            ManagedModule.from_module(layer)
        assert type(layer) is torch.nn.Linear
        assert layer(torch.ones(1, 2)).shape == (1, 2), "it is as usable as before"
        del reference
        y = layer.bias.exp() * layer.bias
        with pytest.raises(RuntimeError, match=r"parameter a\.bias .* a graph, or code in C\+\+, has it; do it before"):
            ManagedModule.from_module(torch.nn.ModuleDict({"a": layer}))
        y.sum().backward()
        del y
        assert all_managed(ManagedModule.from_module(layer))

    def test_assigned_in_use_stays_plain_until_it_is_free(self) -> None:
        layer, module = torch.nn.Linear(2, 2), ManagedModule()
        y = layer(torch.ones(1, 2))
        module.layer = layer
        assert type(layer.weight) is torch.nn.Parameter
        y.sum().backward()
        assert layer.bias.grad.tolist() == [1, 1]
        del y
        assert [type(p) for p in module.parameters()] == [ManagedTensor, ManagedTensor]

    def test_tensors_with_a_class_of_their_own_are_left_alone(self) -> None:
        class Own(torch.Tensor):
            pass

        layer = torch.nn.Linear(2, 2)
        own = torch.ones(2, 2).as_subclass(Own)
        layer.register_buffer("own", own)
        adopt(layer, strict=True)
        assert layer.own is own


def test_backward_of_a_graph_from_before_says_so(simulator: Kind) -> None:
    """https://github.com/pytorch/pytorch/pull/111747: what was saved for it belonged to the old parameter."""
    weight = torch.nn.Parameter(torch.ones(2))
    module = torch.nn.ParameterList([weight])
    y = (weight + 1).sum()
    ManagedModule.from_module(module)
    with pytest.raises(RuntimeError, match="swap_tensors"):
        y.backward()
    (weight + 1).sum().backward()
    assert weight.grad.tolist() == [1, 1]
