"""A managed module is used as any module is, whatever was spilled: training, moves, pins, files, copies."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path

import pytest
import torch
from conftest import Kind, run_python

from managed_exec import GPUPoolExecutor, ManagedModule, ManagedTensor, MemoryPolicy, sim
from managed_exec.memory.manager import configure

WAIT_S = 60
EVERYTHING = MemoryPolicy(min_bytes=1)


@pytest.fixture(params=["sim", "cpu"])  # autograd counts the devices at its first backward pass
def place(request: pytest.FixtureRequest) -> str:
    """The device that ``.cuda()`` means; everything is large enough to be managed."""
    if request.param == "sim":
        request.getfixturevalue("simulator")
    configure(EVERYTHING)
    return "cpu" if request.param == "cpu" else "sim:0"


class LanguageModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.out = torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False)
        self.out.weight = self.emb.weight

    def forward(self, i: torch.Tensor) -> torch.Tensor:
        return self.out(self.emb(i))


class Layers:
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList()
        for _ in range(2):
            self.layers.append(torch.nn.Linear(4, 4))
        self.norm = torch.nn.BatchNorm1d(4)
        self.scale = torch.nn.Parameter(torch.ones(4))
        self.register_buffer("shift", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.norm(x) * self.scale + self.shift


class PlainNet(Layers, torch.nn.Module):
    pass


class ManagedNet(Layers, ManagedModule):
    pass


def pair() -> tuple[PlainNet, ManagedNet]:
    """Return a plain and a managed module of the same values."""
    torch.manual_seed(0)
    plain, managed = PlainNet(), ManagedNet()
    managed.load_state_dict(plain.state_dict())
    return plain, managed


def spill_all(module: torch.nn.Module, tier: str = "host") -> None:
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.spill(tier)


def train(module: torch.nn.Module, optimizer: torch.optim.Optimizer, tiers: tuple[str, ...] = ()) -> list[float]:
    losses = []
    for step in range(3):
        for tier in tiers:
            spill_all(module, tier)
        optimizer.zero_grad()
        loss = module(torch.arange(12.0).reshape(3, 4) * (step + 1)).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def same(module: torch.nn.Module, other: torch.nn.Module) -> bool:
    state, others = module.state_dict(), other.state_dict()
    return list(state) == list(others) and all(torch.equal(state[k].cpu(), others[k].cpu()) for k in state)


class TestCase19TiedWeights:
    """https://github.com/huggingface/accelerate/issues/993 , https://github.com/huggingface/accelerate/pull/2330"""

    def test_stay_one_parameter(self, place: str) -> None:
        torch.manual_seed(0)
        ref = LanguageModel()
        m = ManagedModule.from_module(copy.deepcopy(ref))
        ids = torch.tensor([0, 1, 1])
        assert m.emb.weight is m.out.weight
        for tier in ("host", "disk"):
            for p in m.parameters():
                p.spill(tier)
            assert len(list(m.parameters())) == 1
            assert m.emb.weight is m.out.weight
            m.cuda()
            assert m.emb.weight.device == torch.device(place)
            assert len(list(m.parameters())) == 1
            assert m.emb.weight is m.out.weight
        for net in (ref, m):
            opt = torch.optim.SGD(net.parameters(), lr=0.1)
            net(ids).square().sum().backward()
            opt.step()
        assert torch.allclose(m.emb.weight.cpu(), ref.emb.weight)
        assert torch.equal(m.emb.weight, m.out.weight)

    def test_in_a_task(self, place: str) -> None:
        def move(m: LanguageModel) -> LanguageModel:
            return m.cuda().half().cpu().float().cuda()

        m = ManagedModule.from_module(LanguageModel())
        weight = m.emb.weight
        with GPUPoolExecutor(1, memory=EVERYTHING) as pool:
            assert pool.submit(move, m).result(WAIT_S) is m
        assert m.emb.weight is weight
        assert m.out.weight is weight
        assert weight.device == torch.device(place)


class TestTraining:
    @pytest.mark.parametrize("tiers", [(), ("host",), ("host", "disk")])
    def test_subclass(self, place: str, tiers: tuple[str, ...]) -> None:
        plain, managed = pair()
        managed.cuda()
        expected = train(plain, torch.optim.Adam(plain.parameters(), lr=0.1))
        assert train(managed, torch.optim.Adam(managed.parameters(), lr=0.1), tiers) == expected
        assert same(managed, plain)
        assert managed.norm.running_mean.device == torch.device(place)

    def test_optimizer_from_before(self, place: str) -> None:
        """The optimizer was made of the plain module, which had a step and a half behind it."""
        plain = pair()[0]
        module = copy.deepcopy(plain)
        results = []
        for net in (plain, module):
            optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
            losses = train(net, optimizer)
            net(torch.ones(2, 4)).sum().backward()
            if net is module:
                assert ManagedModule.from_module(net).cuda() is module
            results.append(losses + train(net, optimizer, () if net is plain else ("disk",)))
        assert results[0] == results[1]
        assert same(module, plain)

    def test_zero_grad_and_frozen_parts(self, place: str) -> None:
        managed = pair()[1].cuda()
        managed.layers[0].requires_grad_(False)
        managed(torch.ones(2, 4)).sum().backward()
        assert [p.grad is None for p in managed.layers[0].parameters()] == [True, True]
        assert managed.scale.grad is not None
        managed.zero_grad(set_to_none=False)
        assert managed.scale.grad.tolist() == [0, 0, 0, 0]

    def test_hooks(self, place: str) -> None:
        module = torch.nn.Linear(2, 1)
        seen: list[object] = []
        module.register_forward_hook(lambda m, args, y: seen.append(type(m)))
        doubled = module.weight.register_hook(lambda gradient: gradient * 2)
        module.weight.register_post_accumulate_grad_hook(
            lambda p: seen.append(id(p))
        )  # to hold the module would be a leak, in torch too
        ManagedModule.from_module(module).cuda()
        module(torch.ones(1, 2)).sum().backward()
        assert seen == [type(module), id(module.weight)]
        assert module.weight.grad.tolist() == [[2, 2]]
        doubled.remove()
        module.zero_grad()
        module(torch.ones(1, 2)).sum().backward()
        assert module.weight.grad.tolist() == [[1, 1]]

    def test_in_tasks_of_a_small_device(self, simulator: Kind) -> None:
        """Eight models of 128 KiB, gradients and Adam's moments, through a device of 1 MiB."""
        policy = MemoryPolicy(min_bytes=1024)
        configure(policy)
        sim.enable(devices=1, memory="1MiB")

        def work(module: torch.nn.Module) -> tuple[list[float], torch.nn.Module]:
            module.cuda()
            optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
            losses = []
            for _ in range(2):
                optimizer.zero_grad()
                loss = module(torch.ones(4, 128, device="cuda")).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            return losses, module

        torch.manual_seed(0)
        plain = [torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.Linear(128, 128)) for _ in range(8)]
        managed = [ManagedModule.from_module(copy.deepcopy(module)) for module in plain]
        expected = [work_on_cpu(module) for module in plain]
        with GPUPoolExecutor(4, memory=policy) as pool:
            results = [future.result(WAIT_S) for future in [pool.submit(work, module) for module in managed]]
        assert [losses for losses, _ in results] == expected
        assert all(module is m and same(m, p) for (_, module), m, p in zip(results, managed, plain, strict=True))


def work_on_cpu(module: torch.nn.Module) -> list[float]:
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = module(torch.ones(4, 128)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class TestPins:
    def test_count_and_follow_the_module(self, place: str) -> None:
        managed = pair()[1]
        assert managed.pin().pin() is managed
        managed.cuda()
        tensors = [*managed.parameters(), *managed.buffers()]
        assert all(t.pinned and t.device == torch.device(place) for t in tensors)
        assert all(t.pinned for t in [managed.unpin().scale, managed.shift])
        managed.unpin()
        assert not any(t.pinned for t in tensors)
        with pytest.raises(ValueError, match="not pinned"):
            managed.unpin()
        spill_all(managed, "disk")

    def test_a_part_has_pins_of_its_own(self, place: str) -> None:
        class Outer(ManagedModule):
            def __init__(self) -> None:
                super().__init__()
                self.inner, self.own = ManagedNet(), torch.nn.Parameter(torch.ones(2))

        outer = Outer()
        outer.inner.pin()
        outer.pin().cuda().unpin()
        assert outer.inner.scale.pinned
        assert not outer.own.pinned
        outer.half()
        outer.inner.unpin()
        assert not outer.inner.scale.pinned

    def test_of_parts_that_are_gone_or_new(self, place: str) -> None:
        managed = pair()[1].pin()
        managed.norm = torch.nn.BatchNorm1d(4)
        managed.unpin()
        assert not any(t.pinned for t in (*managed.parameters(), *managed.buffers()))

    def test_copies_are_not_pinned(self, place: str) -> None:
        managed = pair()[1].cuda().pin()
        twin = copy.deepcopy(managed)
        assert not twin.scale.pinned
        with pytest.raises(ValueError, match="not pinned"):
            twin.unpin()
        managed.unpin()


class TestFilesAndCopies:
    def test_state_goes_both_ways(self, place: str) -> None:
        plain, managed = pair()
        managed.cuda()
        train(managed, torch.optim.SGD(managed.parameters(), lr=0.1))
        spill_all(managed, "disk")
        assert plain.load_state_dict(managed.state_dict()).missing_keys == []
        assert same(plain, managed)
        assert type(plain.scale) is torch.nn.Parameter
        train(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
        assert not same(plain, managed)
        managed.load_state_dict(plain.state_dict())
        assert same(plain, managed)
        assert managed.scale.device == torch.device(place)

    def test_assigned_state_is_managed(self, place: str) -> None:
        plain, managed = pair()
        managed.load_state_dict(copy.deepcopy(plain.state_dict()), assign=True)
        assert all(type(t) is ManagedTensor for t in (*managed.parameters(), *managed.buffers()))
        spill_all(managed, "disk")
        assert same(plain, managed)

    def test_state_can_be_read_without_the_package(self, place: str, tmp_path: Path) -> None:
        plain, managed = pair()
        spill_all(managed, "disk")
        torch.save(managed.state_dict(), tmp_path / "state.pt")
        module = ManagedModule.from_module(torch.nn.Sequential(torch.nn.Linear(2, 2)))
        torch.save(module, tmp_path / "module.pt")
        code = (
            "import sys, torch\n"
            "sys.modules['managed_exec'] = None\n"
            "state = torch.load(sys.argv[1] + '/state.pt')\n"
            "module = torch.load(sys.argv[1] + '/module.pt', weights_only=False)\n"
            "print(state['scale'].tolist(), type(module).__name__, type(module[0].weight).__name__)\n"
            "print(module[0].weight.tolist())\n"
        )
        run = run_python(code, tmp_path)
        assert run.stderr == ""
        assert run.stdout == f"{plain.scale.tolist()} Sequential Parameter\n{module[0].weight.tolist()}\n"

    def test_pickles(self, place: str) -> None:
        managed = pair()[1]
        managed.load_state_dict({**managed.state_dict(), "shift": torch.arange(4.0)})
        file = io.BytesIO()
        torch.save(managed, file)
        file.seek(0)
        for loaded in (torch.load(file, weights_only=False), pickle.loads(pickle.dumps(managed))):
            assert type(loaded) is ManagedNet
            assert same(loaded, managed)
            assert all(type(t) is ManagedTensor for t in (*loaded.parameters(), *loaded.buffers()))
        tied = pickle.loads(pickle.dumps(ManagedModule.from_module(LanguageModel())))
        assert type(tied) is LanguageModel
        assert tied.emb.weight is tied.out.weight

    def test_deepcopy(self, place: str) -> None:
        for module in (ManagedModule.from_module(LanguageModel()), pair()[1], ManagedModule.from_module(pair()[0])):
            module.cuda()
            spill_all(module, "disk")
            for twin in (copy.deepcopy(module), copy.deepcopy([module])[0]):
                assert type(twin) is type(module)
                assert same(twin, module)
                assert all(type(t) is ManagedTensor for t in (*twin.parameters(), *twin.buffers()))
                with torch.no_grad():
                    next(twin.parameters()).add_(1)
                assert not same(twin, module)
        shallow = copy.copy(module)
        assert type(shallow) is type(module)
        assert shallow.scale is module.scale
        tied = copy.deepcopy(ManagedModule.from_module(LanguageModel()))
        assert tied.emb.weight is tied.out.weight

    def test_class(self, place: str) -> None:
        one, two = (ManagedModule.from_module(torch.nn.Linear(2, 2)) for _ in range(2))
        assert type(one) is type(two)
        assert isinstance(one, torch.nn.Linear)
        assert isinstance(one, ManagedModule)
        assert ManagedModule.from_module(one) is one
        assert repr(one) == "ManagedLinear(in_features=2, out_features=2, bias=True)"
        assert type(torch.nn.Linear(2, 2)) is torch.nn.Linear
        with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, got Tensor"):
            ManagedModule.from_module(torch.ones(2))


class TestCuda:
    def test_disperse_takes_the_module_as_a_whole(self, simulator: Kind) -> None:
        configure(EVERYTHING)
        modules = [ManagedNet().cuda(disperse=True) for _ in range(4)]
        devices = [{str(t.device) for t in (*m.parameters(), *m.buffers())} for m in modules]
        assert all(len(d) == 1 for d in devices)
        assert set().union(*devices) == {f"sim:{i}" for i in range(4)}
        with pytest.raises(ValueError, match="not both"):
            modules[0].cuda(1, disperse=True)
        assert modules[0].cuda(1).scale.device == modules[0].to("cuda:2").cuda("sim:1").scale.device

    def test_means_the_task_s_device(self, simulator: Kind) -> None:
        def devices(module: torch.nn.Module, move: str) -> list[object]:
            getattr(module, move)(*([] if move == "cuda" else ["cuda"]))
            return [torch.accelerator.current_device_index(), {t.device.index for t in module.parameters()}]

        with GPUPoolExecutor(1, devices=["sim:3"], memory=EVERYTHING) as pool:
            for move in ("cuda", "to"):
                assert pool.submit(devices, ManagedNet(), move).result(WAIT_S) == [3, {3}]
        with GPUPoolExecutor(1, devices="cpu") as pool:
            module = ManagedNet()
            pool.submit(module.cuda).result(WAIT_S)
            assert module.scale.device.type == "cpu"
