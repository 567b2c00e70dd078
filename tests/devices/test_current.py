"""What ``"cuda"`` means, in a task and outside."""

from __future__ import annotations

import pytest
import torch
from conftest import Kind

from managed_exec.devices.current import current_device, resolve_cuda, resolve_to

WAIT_S = 30


def test_on_the_cpu() -> None:
    assert current_device() == resolve_cuda() == resolve_cuda("cuda") == torch.device("cpu")
    assert resolve_cuda("cuda:1") == resolve_cuda(1) == torch.device("cuda:1"), "torch says that there is none"
    assert resolve_cuda(torch.device("meta")) == torch.device("meta")


def test_outside_a_task(simulator: Kind) -> None:
    assert current_device() == torch.device("sim:0")
    torch.accelerator.set_device_index(2)
    try:
        assert resolve_cuda() == resolve_cuda(torch.device("cuda")) == torch.device("sim:2")
    finally:
        torch.accelerator.set_device_index(0)
    assert resolve_cuda(3) == resolve_cuda("cuda:3") == torch.device("sim:3")
    assert resolve_cuda("cpu") == torch.device("cpu")


@pytest.mark.parametrize("devices", [["sim:3"], "cpu"])
def test_in_a_task(simulator: Kind, devices: object) -> None:
    with simulator.pool(1, devices=devices) as pool:
        found = pool.submit(current_device).result(WAIT_S)
    assert found == torch.device(devices if devices == "cpu" else "sim:3")
    assert current_device() == torch.device("sim:0")


def test_arguments_of_to(simulator: Kind) -> None:
    here = torch.device("sim:0")
    assert resolve_to(("cuda", torch.half), {"copy": True}) == ((here, torch.half), {"copy": True})
    assert resolve_to((torch.half,), {"device": "cuda"}) == ((torch.half,), {"device": here})
    other = torch.ones(2)
    args, kwargs = resolve_to((other,), {})
    assert args[0] is other
    assert kwargs == {}
