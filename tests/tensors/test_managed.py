"""Managed tensors are real tensors: views, autograd, copies, pickling, exports, before and after every move."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import Kind

from managed_exec.errors import NotMovableError
from managed_exec.memory.manager import MemoryManager, configure
from managed_exec.memory.policy import MemoryPolicy
from managed_exec.tensors.managed import ManagedTensor, manage
from managed_exec.tensors.module import ManagedModule


@pytest.fixture(params=["cpu", "sim:0"])
def device(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The device of the tensors; everything is large enough to be managed."""
    if request.param == "sim:0":
        request.getfixturevalue("simulator")
    configure(MemoryPolicy(min_bytes=1, spill_dir=tmp_path))
    return request.param


def managed(values: torch.Tensor, device: str) -> ManagedTensor:
    return manage(values.clone()).to(device)


def moves(tensor: ManagedTensor):
    """Move *tensor* to every tier; yield after each move, and once before the first."""
    yield
    for tier in ("host", "disk"):
        tensor.spill(tier)
        yield


class TestViews:
    def test_conjugate_and_negative_bits(self, device: str) -> None:
        """https://github.com/safetensors/safetensors/issues/831 , https://github.com/pytorch/pytorch/issues/81690"""
        z = managed(torch.tensor([1 + 2j, 3 - 4j]), device).conj()
        n = z.imag
        assert z.is_conj()
        assert n.is_neg()
        for _ in moves(z):
            assert z.tolist() == [1 - 2j, 3 + 4j]
            assert n.tolist() == [-2.0, 4.0]
            assert z.resolve_conj().tolist() == [1 - 2j, 3 + 4j]
        assert (z * 2).sum().item() == 8 + 4j
        z.add_(1j)
        assert z.tolist() == [1 - 1j, 3 + 5j]
        assert n.tolist() == [-1.0, 5.0]

    def test_strides_and_memory_format(self, device: str) -> None:
        """https://github.com/sgl-project/sglang/pull/32420 , https://github.com/pytorch/pytorch/pull/186396"""
        channels_last = managed(torch.arange(24.0).reshape(1, 2, 3, 4), device).to(memory_format=torch.channels_last)
        transposed = managed(torch.arange(6.0).reshape(2, 3), device).t()
        gap = managed(torch.arange(20.0), device)[3::4]
        for tensor in (channels_last, transposed, gap):
            before = tensor.stride(), tensor.storage_offset(), tensor.tolist()
            for _ in moves(tensor):
                assert (tensor.stride(), tensor.storage_offset(), tensor.tolist()) == before
        assert channels_last.is_contiguous(memory_format=torch.channels_last)
        convolution = torch.nn.Conv2d(2, 2, 1).to(device)
        assert convolution(channels_last).is_contiguous(memory_format=torch.channels_last)

    def test_one_storage_is_counted_and_moved_once(self, device: str) -> None:
        """https://github.com/dask/distributed/issues/4186 , https://github.com/rapidsai/dask-cuda/pull/451"""
        base = managed(torch.zeros(1000), device)
        head, tail = base[:10], base[500:]

        def counted_bytes() -> int:
            from managed_exec.memory.manager import manager

            statistics = manager().statistics()
            return statistics.managed_bytes.get(device, 0) + sum(statistics.tier_bytes.values())

        assert counted_bytes() == 4000
        head.spill("disk")
        assert counted_bytes() == 4000
        base[3] = 7
        assert head[3].item() == 7
        base.spill("disk")
        head[4] = 5
        assert (base[4].item(), base[3].item()) == (5, 7)
        tail += 1
        assert (base[499].item(), base.sum().item()) == (0, 512)
        del base
        assert counted_bytes() == 4000, "a view of ten elements still holds it all"
        assert head.tolist()[3:5] == [7, 5]
        assert tail[-1].item() == 1


class TestTorchResults:
    def test_structured_results(self, device: str) -> None:
        """https://github.com/pytorch/pytorch/issues/47090"""
        x = managed(torch.tensor([[1.0, 5.0], [7.0, 2.0]]), device)
        largest = x.max(1)
        assert isinstance(largest, torch.return_types.max)
        assert (largest.values.tolist(), largest.indices.tolist()) == ([5, 7], [1, 0])
        top = x.topk(1, dim=1)
        assert type(top) is torch.return_types.topk
        assert top.indices.dtype is torch.int64
        unique, counts = torch.unique(managed(torch.tensor([3, 3, 1]), device), return_counts=True)
        assert (unique.tolist(), counts.tolist()) == ([1, 3], [1, 2])
        assert [part.tolist() for part in x.unbind()] == [[1, 5], [7, 2]]

    def test_results_of_managed_are_managed(self, device: str) -> None:
        x = managed(torch.ones(3), device)
        for result in (x + 1, x[1:], x.clone(), x.detach(), torch.stack([x, x]), x.sum()):
            assert type(result) is ManagedTensor

    def test_repr(self, device: str) -> None:
        where = "" if device == "cpu" else f", device='{device}'"
        assert repr(managed(torch.tensor([1.5, 2]), device).spill("disk")) == f"ManagedTensor([1.5000, 2.0000]{where})"
        assert f"{managed(torch.tensor(2.0), device):.1f}" == "2.0"


class TestAutograd:
    def test_leaf_stays_a_leaf(self, device: str) -> None:
        w = manage(torch.ones(3, device=device, requires_grad=True))
        assert w.is_leaf
        assert w.requires_grad
        assert w.grad_fn is None
        (w * 2).sum().backward()
        assert w.grad.tolist() == [2, 2, 2]
        torch.optim.SGD([w], lr=0.5).step()
        assert w.tolist() == [0, 0, 0]

    def test_graph_over_spilled_tensors(self, device: str) -> None:
        x = managed(torch.arange(4.0), device).requires_grad_()
        y = x.exp()
        z = (y * x).sin()
        for tensor in (x, y, z):
            tensor.spill("disk")
        z.sum().backward()
        plain = torch.arange(4.0).requires_grad_()
        (plain.exp() * plain).sin().sum().backward()
        assert torch.allclose(torch.tensor(x.grad.tolist()), plain.grad)

    def test_in_place_change_of_a_saved_tensor_is_noticed_after_a_spill(self, device: str) -> None:
        x = managed(torch.ones(4), device).requires_grad_()
        y = x.exp()
        y.spill("disk")
        y.unspill()
        y.sum().backward(retain_graph=True)  # a spill is no change
        y.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()

    def test_managing_a_result_keeps_its_graph(self, device: str) -> None:
        x = torch.ones(3, device=device, requires_grad=True)
        manage(x * 2).sum().backward()
        assert x.grad.tolist() == [2, 2, 2]

    @pytest.mark.parametrize("count", [2, 3])
    def test_modules_on_cpu_and_device_inputs_in_one_graph(self, simulator: Kind, count: int) -> None:
        """What the predecessor library documents as failing without pins: the gradients are the CPU's."""
        configure(MemoryPolicy(min_bytes=1))
        torch.manual_seed(0)
        layers = [torch.nn.Linear(4, 4) for _ in range(count)]
        x = torch.randn(2, 4)

        def gradients(place: Callable[[torch.Tensor, int], torch.Tensor]) -> list[torch.Tensor]:
            parameters = [
                [torch.nn.Parameter(place(p.detach().clone(), i)) for p in layer.parameters()]
                for i, layer in enumerate(layers)
            ]
            total = torch.zeros(())
            h = place(x.clone(), 1)
            for weight, bias in parameters:
                h = torch.nn.functional.linear(h, weight, bias).tanh()
                total = total + torch.nn.functional.linear(place(x.clone(), 0), weight, bias).sum()
            (h.sum() + total).backward()
            return [torch.tensor(p.grad.tolist()) for pair in parameters for p in pair]

        expected = gradients(lambda t, i: t)
        devices = ["cpu", *(f"sim:{i}" for i in range(count))]
        actual = gradients(lambda t, i: manage(t).to(devices[i]))
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(actual, expected, strict=True))

    def test_numbers_of_the_cpu_in_kernels_that_do_not_take_them(self, simulator: Kind) -> None:
        """Most kernels of a device take a number of the CPU as it is; those that join tensors do not."""
        a, b = manage(torch.tensor(1.0, requires_grad=True)), manage(torch.tensor(2.0, device="sim:1"))
        joined = torch.stack([a, b, a])
        assert joined.device == b.device
        joined.sum().backward()
        assert a.grad.device.type == "cpu"
        assert (joined.tolist(), a.grad.item(), (a + b).device) == ([1, 2, 1], 2.0, b.device)

    @pytest.mark.parametrize("count", [2, 3])
    @pytest.mark.parametrize("kind", [torch.nn.RNN, torch.nn.GRU, torch.nn.LSTM])
    def test_recurrent_modules_on_cpu_and_device_inputs_in_one_graph(
        self, simulator: Kind, kind: type[torch.nn.RNNBase], count: int
    ) -> None:
        """The recurrent variants of the same: each module is used on inputs of other devices than its weights'."""
        configure(MemoryPolicy(min_bytes=1))
        torch.manual_seed(0)
        plain = [kind(4, 4, num_layers=2, batch_first=True) for _ in range(count)]
        x = torch.randn(2, 5, 4)

        def gradients(modules: list[torch.nn.RNNBase], place: Callable[[torch.Tensor, int], torch.Tensor]) -> list:
            total = torch.zeros(())
            h = place(x.clone(), 1)
            for module in modules:
                h = module(h)[0].relu()
                total = total + module(place(x.clone(), 0))[0].square().sum()
            (h.sum() + total).backward()
            return [torch.tensor(p.grad.tolist()) for module in modules for p in module.parameters()]

        spread = [ManagedModule.from_module(copy.deepcopy(module)) for module in plain]
        devices = ["cpu", *(f"sim:{i}" for i in range(count))]
        for i, module in enumerate(spread):
            module.to(devices[i])
        expected = gradients(plain, lambda t, i: t)
        actual = gradients(spread, lambda t, i: manage(t).to(devices[i]))
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(actual, expected, strict=True))
        assert [next(module.parameters()).device for module in spread] == [torch.device(d) for d in devices[:count]]


class TestCopies:
    def test_deepcopy(self, device: str) -> None:
        """https://github.com/pytorch/vision/issues/6478 , https://github.com/geoopt/geoopt/issues/188"""
        a = managed(torch.arange(6.0).reshape(2, 3), device)
        v = a[1]
        a.spill("disk")
        a2, v2 = copy.deepcopy([a, v])
        assert type(a2) is type(a)
        assert a2.tolist() == a.tolist()
        v2.fill_(9)
        assert a2[1].tolist() == [9, 9, 9]
        assert a[1].tolist() == [3, 4, 5]
        p = torch.nn.Parameter(managed(torch.ones(2), device))
        q = copy.deepcopy(p)
        assert isinstance(q, torch.nn.Parameter)
        assert q.is_leaf
        assert q.requires_grad
        layer = torch.nn.Linear(2, 1, device=device)
        layer.weight = torch.nn.Parameter(managed(torch.ones(1, 2), device))
        twin = copy.deepcopy(layer)
        with torch.no_grad():
            twin.weight.add_(1)
        assert layer.weight.tolist() == [[1, 1]]
        assert twin.weight.tolist() == [[2, 2]]
        with pytest.raises(RuntimeError, match="graph leaves"):
            copy.deepcopy(p * 2)
        a.spill("disk")

    def test_files_hold_plain_tensors(self, device: str) -> None:
        a = managed(torch.arange(6.0), device)
        file = io.BytesIO()
        parameter = torch.nn.Parameter(managed(torch.ones(2), device))
        torch.save({"a": a, "view": a[2:4], "p": parameter}, file)
        assert b"managed_exec" not in file.getvalue()
        file.seek(0)
        loaded = torch.load(file)
        assert type(loaded["a"]) is torch.Tensor
        loaded["view"].zero_()
        assert loaded["a"].tolist() == [0, 1, 0, 0, 4, 5]
        assert isinstance(loaded["p"], torch.nn.Parameter)
        assert pickle.loads(pickle.dumps(a)).tolist() == a.tolist()
        a.spill("disk")

    def test_exports_make_it_immovable(self) -> None:
        configure(MemoryPolicy(min_bytes=1))
        exports: list[Callable[[ManagedTensor], object]] = [
            lambda t: t.numpy(),
            torch.from_dlpack,
            lambda t: t.data_ptr(),
            lambda t: t.untyped_storage(),
        ]
        for export in exports:
            tensor = managed(torch.arange(3.0), "cpu").spill("disk")
            exported = export(tensor)
            assert tensor.residency == "device"
            with pytest.raises(NotMovableError):
                tensor.spill("disk")
            del exported

    def test_hold(self, small_device: MemoryManager) -> None:
        tensor = managed(torch.arange(1000.0), "sim:0").spill()
        with tensor.hold() as plain:
            assert type(plain) is torch.Tensor
            plain.add_(1)
            with pytest.raises(NotMovableError, match="pinned"):
                tensor.spill()
            del plain
        assert tensor.spill()[0].item() == 1
