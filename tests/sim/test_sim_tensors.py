"""Simulated tensors and what torch looks for in ``torch.sim``: copies, files, names, devices."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

from managed_exec import sim

pytestmark = pytest.mark.usefixtures("devices")


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_pickle_and_deepcopy_keep_device_views_and_gradients() -> None:
    base = torch.arange(6.0, device="sim:1")
    for duplicate in (lambda x: pickle.loads(pickle.dumps(x)), copy.deepcopy):
        view, whole = duplicate((base[2:], base))
        assert view.device == torch.device("sim:1")
        assert whole.untyped_storage().data_ptr() != base.untyped_storage().data_ptr()
        assert view.tolist() == [2, 3, 4, 5]
        storage = duplicate(base.storage())
        assert storage.device == torch.device("sim:1")
        assert storage.tolist() == base.tolist()
    view, whole = copy.deepcopy((base[2:], base))
    view.zero_()
    assert whole.tolist() == [0, 1, 0, 0, 0, 0]
    parameter = torch.nn.Parameter(base.clone())
    assert isinstance(copy.deepcopy(parameter), torch.nn.Parameter)
    conjugate = torch.ones(2, dtype=torch.complex64, device="sim").conj()
    assert torch.equal(copy.deepcopy(conjugate), conjugate)


def saved(value: object) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


def test_save_and_load_with_map_location_both_ways() -> None:
    on_device = torch.arange(3.0, device="sim:1")
    assert torch.load(saved(on_device)).device == torch.device("sim:1")
    assert torch.load(saved(on_device), map_location="cpu").tolist() == [0, 1, 2]
    assert torch.load(saved(on_device), map_location="sim:0").device == torch.device("sim:0")
    assert torch.load(saved(torch.ones(2)), map_location="sim:1").device == torch.device("sim:1")
    assert torch.load(saved(torch.ones(2)), map_location=torch.device("sim")).device == torch.device("sim:0")
    model = torch.nn.Linear(2, 2).to("sim")
    torch.nn.Linear(2, 2).load_state_dict(torch.load(saved(model.state_dict()), map_location="cpu"))


def test_generated_methods() -> None:
    a = torch.ones(2)
    assert a.sim(1).device == torch.device("sim:1")
    assert a.sim().is_sim
    assert not a.is_sim
    assert torch.nn.Linear(1, 1).sim(1).weight.device == torch.device("sim:1")
    assert a.untyped_storage().sim().is_sim
    assert repr(torch.ones(1, device="sim")) == "tensor([1.], device='sim:0')"


def test_accelerator_functions() -> None:
    assert torch.accelerator.current_accelerator() == torch.device("sim")
    assert torch.accelerator.device_count() == 2
    assert torch.accelerator.is_available()
    torch.accelerator.set_device_index(1)
    assert torch.sim.current_device() == 1
    torch.accelerator.set_device_index(0)
    stream = torch.Stream("sim:1")
    with torch.sim.stream(stream):
        assert torch.accelerator.current_stream() == stream
    assert torch.sim.current_device() == 0
    torch.accelerator.synchronize()
    with torch.sim.device_of(torch.ones(1, device="sim:1")):
        assert torch.sim.current_device() == 1
    assert torch.sim.Stream("sim:1").device == torch.device("sim:1")
    assert torch.sim.Event(enable_timing=True).device.type == "sim"
    assert torch.sim.get_device_name(1) == "Simulated accelerator 1"
    assert torch.float32 in torch.accelerator.get_device_capability()["supported_dtypes"]


def test_set_and_storage_methods() -> None:
    a, b = torch.arange(4.0, device="sim"), torch.zeros(1, device="sim")
    b.set_(a.untyped_storage(), 1, (2,), (2,))
    assert b.tolist() == [1, 3]
    assert not b.is_set_to(a)
    assert a.view(4).is_set_to(a)
    b.set_()
    assert b.numel() == 0
    b.data = a
    assert b.tolist() == [0, 1, 2, 3]
    with pytest.raises(RuntimeError, match="storage on different device"):
        torch.ones(1, device="sim:1").set_(a.untyped_storage())
    assert a.resize_(2, 4).shape == (2, 4)


def test_copies_between_types_layouts_and_devices() -> None:
    host = torch.arange(12).reshape(3, 4).t()
    for device in ("sim:0", "sim:1"):
        a = host.to(device, torch.float64, non_blocking=True)
        assert torch.equal(a.cpu(), host.double())
        assert torch.equal(a.to("sim:1", torch.int32).cpu(), host.int())
    target = torch.zeros(4, 3, device="sim")
    target.copy_(torch.ones(3))
    target[:, 1].copy_(torch.arange(4))
    assert target[2].tolist() == [1, 2, 1]
    with pytest.raises(RuntimeError):
        target.copy_(torch.ones(5))
    assert bool(target[2, 1].item() == 2)


def test_checkpoint_and_vmap() -> None:
    from torch.utils.checkpoint import checkpoint

    a = torch.randn(3, device="sim", requires_grad=True)
    checkpoint(lambda t: torch.nn.functional.dropout(t.exp(), 0.5), a, use_reentrant=False).sum().backward()
    assert a.grad is not None
    x = torch.randn(2, 3, device="sim")
    torch.testing.assert_close(torch.func.vmap(torch.sum)(x), x.sum(1))
    torch.testing.assert_close(torch.func.grad(lambda t: t.square().sum())(x), 2 * x)
    sim.faults.clear()
