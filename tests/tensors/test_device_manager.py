"""``device_manager``: devices, room, and sending of structures."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import NamedTuple

import pytest
import torch
from conftest import Kind, identity, run_python

from managed_exec import GPUPoolExecutor, ManagedModule, ManagedTensor, MemoryPolicy, device_manager, manage, sim
from managed_exec.errors import DeviceMemoryError
from managed_exec.memory.manager import configure

WAIT_S = 30


@pytest.fixture(autouse=True)
def everything() -> None:
    configure(MemoryPolicy(min_bytes=1))


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


def test_devices(simulator: Kind) -> None:
    assert device_manager.devices == tuple(torch.device("sim", i) for i in range(4))
    with GPUPoolExecutor(1, devices="cpu") as pool:
        assert pool.submit(lambda: device_manager.devices).result(WAIT_S) == (torch.device("cpu"),)


def test_on_the_cpu() -> None:
    assert device_manager.devices == (torch.device("cpu"),)
    assert device_manager.find_device(1000, disperse=True) == torch.device("cpu")
    x = torch.ones(3)
    sent = device_manager.send([x])
    assert type(sent[0]) is ManagedTensor
    assert sent[0].tolist() == [1, 1, 1]


def test_find_device(simulator: Kind) -> None:
    assert device_manager.find_device(1000) == torch.device("sim:0")
    with GPUPoolExecutor(1, devices=["sim:2"]) as pool:
        assert pool.submit(device_manager.find_device, 1000).result(WAIT_S) == torch.device("sim:2")
    assert {device_manager.find_device(1000, disperse=True).index for _ in range(4)} == {0, 1, 2, 3}
    with pytest.raises(DeviceMemoryError, match=r"no device for 64\.0 MiB"):
        device_manager.find_device(2**26 + 1)
    with pytest.raises(ValueError, match="nbytes: expected 0 or more bytes, got -1"):
        device_manager.find_device(-1)
    for wrong in ("1GiB", 1.5, True):
        with pytest.raises(TypeError, match="nbytes: expected a number of bytes"):
            device_manager.find_device(wrong)


@pytest.mark.parametrize("device", [None, 1, "cuda:1", "sim:1", torch.device("cuda:1")], ids=identity)
def test_structures_keep_their_form(simulator: Kind, device: object) -> None:
    x, y = torch.arange(3.0), torch.arange(4)
    groups = defaultdict(list, a=[x, "text", None])
    value = {"pair": Pair(x, y), "tuple": (y, 2), "groups": groups, "ordered": OrderedDict(z=x)}
    sent = device_manager.send(value, device)
    where = torch.device("sim:0" if device is None else "sim:1")
    tensors = [sent["pair"].left, sent["pair"].right, sent["tuple"][0], sent["groups"]["a"][0], sent["ordered"]["z"]]
    assert all(type(t) is ManagedTensor and t.device == where for t in tensors)
    assert [t.tolist() for t in tensors] == [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2], [0, 1, 2]]
    assert sent["groups"]["a"][1:] == ["text", None]
    assert [type(sent[k]) for k in value] == [type(value[k]) for k in value]
    assert sent["groups"]["new"] == []
    assert tensors[0] is tensors[3] is tensors[4], "sent once"
    assert value["groups"]["a"][0] is x, "what was given is as it was"
    tensors[0].spill("disk")
    assert tensors[0].tolist() == [0, 1, 2]


def test_gradients_flow_back(simulator: Kind) -> None:
    plain, managed = torch.ones(3, requires_grad=True), manage(torch.ones(3)).requires_grad_()
    a, b, c = device_manager.send((plain, managed, plain * 2), "sim:1")
    (a + 2 * b + 3 * c).sum().backward()
    assert plain.grad.tolist() == [7, 7, 7]
    assert managed.grad.tolist() == [2, 2, 2]
    assert managed.grad.device.type == "cpu"


def test_modules_move_in_place(simulator: Kind) -> None:
    layer = torch.nn.Linear(3, 2)
    expected = layer(torch.ones(3)).detach()
    sent = device_manager.send({"module": layer, "x": torch.ones(3)}, "sim:2")
    assert sent["module"] is layer
    assert isinstance(layer, ManagedModule)
    assert layer.weight.device == torch.device("sim:2")
    assert torch.equal(layer(sent["x"]).cpu(), expected)


def test_whole_goes_where_it_fits(simulator: Kind) -> None:
    sim.enable(devices=2, memory="1MiB")
    sim.set_capacity(1, "3MiB")
    sent = device_manager.send([torch.full((100_000,), float(i)) for i in range(4)])
    assert {t.device.index for t in sent} == {1}
    assert [t.mean().item() for t in sent] == [0, 1, 2, 3]
    with pytest.raises(DeviceMemoryError, match=r"no device for 3\.8 MiB"):
        device_manager.send([torch.zeros(100_000) for _ in range(10)])


def test_room_is_made(simulator: Kind) -> None:
    sim.enable(devices=1, memory="1MiB")
    sent = [device_manager.send(torch.full((150_000,), float(i))) for i in range(6)]
    assert [t[7].item() for t in sent] == [0, 1, 2, 3, 4, 5]


def test_import_makes_nothing() -> None:
    code = (
        "import managed_exec\n"
        "from managed_exec.memory.manager import _Process\n"
        "from managed_exec.memory.room import rooms\n"
        "assert _Process.manager is None and rooms.cache_info().currsize == 0\n"
        "assert repr(managed_exec.device_manager) == 'device_manager'\n"
    )
    run = run_python(code)
    assert (run.returncode, run.stderr) == (0, "")
