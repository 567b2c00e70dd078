"""Values that go from one process to another, packed and unpacked in this one."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import os
import sys
import threading
from collections import OrderedDict, namedtuple
from typing import Any

import cloudpickle
import pytest
import torch
from conftest import Kind, identity
from hypothesis import given, settings
from hypothesis import strategies as st

from managed_exec import ManagedTensor, gpu_task, manage
from managed_exec.memory.manager import MemoryManager
from managed_exec.options import options_of
from managed_exec.tensors.parcel import check_packs, pack, unpack

Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Box:
    content: Any


class Marked(torch.Tensor):
    mark: str


LOCK = threading.Lock()  # a function that is pickled by value, with what it uses of its module, cannot be
CALLS = []


@gpu_task
def counted(x: int) -> int:
    with LOCK:
        CALLS.append(x)
        return len(CALLS)


@gpu_task
@torch.no_grad()
@functools.lru_cache
def cached(x: int) -> int:
    with LOCK:
        return x + int(torch.is_grad_enabled())


class Holder:
    @gpu_task
    def method(self) -> str:
        with LOCK:
            return "method"

    @gpu_task
    @staticmethod
    def static() -> str:
        with LOCK:
            return "static"

    @gpu_task
    @classmethod
    def of_class(cls) -> str:
        with LOCK:
            return "class"


class Endless:
    @property
    def __wrapped__(self) -> Endless:
        return Endless()


def hidden() -> bool:
    return LOCK.locked()


behind_endless, hidden = hidden, Endless()  # type: ignore[assignment]


def trip(value: Any, kept: int = 0, **options: Any) -> Any:
    """Return what arrives of *value*; check that no more descriptors are left than are to be *kept*."""
    before = len(os.listdir("/proc/self/fd"))
    parcel = pack(value, **options)
    sent = [os.dup(descriptor) for descriptor in parcel.descriptors]  # as sending them does
    message = parcel.message
    parcel.close()
    if not options:
        assert len(message) < 12_000, "what is long goes beside the message"

    def receive(count: int) -> list[int]:
        assert count == len(sent)
        return sent

    arrived = unpack(message, receive)
    assert len(os.listdir("/proc/self/fd")) <= before + kept
    return arrived


SIZES = [0, 1, 5, 3000, 100_000]


class TestTensors:
    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex128, torch.int64])
    def test_values(self, size: int, dtype: torch.dtype) -> None:
        x = (torch.arange(size) % 2).to(dtype)
        y = trip(x)
        assert torch.equal(x, y)
        assert y.dtype == dtype
        y.fill_(1)  # and can be written to,
        assert torch.equal(x, (torch.arange(size) % 2).to(dtype))  # which the other does not see

    def test_views_share_what_they_shared(self) -> None:
        x = torch.arange(20_000.0).reshape(100, 200)
        arrived, row, turned, as_int = trip([x, x[3], x.T, x.view(torch.int32)])
        assert torch.equal(turned, x.T)
        assert turned.stride() == (1, 200)
        row.zero_()
        assert not arrived[3].any()
        assert not as_int[3].any()
        assert arrived[4].equal(x[4])

    def test_only_what_is_seen_is_sent(self) -> None:
        x = torch.randn(1000, 1000)
        fifth, seventh = trip((x[5], x[7]))
        assert fifth.untyped_storage().nbytes() == 3 * 4000
        assert torch.equal(fifth, x[5])
        assert torch.equal(seventh, x[7])

    @pytest.mark.parametrize(
        "make", [lambda z: z.conj(), lambda z: z.conj().imag, lambda z: z[1:].conj().T], ids=identity
    )
    def test_lazy_bits(self, make: Any) -> None:
        z = make(torch.randn(4, 4, dtype=torch.complex64))
        assert torch.equal(trip(z).resolve_conj().resolve_neg(), z.resolve_conj().resolve_neg())

    def test_leaves_stay_leaves(self) -> None:
        x = torch.ones(3, requires_grad=True)
        linear = trip(torch.nn.Linear(3, 2))
        assert trip(x).is_leaf
        assert trip(x).requires_grad
        assert isinstance(linear.weight, torch.nn.Parameter)
        linear(x).sum().backward()
        assert linear.weight.grad is not None

    def test_graphs_are_refused(self) -> None:
        with pytest.raises(TypeError, match=r"shape \(3,\) is part of an autograd graph .*; detach\(\) it"):
            pack([torch.ones(3, requires_grad=True) * 2])

    def test_other_kinds(self) -> None:
        sparse = torch.eye(5).to_sparse()
        assert torch.equal(trip(sparse).to_dense(), sparse.to_dense())
        assert trip(torch.empty(3, device="meta")).is_meta
        with torch.inference_mode():
            frozen = torch.ones(3)
        assert trip(frozen).tolist() == [1, 1, 1]
        marked = torch.randn(3).as_subclass(Marked)
        marked.mark = "yes"
        assert (type(trip(marked)), trip(marked).mark) == (Marked, "yes")
        assert trip(torch.randn(30_000).untyped_storage()).nbytes() == 120_000

    def test_shared_memory_stays_shared(self) -> None:
        x = torch.zeros(5).share_memory_()
        y, last = trip((x, x[4:]), kept=1)  # as torch does it
        y.add_(1)
        assert x.tolist() == [1] * 5
        last.zero_()
        assert x[4] == 0
        assert trip(x, in_message=True).data_ptr() != x.data_ptr()

    def test_many(self) -> None:
        tensors = [torch.full((17_000,), float(i)) for i in range(700)]  # 68 KB each
        for i, tensor in enumerate(trip(tensors)):
            assert tensor[0] == tensor[-1] == i

    def test_numpy_arrays(self) -> None:
        numpy = pytest.importorskip("numpy")
        x = numpy.arange(50_000.0)
        y, small = trip((x, numpy.ones(3)))
        assert (x == y).all()
        y += small[0]
        assert y[0] == 1 + x[0]


class TestDevices:
    def test_plain(self, simulator: Kind) -> None:
        x = torch.randn(200, 300).to("sim:2")
        y, column, linear, sparse = trip(
            (x, x[:, 5], torch.nn.Linear(300, 9).to("sim:1"), torch.eye(3).to_sparse().to("sim"))
        )
        assert {t.device.type for t in (y, column, linear.weight, sparse)} == {"cpu"}
        assert torch.equal(y, x.cpu())
        column.zero_()
        assert not y[:, 5].any()

    @pytest.mark.parametrize("tier", [None, "host", "disk"])
    def test_managed(self, small_device: MemoryManager, tier: str | None) -> None:
        x = torch.randn(100, 100)
        managed = manage(x.to("sim:0"))
        seventh = managed[7]
        if tier:
            managed.spill(tier)
        where = managed.residency
        y, row = trip((managed, seventh))
        assert managed.residency == where, "it is read where it is"
        assert type(y) is torch.Tensor
        assert torch.equal(x, y)
        row.zero_()
        assert not y[7].any()
        managed.spill("host")  # and can be moved afterwards

    def test_managed_parameter(self, small_device: MemoryManager) -> None:
        parameter = torch.nn.Parameter(manage(torch.randn(50, 50).to("sim:0")))
        assert isinstance(parameter, ManagedTensor)
        arrived = trip(parameter)
        assert isinstance(arrived, torch.nn.Parameter)
        assert arrived.requires_grad
        assert torch.equal(arrived, parameter.detach().cpu())


class TestObjects:
    def test_containers_keep_their_type(self) -> None:
        x = torch.ones(2)
        value = [Pair(x, {1, 2}), Box(OrderedDict(a=(x,))), torch.ones(2, 2).max(dim=0)]
        pair, box, found = trip(value)
        assert (type(pair), type(box), type(box.content), type(found)) == (Pair, Box, OrderedDict, type(value[2]))
        assert pair.left is box.content["a"][0]

    def test_code(self) -> None:
        offset = 3

        class Local:
            def __call__(self, x: int) -> int:
                return x + offset

        assert trip(lambda x: x + offset)(1) == 4
        assert trip(Local())(1) == 4
        assert isinstance(trip(Local()), Local), "a class that is sent and comes back is the same one"
        assert trip(lambda: 0).__code__.co_filename == __file__

    def test_function_whose_name_a_wrapper_has(self) -> None:
        variant = counted.options(priority=1)
        assert trip([variant])[0](5) == len(CALLS) > 0, "the module is this one and no copy"
        assert options_of(trip(variant)).priority == 1
        assert trip(counted) is counted
        assert trip(inspect.unwrap(counted)) is inspect.unwrap(counted)
        assert trip(cached.options(priority=1))(5) == 5
        inner = inspect.unwrap(cached, stop=lambda f: hasattr(f, "cache_info"))
        assert trip(inner) is inner
        assert trip(Holder.method.options(priority=1))(Holder()) == "method"
        assert trip(Holder.static.options(priority=1))() == "static"
        assert trip(Holder.of_class.__func__.options(priority=1))(Holder) == "class"  # type: ignore[attr-defined]

    def test_function_whose_name_has_another_wrapper_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As in a process that has not put a wrapper there as it ran."""

        def sent(value: Any) -> bytes:
            return pack(value, in_message=True).message

        def traced(fn: Any) -> Any:
            @functools.wraps(fn)
            def trace(*args: Any) -> Any:
                return fn(*args)

            return trace

        module, marked = sys.modules[__name__], counted
        inner = inspect.unwrap(marked)
        with monkeypatch.context() as patch:
            patch.setattr(module, "counted", traced(traced(marked)))
            messages = [sent(marked), sent(inner), sent(counted.__wrapped__)]
        assert [unpack(message, lambda count: []) for message in messages[:2]] == [marked, inner]
        with pytest.raises(AttributeError, match="no wrapper of the function that was sent"):
            unpack(messages[2], lambda count: [])
        made: dict[str, Any] = {}
        exec("def of_no_module(x): return x + 1", made)
        assert trip(made["of_no_module"])(1) == 2

    def test_function_that_goes_by_value(self) -> None:
        for act in (pack, check_packs):
            with pytest.raises(TypeError, match=r"cannot pickle '_thread\.lock' object"):
                act(behind_endless)
        module = sys.modules[__name__]
        cloudpickle.register_pickle_by_value(module)
        try:
            with pytest.raises(TypeError, match=r"cannot pickle '_thread\.lock' object"):
                pack(counted)
        finally:
            cloudpickle.unregister_pickle_by_value(module)

    def test_long_pickles(self) -> None:
        value = {i: str(i) * 10 for i in range(5000)}
        assert trip(value) == value

    def test_files(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with open(__file__) as file, pytest.raises(TypeError, match=r"an open file \(.*test_parcel.py.*\) goes to no"):
            pack([file])
        monkeypatch.setattr(sys, "stderr", sys.__stderr__)
        assert trip(sys.stderr) is sys.stderr

    def test_what_cannot_be_pickled(self) -> None:
        before = len(os.listdir("/proc/self/fd"))
        for act in (pack, check_packs):
            with pytest.raises(TypeError, match=r"cannot pickle '_thread\.lock' object"):
                act([torch.ones(100_000), threading.Lock()])
        assert len(os.listdir("/proc/self/fd")) == before


@settings(max_examples=60, deadline=None)
@given(
    views=st.lists(
        st.tuples(
            st.integers(0, 2),
            st.integers(0, 400),
            st.lists(st.tuples(st.integers(0, 4), st.integers(0, 25)), max_size=3),
        ),
        max_size=8,
    )
)
def test_any_views_of_some_storages(views: list[tuple[int, int, list[tuple[int, int]]]]) -> None:
    """Same values, same strides, and the same ones share memory as in a deep copy."""
    bases = [torch.randn(1000), torch.arange(700), torch.randn(40_000, dtype=torch.float64)]
    sent = [
        bases[base].as_strided([size for size, _ in dims], [stride for _, stride in dims], offset)
        for base, offset, dims in views
    ]
    expected, arrived = copy.deepcopy(sent), trip(sent)
    for tensors in (expected, arrived):
        for i, tensor in enumerate(tensors):
            if tensor.numel():
                tensor.view(-1)[:1].fill_(i) if tensor.is_contiguous() else None
    for a, b in zip(expected, arrived, strict=True):
        assert torch.equal(a, b)
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
    assert [t.stride() for t in sent] == [t.stride() for t in arrived]
