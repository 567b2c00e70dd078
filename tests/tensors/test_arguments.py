"""The bytes that a call is given, and where they are."""

from __future__ import annotations

from collections import namedtuple
from functools import partial
from typing import Any

import pytest
import torch
from conftest import Kind
from torch._subclasses.fake_tensor import FakeTensorMode

from managed_exec.memory.manager import MemoryManager
from managed_exec.tensors.arguments import argument_bytes, may_have_tensors
from managed_exec.tensors.managed import manage

Pair = namedtuple("Pair", "first second")
CPU = torch.device("cpu")


def nothing(*args: object, **kwargs: object) -> None:
    return None


def cpu_bytes(fn: Any, *args: Any, **kwargs: Any) -> int:
    found = argument_bytes(fn, args, kwargs)
    assert set(found) <= {CPU}
    return found.get(CPU, 0)


def test_where_tensors_are_found() -> None:
    x = torch.ones(10)  # 40 bytes
    model = torch.nn.Sequential(torch.nn.Linear(2, 3, bias=False), torch.nn.BatchNorm1d(3, affine=False))
    model_bytes = 24 + 12 + 12 + 8
    assert cpu_bytes(nothing, x) == 40
    assert cpu_bytes(nothing, 1, "x", None, x, k=x[:5]) == 60
    assert cpu_bytes(nothing, [x, (x, {"k": [x]})], Pair(x, 1)) == 160
    assert cpu_bytes(nothing, torch.nn.Parameter(x)) == 40
    assert cpu_bytes(nothing, model) == cpu_bytes(model, 1) == cpu_bytes(model.forward) == model_bytes
    assert cpu_bytes(partial(partial(nothing, x), k=x), x) == 120
    assert cpu_bytes(nothing) == cpu_bytes(nothing, object(), {1}, abs) == 0


def test_odd_tensors_are_left_out() -> None:
    sparse = torch.eye(3).to_sparse()
    with FakeTensorMode():
        fake = torch.ones(10)
    assert cpu_bytes(nothing, sparse, fake) == 0
    assert argument_bytes(nothing, (torch.ones(10, device="meta"),), {}) == {torch.device("meta"): 40}


def test_looks_at_a_bounded_number_of_things() -> None:
    x = torch.ones(1)
    circle: list[object] = [x]
    circle.append(circle)
    assert 4 <= cpu_bytes(nothing, circle) <= 4 * 512
    assert 0 < cpu_bytes(nothing, [x] * 10**6) <= 4 * 512
    assert cpu_bytes(nothing, dict.fromkeys(range(10**5), x)) <= 4 * 512


@pytest.mark.parametrize("values", [(), (1, 2.0, "x", None, True, torch.float32), (CPU, b"", range(3), abs, nothing)])
def test_what_cannot_have_tensors(values: tuple[object, ...]) -> None:
    assert not may_have_tensors(nothing, values, {})
    assert not may_have_tensors(abs, (), {str(i): value for i, value in enumerate(values)})
    assert may_have_tensors(nothing, (*values, []), {})
    assert may_have_tensors(partial(nothing), values, {})


def test_devices(simulator: Kind) -> None:
    first, second = torch.ones(10, device="sim:0"), torch.ones(20, device="sim:1")
    assert argument_bytes(nothing, (first, [second], torch.ones(1)), {}) == {
        first.device: 40,
        second.device: 80,
        CPU: 4,
    }


def test_managed_tensors(small_device: MemoryManager) -> None:
    x = manage(torch.ones(1000, device="sim:0"))
    parameter = torch.nn.Parameter(x)
    assert argument_bytes(nothing, (x, x[:10], parameter), {}) == {x.device: 8040}
    del parameter
    x.spill("host")
    assert argument_bytes(nothing, (x,), {}) == {CPU: 4000}, "it comes from main memory, wherever it is wanted"
    assert x.residency == "host", "looking moves nothing"
