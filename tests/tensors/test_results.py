"""Which tensors a result holds, and that the allocator is told of all of them, whatever their layout."""

from __future__ import annotations

import collections
import dataclasses
import enum
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from conftest import Kind, identity
from torch.utils._python_dispatch import TorchDispatchMode

from managed_exec import ManagedModule, manage, sim
from managed_exec.tensors.results import iter_leaves, iter_tensors, record_stream

WAIT_S = 30


class Pair(NamedTuple):
    left: object
    right: object


@dataclasses.dataclass
class Record:
    value: object
    label: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class SlottedRecord:
    value: object
    inner: object = None


@dataclasses.dataclass(slots=True)
class LateRecord:
    value: object
    late: object = dataclasses.field(init=False)


class Leaf(Record):
    """A dataclass by inheritance."""


class OwnMapping(collections.UserDict):
    pass


class Colour(enum.Enum):
    RED = 1


def module_of(*tensors: torch.Tensor) -> torch.nn.Module:
    inner, outer = torch.nn.Module(), torch.nn.Module()
    inner.weight = torch.nn.Parameter(tensors[0])
    outer.inner = inner
    outer.register_buffer("count", tensors[1])
    outer.register_buffer("scratch", tensors[2], persistent=False)
    return outer


# Each makes a container around three tensors.
CONTAINERS: dict[str, Callable[..., object]] = {
    "list": lambda a, b, c: [a, b, c],
    "tuple": lambda a, b, c: (a, b, c),
    "set": lambda a, b, c: {a, b, c},
    "frozenset": lambda a, b, c: frozenset([a, b, c]),
    "deque": lambda a, b, c: collections.deque([a, b, c]),
    "dict": lambda a, b, c: {"a": a, 2: b, None: c},
    "OrderedDict": lambda a, b, c: collections.OrderedDict(a=a, b=b, c=c),
    "defaultdict": lambda a, b, c: collections.defaultdict(list, {"x": [a, b, c]}),
    "ChainMap": lambda a, b, c: collections.ChainMap({"a": a}, {"b": b, "c": c}),
    "UserDict": lambda a, b, c: OwnMapping(a=a, b=b, c=c),
    "mapping proxy": lambda a, b, c: types.MappingProxyType({"a": a, "b": [b, c]}),
    "named tuple": lambda a, b, c: Pair(a, Pair(b, c)),
    "dataclass": lambda a, b, c: Record([a, b, c]),
    "dataclass by inheritance": lambda a, b, c: Leaf((a, b, c)),
    "dataclass with slots": lambda a, b, c: SlottedRecord(a, SlottedRecord(b, c)),
    "dataclass with an empty slot": lambda a, b, c: LateRecord([a, b, c]),
    "mixture": lambda a, b, c: {"rows": [Record((a,)), {"x": collections.deque([b])}], "last": Pair(None, c)},
    "among other things": lambda a, b, c: [a, "text", b"bytes", 1, 2.0, 3j, None, object(), int, b, Record, Colour, c],
    "twice": lambda a, b, c: [a, b, (a, c), {"again": b}],
    "module": module_of,
    "module in a list": lambda a, b, c: [{"model": module_of(a, b, c)}],
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_every_tensor_once(name: str) -> None:
    tensors = [torch.full((2,), float(i)) for i in range(3)]
    found = list(iter_tensors(CONTAINERS[name](*tensors)))
    # A parameter is another object on the same storage.
    assert sorted(tensor.data_ptr() for tensor in found) == sorted(tensor.data_ptr() for tensor in tensors)


@pytest.mark.parametrize(
    "result",
    [None, 1, "text", b"bytes", [], {}, (), object(), int, Record, range(10**9), Colour.RED, [[[]]]],
    ids=identity,
)
def test_nothing(result: object) -> None:
    assert list(iter_tensors(result)) == []


def test_a_tensor_alone_and_its_subclasses() -> None:
    tensor, parameter = torch.ones(1), torch.nn.Parameter(torch.ones(1))
    assert list(iter_tensors(tensor)) == [tensor]
    assert next(iter_tensors([parameter])) is parameter


def test_results_of_torch() -> None:
    x = torch.tensor([[1.0, 5.0], [7.0, 2.0]])
    assert len(list(iter_tensors(torch.max(x, 1)))) == 2
    assert len(list(iter_tensors(torch.linalg.svd(x)))) == 3
    assert len(list(iter_tensors(torch.nn.utils.rnn.pack_sequence([x])))) >= 2


def test_shared_objects_once_and_views_each() -> None:
    base = torch.arange(6.0)
    view = base[2:]
    shared = [base, view]
    assert {id(tensor) for tensor in iter_tensors([shared, shared, Record(shared)])} == {id(base), id(view)}
    assert len(list(iter_tensors([shared, shared]))) == 2


def test_tied_weights_once() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    assert len(list(iter_tensors([model, model[1]]))) == 1


def test_gradients_too() -> None:
    """They were made in the task's stream as well, and are read and freed by whoever gets the model."""
    model = torch.nn.Linear(2, 1)
    model(torch.ones(1, 2)).sum().backward()
    leaf = torch.ones(2, requires_grad=True)
    product = leaf * 2
    product.sum().backward()
    found = {id(tensor) for tensor in iter_tensors([model, leaf, product])}
    expected = [*model.parameters(), *(p.grad for p in model.parameters()), leaf, leaf.grad, product]
    assert found == {id(tensor) for tensor in expected}


def test_cycles_end() -> None:
    tensor = torch.ones(1)
    result: dict[str, Any] = {"tensor": tensor, "list": [tensor]}
    result["self"] = result
    result["list"].append(result["list"])
    result["record"] = Record(result)
    assert len(list(iter_tensors(result))) == 1


def test_depth_does_not_matter() -> None:
    result: list[Any] = [torch.ones(1)]
    for _ in range(100_000):
        result = [result]
    assert len(list(iter_tensors(result))) == 1
    while result and isinstance(result[0], list):  # or the interpreter recurses to free it
        result = result[0]


def test_lazy_mapping_is_looked_at_value_by_value() -> None:
    """Its values live only while they are looked at, so that the next may get the address of the last."""

    class Lazy(collections.abc.Mapping):
        def __getitem__(self, key: int) -> list[torch.Tensor]:
            return [torch.full((1,), float(key))]

        def __iter__(self) -> Iterator[int]:
            return iter(range(50))

        def __len__(self) -> int:
            return 50

    assert sorted(tensor.item() for tensor in iter_tensors(Lazy())) == list(range(50))


def test_leaves_of_other_kinds() -> None:
    tensor, array = torch.ones(1), memoryview(b"12")
    found = list(iter_leaves([tensor, {"a": (array, "text", 3)}, Record(b"3"), array, object()], (bytes, memoryview)))
    assert len(found) == 3
    assert any(leaf is tensor for leaf in found)
    assert any(leaf is array for leaf in found)
    assert b"3" in [leaf for leaf in found if not isinstance(leaf, torch.Tensor)]
    assert list(iter_leaves([b"3", array], ())) == []


LAYOUTS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int]] = {
    # How to make it, and of how many dense parts it consists.
    "strided": (lambda x: x, 1),
    "view": (lambda x: x.t()[1:], 1),
    "sparse_coo": (lambda x: x.to_sparse(), 2),
    "sparse_csr": (lambda x: x.to_sparse_csr(), 3),
    "sparse_csc": (lambda x: x.to_sparse_csc(), 3),
    "sparse_bsr": (lambda x: x.to_sparse_bsr((2, 2)), 3),
    "sparse_bsc": (lambda x: x.to_sparse_bsc((2, 2)), 3),
    "hybrid": (lambda x: x.to_sparse(1), 2),
    "empty": (lambda x: x.new_zeros(4, 4).to_sparse(), 2),
    "batched": (lambda x: torch.stack([x, x]).to_sparse_csr(), 3),
    "requires grad": (lambda x: x.to_sparse().requires_grad_(), 2),
}


class Recorder(TorchDispatchMode):
    """Notes which tensors the allocator is told of, in place of an allocator."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded: list[torch.Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.record_stream.default:
            self.recorded.append(args[0])
            return None
        return func(*args, **(kwargs or {}))


class TestRecordStream:
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_every_part_is_recorded(self, layout: str) -> None:
        make, n_parts = LAYOUTS[layout]
        tensor = make(torch.eye(4))
        with Recorder() as recorder:
            record_stream(tensor, torch.Stream("cpu"))
        assert all(part.layout == torch.strided for part in recorder.recorded)
        assert len(recorder.recorded) == n_parts

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_returned_from_a_task_on_the_simulator(self, simulator: Kind, layout: str) -> None:
        make, _ = LAYOUTS[layout]
        expected = make(torch.eye(4)).detach().to_dense()
        with simulator.pool(max_workers=1, devices=1) as pool:
            result = pool.submit(lambda: {"value": make(torch.eye(4, device="cuda"))}).result(WAIT_S)
        value = result["value"]
        assert value.device == torch.device("sim", 0)
        assert value.layout == make(torch.eye(4)).layout
        assert torch.equal(value.detach().cpu().to_dense(), expected)

    @pytest.mark.parametrize("make", [torch.ones, lambda n, device: manage(torch.ones(n, device=device))])
    @pytest.mark.parametrize("n", [4, 100_000], ids=["too small to be managed", "managed"])
    def test_is_no_change_in_place(self, simulator: Kind, make: Callable[..., torch.Tensor], n: int) -> None:
        tensor = make(n, device="sim")
        before = tensor._version
        record_stream(tensor, torch.Stream("sim:0"))
        assert tensor._version == before

    def test_result_that_its_graph_has_saved_can_go_backward(self, simulator: Kind) -> None:
        def forward(model: torch.nn.Module) -> torch.Tensor:
            return ManagedModule.from_module(model).cuda()(torch.ones(1, 3, device="cuda"))

        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Sigmoid())  # saves what it returns
        with simulator.pool(max_workers=1) as pool:
            result = pool.submit(forward, model).result(WAIT_S)
            pool.submit(lambda: result.sum().backward()).result(WAIT_S)
        slope = (result * (1 - result)).detach().cpu()[0]
        torch.testing.assert_close(model[0].bias.grad.cpu(), slope, check_device=False)

    def test_block_is_kept_while_the_recorded_stream_reads_it(self, simulator: Kind) -> None:
        """The free waits in the order of the recorded stream, so the block's bytes are still there."""
        reader = torch.Stream("sim:0")
        target = torch.empty(1000).pin_memory()
        value = torch.full((1000,), 7.0, device="sim:0")
        record_stream(value, reader)
        with sim.hold_stream(reader):
            with reader:
                target.copy_(value, non_blocking=True)
            del value
            others = [torch.full((1000,), 9.0, device="sim:0") for _ in range(4)]
        reader.synchronize()
        assert target.eq(7).all()
        del others

    def test_gradients_of_a_model_dropped_while_they_are_read(self, simulator: Kind) -> None:
        def train() -> torch.nn.Module:
            model = torch.nn.Linear(1000, 1, bias=False, device="cuda")
            model(torch.full((1, 1000), 7.0, device="cuda")).sum().backward()
            return model

        target = torch.empty(1000).pin_memory()
        default, reader = torch.accelerator.current_stream(0), torch.Stream("sim:0")
        with simulator.pool(max_workers=1, devices=1) as pool:
            torch.accelerator.set_stream(reader)
            try:
                model = pool.submit(train).result(WAIT_S)
                with sim.hold_stream(reader):
                    target.copy_(model.weight.grad[0], non_blocking=True)
                    model.zero_grad()
                    torch.accelerator.set_stream(default)
                    others = pool.submit(lambda: [torch.full((1000,), 9.0, device="cuda") for _ in range(8)])
                    others.result(WAIT_S)
                reader.synchronize()
            finally:
                torch.accelerator.set_stream(default)
        del model, others
        assert target.eq(7).all()

    def test_results_of_many_tasks_read_from_other_threads(self, simulator: Kind) -> None:
        """Each thread has a stream of its own for the device that it reads from."""

        def read(pool: Any, results: list[float]) -> None:
            torch.accelerator.set_stream(torch.Stream("sim:0"))
            for i in range(20):
                tensor = pool.submit(lambda i=i: [torch.full((1000,), float(i), device="cuda")]).result(WAIT_S)[0]
                target = torch.empty(1000).pin_memory()
                target.copy_(tensor, non_blocking=True)
                del tensor
                torch.accelerator.current_stream().synchronize()
                results.append(target.sub(i).abs().max().item())

        with simulator.pool(max_workers=4, devices=1) as pool:
            results: list[float] = []
            threads = [threading.Thread(target=read, args=(pool, results)) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert results == [0.0] * 60
