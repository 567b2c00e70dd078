"""Moves begin anywhere, also where modes and transforms are on: these see nothing of them, and do them no harm.

And anything may come in their middle: the collector and signals run code of the user's.
"""

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
from managed_exec.memory import mover
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


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_other_tensors_are_used_in_the_middle_of_a_move(
    small_device: MemoryManager, monkeypatch: pytest.MonkeyPatch, tier: str
) -> None:
    values = torch.arange(1024.0)
    x, other = manage(values.to("sim")), manage(values.to("sim"))
    other.spill(tier)
    read = []

    def copy_out(*args: Any) -> None:
        if not read:
            read.append((other + 1).tolist())
            other.spill(tier)
        copied(*args)

    copied = mover.copy_out
    monkeypatch.setattr(mover, "copy_out", copy_out)
    with Watching():
        x.spill(tier)
    assert read == [(values + 1).tolist()]
    assert x.residency == other.residency == tier
    assert torch.equal(x.cpu(), values)
    assert torch.equal(other.cpu(), values)


def test_tensor_is_used_in_the_middle_of_its_own_move(
    small_device: MemoryManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the thread that moves it, which would wait for itself."""
    x = manage(torch.arange(1024.0).to("sim"))
    moves = []

    def interrupted(move: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any) -> None:
            for use in (lambda: x + 1, x.unspill, x.spill):
                with pytest.raises(RuntimeError, match="in the middle of its own move"):
                    use()
            moves.append(move.__name__)
            move(*args)

        return call

    for name in ("copy_out", "copy_in"):
        monkeypatch.setattr(mover, name, interrupted(getattr(mover, name)))
    assert x.spill("host").residency == "host"
    assert x.unspill().residency == "device"
    assert moves == ["copy_out", "copy_in"]
    assert x.tolist() == list(range(1024))


def test_strided_nested_tensors_stay_plain(simulator: Kind) -> None:
    """Torch ends the process over those of a class with a dispatch of its own."""

    def task() -> list[float]:
        x = manage(torch.ones(64, 64, device="cuda")).requires_grad_()
        nested = torch.nested.as_nested_tensor([x, x])
        assert type(nested) is torch.Tensor
        nested.to_padded_tensor(0.0).sum().backward()
        return x.grad.unique().tolist()

    with simulator.pool(max_workers=1, memory=MemoryPolicy(min_bytes=1024)) as pool:
        assert pool.submit(task).result(60) == [2]
