"""Moves begin anywhere, also where modes and transforms are on: these see nothing of them, and do them no harm."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from conftest import Kind
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from managed_exec import ManagedTensor, MemoryPolicy, manage, sim
from managed_exec.memory.manager import MemoryManager

ELEMENTS = 2**18
SEEN: list[str] = []


class Watching(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        SEEN.append(str(func))
        return func(*args, **(kwargs or {}))


class Declining(TorchDispatchMode):
    """Leaves managed operands to themselves, and stays on meanwhile, as torch's tracers do."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, ManagedTensor) for kind in types):
            return NotImplemented
        return func(*args, **(kwargs or {}))


class WatchingCalls(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        SEEN.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


def within(mode: Any) -> Callable[[Callable[[], Any]], None]:
    def call(action: Callable[[], Any]) -> None:
        with mode():
            action()

    return call


def transformed(transform: Callable[..., Any]) -> Callable[[Callable[[], Any]], None]:
    def call(action: Callable[[], Any]) -> None:
        def function(x: torch.Tensor) -> torch.Tensor:
            action()
            return x.sum()

        transform(function)(torch.ones(3, 3))

    return call


# Each calls what it is given with something on.
PLACES = {
    "a dispatch mode": within(Watching),
    "a mode that declines": within(Declining),
    "a function mode": within(WatchingCalls),
    "fake tensors": within(FakeTensorMode),
    "inference mode": within(torch.inference_mode),
    "torch.func.grad": transformed(torch.func.grad),
    "torch.func.vmap": transformed(torch.func.vmap),
    "torch.func.functionalize": transformed(torch.func.functionalize),
    "make_fx": transformed(make_fx),
}


@pytest.fixture(autouse=True)
def forget() -> None:
    SEEN.clear()


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("place", PLACES)
def test_there_and_back(small_device: MemoryManager, place: str, tier: str) -> None:
    values = torch.arange(1024.0)
    x, y = manage(values.to("sim")), manage(values.to("sim"))
    y.spill(tier)

    def move() -> None:
        x.spill(tier)
        y.unspill()
        y.spill(tier)

    PLACES[place](move)
    assert x.residency == y.residency == tier
    PLACES[place](x.unspill)
    PLACES[place](y.unspill)
    assert x.residency == y.residency == "device"
    assert torch.equal(x.cpu(), values)
    assert torch.equal(y.cpu(), values)
    assert not [name for name in SEEN if "copy" in name or "set_" in name or "empty" in name]


@pytest.mark.parametrize("place", ["a dispatch mode", "a function mode", "inference mode", "torch.func.grad"])
def test_room_is_made(simulator: Kind, place: str) -> None:
    sim.enable(devices=1, memory="4MiB")
    sums = []

    def task() -> None:
        held = [torch.full((ELEMENTS,), float(i), device="cuda") for i in range(3)]
        PLACES[place](lambda: sums.append(torch.ones(ELEMENTS, device="cuda") + torch.ones(ELEMENTS, device="cuda")))
        assert sums.pop().sum().item() == 2 * ELEMENTS
        assert [tensor.mean().item() for tensor in held] == [0, 1, 2]

    with simulator.pool(max_workers=1, memory=MemoryPolicy(min_bytes=1024, spill=("host",))) as pool:
        pool.submit(task).result(60)
        assert pool.statistics().memory.spilled_count["host"] > 0
    assert not [name for name in SEEN if "copy" in name or "set_" in name]


def test_what_a_mode_leaves_to_it_is_there(small_device: MemoryManager) -> None:
    """Below a mode that has declined nothing is adopted, so what is detached there must not be away."""
    x = manage(torch.arange(1024.0).to("sim"))
    x.spill()
    with Declining():
        detached = x.detach()
    assert type(detached) is torch.Tensor
    assert (detached + 0).tolist() == x.tolist()
    del detached
    x.spill()
    traced = make_fx(lambda y: x.detach() + y)(torch.ones(1024, device="sim"))
    assert traced(torch.zeros(1024, device="sim")).tolist() == x.tolist()
