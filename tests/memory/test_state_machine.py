"""Any operations on managed tensors, in four threads, give what plain tensors of the CPU give.

Rules queue commands on *lanes* (see ``lanes``). A barrier has the lanes with commands run them at the same time; then
the invariants are looked at, while nothing runs.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import operations
import pytest
import torch
from cells import Cell
from conftest import allocated_bytes, eventually
from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from lanes import Lane

from managed_exec import sim
from managed_exec.memory.manager import configure
from managed_exec.memory.policy import MemoryPolicy
from managed_exec.memory.record import Record, Residency
from managed_exec.tensors.managed import manage

LANES = 4
DEVICES = ("sim:0", "sim:1", "cpu")
SIM_DEVICES = DEVICES[:2]
BLOCK_BYTES = 512  # what the simulator rounds allocations up to
COMMANDS_AT_ONCE = 12  # queued on all lanes together, before they run

lanes = st.integers(0, LANES - 1)
cells = st.integers(0, 63)
devices = st.sampled_from(DEVICES)
shapes = st.sampled_from([(16, 16), (16, 16), (8, 32), (32, 16), (4, 2, 16), (7,), ()])
dtypes = st.sampled_from([torch.float32, torch.float32, torch.float64, torch.complex64, torch.int64])


@cache
def lane_streams(number: int) -> list[torch.Stream]:
    """Return the streams of a lane, one on each device: made once, for the simulator never frees one."""
    return [torch.Stream(device) for device in SIM_DEVICES]


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randint(-4, 5, (*shape, 2), generator=generator) * 0.5
    return torch.view_as_complex(whole).to(dtype) if dtype.is_complex else whole[..., 0].contiguous().to(dtype)


class ManagedTensors(RuleBasedStateMachine):
    """Four lanes on two small devices."""

    def __init__(self) -> None:
        super().__init__()
        self.lanes: list[Lane] = []
        self.queued: list[list[Callable[[Lane], object]]] = [[] for _ in range(LANES)]
        self.seed = 0

    @initialize(
        capacity=st.sampled_from([64, 96]),
        host_limit=st.sampled_from([16, 64, None]),
        min_bytes=st.sampled_from([1, 1, 700]),
        has_peers=st.booleans(),
    )
    def begin(self, capacity: int, host_limit: int | None, min_bytes: int, has_peers: bool) -> None:
        self.capacity_bytes = capacity * 1024
        self.directory = tempfile.TemporaryDirectory(prefix="state-machine-")
        sim.enable(devices=len(SIM_DEVICES), memory=self.capacity_bytes)
        self.manager = configure(
            MemoryPolicy(
                min_bytes=min_bytes,
                host_limit=None if host_limit is None else host_limit * 1024,
                spill_dir=self.directory.name,
                wait_s=5,
            ),
            [torch.device(device) for device in SIM_DEVICES] if has_peers else [],
        )
        shared = []
        for i, device in enumerate(("sim:0", "sim:0", "sim:1", "cpu")):
            model = values((16, 16), torch.complex64 if i == 1 else torch.float32, i)
            managed = manage(model.clone()).to(device)
            shared.append(Cell(managed, model))
            shared.append(Cell(managed.mT, model.mT))
        self.lanes = [Lane(i, shared, lane_streams(i)) for i in range(LANES)]
        for i, lane in enumerate(self.lanes * 6):  # so that the devices are full from the start
            model = values((16, 16), torch.complex64 if i % 5 == 0 else torch.float32, i)
            self.queue(lane.number, partial(Lane.make, model=model, device=DEVICES[i % 3], requires_grad=i % 4 == 0))
        self.run()

    # -- commands ---------------------------------------------------------------------------------------------------

    def queue(self, lane: int, command: Callable[[Lane], object]) -> None:
        self.queued[lane].append(command)
        if sum(map(len, self.queued)) >= COMMANDS_AT_ONCE:
            self.run()

    def queue_on(
        self, lane: int, number: int, name: str, command: Callable[..., object], *, readable: bool = False
    ) -> None:
        """Queue *command* on one of the lane's cells, of those that it has when the command runs."""

        def run(lane: Lane) -> None:
            cell = lane.pick(number, readable=readable)
            if cell is not None:
                lane.log.append(f"{name}({lane.name(cell)})")
                command(lane, cell)

        self.queue(lane, run)

    def run(self) -> None:
        """Have all lanes run what is queued on them, at once."""
        queued, self.queued = self.queued, [[] for _ in range(LANES)]
        running = [(lane, commands) for lane, commands in zip(self.lanes, queued, strict=True) if commands]
        for lane, commands in running:
            lane.start(partial(_run_all, lane, commands))
        texts = [text for lane, _ in running if (text := lane.join())]
        assert not texts, "\n".join(texts)

    @rule()
    def barrier(self) -> None:
        self.run()

    @rule(lane=lanes, shape=shapes, dtype=dtypes, device=devices, requires_grad=st.booleans())
    def make(self, lane: int, shape: tuple[int, ...], dtype: torch.dtype, device: str, requires_grad: bool) -> None:
        self.seed += 1
        model = values(shape, dtype, self.seed)
        self.queue(lane, lambda lane: lane.make(model, device, requires_grad))

    @rule(lane=lanes, number=cells, i=st.integers(0, len(operations.ONE) - 1))
    def one(self, lane: int, number: int, i: int) -> None:
        self.queue_on(lane, number, f"one {i}", lambda lane, cell: lane.call(operations.ONE[i], [cell]), readable=True)

    @rule(lane=lanes, number=cells, i=st.integers(0, len(operations.VIEW) - 1))
    def view(self, lane: int, number: int, i: int) -> None:
        self.queue_on(
            lane, number, f"view {i}", lambda lane, cell: lane.call(operations.VIEW[i], [cell]), readable=True
        )

    @rule(lane=lanes, number=cells, other=cells, i=st.integers(0, len(operations.TWO) - 1))
    def two(self, lane: int, number: int, other: int, i: int) -> None:
        self.queue_on(
            lane,
            number,
            f"two {i}",
            lambda lane, cell: lane.call(operations.TWO[i], [cell, lane.like(cell, other)]),
            readable=True,
        )

    @rule(lane=lanes, number=cells, i=st.integers(0, len(operations.WRITE) - 1))
    def write(self, lane: int, number: int, i: int) -> None:
        self.queue_on(lane, number, f"write {i}", lambda lane, cell: lane.write(operations.WRITE[i], cell))

    @rule(lane=lanes, number=cells, other=cells, i=st.integers(0, len(operations.WRITE_TWO) - 1))
    def write_two(self, lane: int, number: int, other: int, i: int) -> None:
        self.queue_on(
            lane,
            number,
            f"write two {i}",
            lambda lane, cell: lane.write(operations.WRITE_TWO[i], cell, lane.like(cell, other)),
        )

    @rule(lane=lanes, number=cells, other=cells, i=st.integers(0, len(operations.GIVE_STORAGE) - 1))
    def give_storage(self, lane: int, number: int, other: int, i: int) -> None:
        def command(lane: Lane, cell: Cell) -> None:
            lane.give_storage(operations.GIVE_STORAGE[i], cell, lane.like(cell, other))

        self.queue_on(lane, number, f"give storage {i}", command)

    @rule(lane=lanes, number=cells, shape=st.sampled_from([(20, 20), (2, 3)]))
    def resize(self, lane: int, number: int, shape: tuple[int, ...]) -> None:
        self.queue_on(lane, number, f"resize {shape}", lambda lane, cell: lane.resize(cell, shape))

    @rule(lane=lanes, number=cells, device=devices, non_blocking=st.booleans())
    def to(self, lane: int, number: int, device: str, non_blocking: bool) -> None:
        name = f"to {device} {non_blocking}"
        self.queue_on(lane, number, name, lambda lane, cell: lane.to(cell, device, non_blocking), readable=True)

    @rule(lane=lanes, number=cells, other=cells, non_blocking=st.booleans())
    def copy_between(self, lane: int, number: int, other: int, non_blocking: bool) -> None:
        self.queue_on(
            lane,
            number,
            f"copy {other} {non_blocking}",
            lambda lane, cell: lane.copy_between(cell, lane.like(cell, other), non_blocking),
        )

    @rule(lane=lanes, number=cells, tier=st.sampled_from(["peer", "host", "disk", None]))
    def spill(self, lane: int, number: int, tier: str | None) -> None:
        self.queue_on(lane, number, f"spill {tier}", lambda lane, cell: lane.spill(cell, tier), readable=True)

    @rule(
        lane=lanes,
        number=cells,
        command=st.sampled_from(
            [Lane.unspill, Lane.pin, Lane.unpin, Lane.unpin, Lane.hold, Lane.numpy, Lane.write_array, Lane.drop]
        ),
    )
    def other(self, lane: int, number: int, command: Callable[[Lane, Cell], None]) -> None:
        self.queue_on(lane, number, command.__name__, command)

    @rule(lane=lanes, number=cells)
    def export(self, lane: int, number: int) -> None:
        self.queue_on(lane, number, "export", Lane.export)

    @rule(lane=lanes, number=cells, retain_graph=st.booleans())
    def backward(self, lane: int, number: int, retain_graph: bool) -> None:
        self.queue_on(lane, number, f"backward {retain_graph}", lambda lane, cell: lane.backward(cell, retain_graph))

    @rule(giving=lanes, taking=lanes, number=cells)
    def hand_over(self, giving: int, taking: int, number: int) -> None:
        """Have another lane, and so other streams, go on with a cell and what shares its storage."""
        self.run()
        giver, taker = self.lanes[giving], self.lanes[taking]
        cell = giver.pick(number)
        if cell is None or giving == taking or giver.is_shared(cell) or giver.storage(cell).in_graph:
            return
        moved = [other for other in giver.cells if other.key == cell.key]
        storage = giver.storage(cell)
        for other in moved:
            giver.drop(other)
        taker.storages[cell.key] = storage
        for other in moved:
            taker.add(other)

    @rule(n=st.integers(1, 6), device=st.sampled_from([None, 0, 1]))
    def fail_allocation(self, n: int, device: int | None) -> None:
        sim.faults.fail_allocation(n, device)

    @rule(share=st.sampled_from([0.05, 0.3]), seed=st.integers(0, 9), device=st.sampled_from([None, 0, 1]))
    def fail_share(self, share: float, seed: int, device: int | None) -> None:
        sim.faults.clear()  # shares add up
        sim.faults.fail_share(share, seed, device)

    @rule()
    def clear_faults(self) -> None:
        sim.faults.clear()

    # -- invariants -------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.lanes and not any(self.queued))
    @invariant()
    def books_are_right(self) -> None:
        for i in range(len(SIM_DEVICES)):
            torch.accelerator.synchronize(i)
            assert torch.accelerator.max_memory_allocated(i) <= self.capacity_bytes
        table = self.manager.table
        with table.lock:
            records = table.live()
            assert not table.in_flight_elsewhere()
            assert not table.in_use()
            assert table.waiting == 0
        resident: Counter[str] = Counter()
        in_tiers: Counter[str] = Counter()
        blocks: Counter[str] = Counter()
        for record in records:
            check_record(record)
            if record.residency is Residency.RESIDENT:
                resident[str(record.device)] += record.n_bytes
                blocks[str(record.device)] += -(-record.n_bytes // BLOCK_BYTES) * BLOCK_BYTES
            else:
                in_tiers[record.residency.value] += record.copy.charged_bytes
                if record.residency is Residency.PEER:
                    blocks[str(record.copy.bytes.device)] += -(-record.n_bytes // BLOCK_BYTES) * BLOCK_BYTES
        statistics = self.manager.statistics()
        assert Counter(statistics.tier_bytes) == in_tiers
        assert Counter(statistics.managed_bytes) == resident
        limit = self.manager.policy.host_limit_bytes
        assert limit is None or in_tiers["host"] <= limit
        assert len(list(self.files())) == sum(record.residency is Residency.DISK for record in records)
        for i, device in enumerate(SIM_DEVICES):
            if self.manager.policy.min_bytes == 1:
                assert torch.accelerator.memory_allocated(i) == blocks[device]
            else:
                assert torch.accelerator.memory_allocated(i) >= blocks[device]

    def files(self) -> Iterator[Path]:
        return (path for path in Path(self.directory.name).rglob("*") if path.is_file() and path.name != "in-use")

    def teardown(self) -> None:
        if not self.lanes:
            return
        try:
            self.run()
            sim.faults.clear()
            self.read_everything()
            statistics = self.manager.statistics()
            for tier in ("peer", "host", "disk"):
                event(f"spilled to {tier}: {statistics.spilled_count.get(tier, 0) // 50 * 50} or more times")
            event(f"run again: {statistics.reruns // 50 * 50} or more times")
        finally:
            self.drop_everything()
        assert eventually(lambda: not self.manager.table.live()), "something keeps a managed tensor"
        assert allocated_bytes() == 0
        assert self.manager.statistics().tier_bytes == {"peer": 0, "host": 0, "disk": 0}
        assert not list(self.files())
        self.directory.cleanup()

    def read_everything(self) -> None:
        for lane in self.lanes:
            lane.start(lane.check_all)
        texts = [text for lane in self.lanes if (text := lane.join())]
        assert not texts, "\n".join(texts)

    def drop_everything(self) -> None:
        for lane in self.lanes:
            lane.stop()
        self.lanes, self.queued = [], [[] for _ in range(LANES)]


def _run_all(lane: Lane, commands: list[Callable[[Lane], Any]]) -> None:
    for command in commands:
        command(lane)
    lane.check_touched()


def check_record(record: Record) -> None:
    """Check a record that nothing uses at the moment."""
    assert record.residency in (Residency.RESIDENT, Residency.PEER, Residency.HOST, Residency.DISK)
    assert record.handles() > 0
    is_resident = record.residency is Residency.RESIDENT
    assert (record.copy is None) == is_resident
    assert (record.release_copy is None) == is_resident
    assert record.storage.nbytes() == (record.n_bytes if is_resident else 0)
    assert is_resident or not (record.pins or record.immovable)


QUICK = settings(
    max_examples=50,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.usefixtures("simulator")
def test_any_operations_in_four_threads() -> None:
    run_state_machine_as_test(ManagedTensors, settings=QUICK)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("simulator")
def test_many_operations_in_four_threads() -> None:
    run_state_machine_as_test(ManagedTensors, settings=settings(QUICK, max_examples=600, stateful_step_count=80))
