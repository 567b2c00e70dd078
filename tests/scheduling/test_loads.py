"""The bookings of a pool, against a model, against placements of any kind, and from many threads."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
import torch
from conftest import identity
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from managed_exec.devices import DeviceMemory
from managed_exec.errors import PlacementError
from managed_exec.scheduling.loads import DeviceLoads
from managed_exec.scheduling.placement import PLACEMENTS, DeviceSnapshot, Placement, PlacementRequest, least_loaded

WAIT_S = 30


def make_loads(n_devices: int = 4, tasks_per_device: int | None = None, placement: Placement = least_loaded):
    devices = [SimpleNamespace(torch_device=torch.device("cuda", i)) for i in range(n_devices)]
    return DeviceLoads(devices, tasks_per_device, placement)  # type: ignore[arg-type]


def running(loads: DeviceLoads) -> list[int]:
    return [snapshot.running for snapshot in loads.snapshots()]


def own_least_loaded(devices: Sequence[DeviceSnapshot], request: PlacementRequest) -> int:
    """Choose as the package's own placement does, but be a stranger to it."""
    return least_loaded(devices, request)


def in_threads(*targets: Callable[[], object]) -> None:
    """Run *targets* each in a thread; raise what one of them raised."""
    errors: list[BaseException] = []

    def guarded(target: Callable[[], object]) -> None:
        try:
            target()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(target,)) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


memories = st.builds(
    lambda free, allocated: DeviceMemory(free, 1000, allocated), st.integers(0, 1000), st.integers(0, 1000)
)
utilizations = st.none() | st.floats(0, 1)


class TestBooking:
    def test_one_device_takes_all(self) -> None:
        loads = make_loads(1)
        assert [loads.book(None) for _ in range(3)] == [0, 0, 0]
        loads.give_back(0)
        assert running(loads) == [2]
        assert loads.running == 2

    def test_snapshots_name_the_devices_in_order(self) -> None:
        snapshots = make_loads(3).snapshots()
        assert [snapshot.position for snapshot in snapshots] == [0, 1, 2]
        assert [str(snapshot.device) for snapshot in snapshots] == ["cuda:0", "cuda:1", "cuda:2"]
        assert [snapshot.free_bytes for snapshot in snapshots] == [None] * 3

    def test_snapshots_do_not_change_afterwards(self) -> None:
        loads = make_loads(2)
        before = loads.snapshots()
        loads.book(None)
        assert [snapshot.running for snapshot in before] == [0, 0]

    @given(
        st.lists(st.tuples(st.integers(0, 3), memories, utilizations) | st.none(), max_size=30),
        st.lists(st.none() | st.integers(0, 3), min_size=8, max_size=8),
    )
    def test_eight_at_once_spread_two_each(self, between: list, last_positions: list[int | None]) -> None:
        """Whatever the samples say meanwhile, for they lag."""
        loads = make_loads(4)
        booked = []
        for i, last_position in enumerate(last_positions):
            for sample in between[i::8]:
                if sample is not None:
                    loads.record_sample(*sample)
            booked.append(loads.book(last_position))
        assert sorted(booked) == [0, 0, 1, 1, 2, 2, 3, 3]

    @pytest.mark.parametrize("placement", [*PLACEMENTS.values(), own_least_loaded])
    def test_full_devices_are_not_offered(self, placement: Placement) -> None:
        loads = make_loads(3, tasks_per_device=2, placement=placement)
        assert Counter(loads.book(0) for _ in range(6)) == {0: 2, 1: 2, 2: 2}
        loads.give_back(1)
        assert loads.book(0) == 1

    def test_sequence_counts_the_tasks_placed(self) -> None:
        seen = []

        def placement(devices: Sequence[DeviceSnapshot], request: PlacementRequest) -> int:
            seen.append(request)
            return 0

        loads = make_loads(2, placement=placement)
        for last_position in (None, 0, 1):
            loads.give_back(loads.book(last_position))
        assert [request[:2] for request in seen] == [(0, None), (1, 0), (2, 1)]

    def test_used_devices(self) -> None:
        loads = make_loads(3)
        loads.give_back(loads.book(2))
        assert [loads.was_used(position) for position in range(3)] == [False, False, True]


class TestOnBusy:
    """The sampler is woken when the first of the running tasks starts, and not by the others."""

    @pytest.mark.parametrize("placement", [least_loaded, own_least_loaded])
    def test_first_task_alone(self, placement: Placement) -> None:
        loads = make_loads(2, placement=placement)
        calls: list[int] = []
        loads.on_busy = lambda: calls.append(loads.running)  # takes the lock, which is not held
        first, second = loads.book(None), loads.book(None)
        assert calls == [1]
        loads.give_back(first)
        loads.book(None)
        assert calls == [1]
        loads.give_back(second)
        loads.give_back(first)
        loads.book(None)
        assert calls == [1, 1]

    @pytest.mark.parametrize("placement", [least_loaded, own_least_loaded])
    def test_two_that_start_at_once(self, placement: Placement) -> None:
        """One of them is the first, also if the other has booked before it looks."""
        loads = make_loads(2, placement=placement)
        calls: list[str] = []
        loads.on_busy = lambda: calls.append("busy")

        class OvertakenOnce:
            """The lock; when the first booking releases it, the second is made before the first goes on."""

            def __init__(self) -> None:
                self.lock = threading.Lock()
                self.overtaken = False

            def __enter__(self) -> None:
                self.lock.acquire()

            def __exit__(self, *_: object) -> None:
                booked = sum(loads._running)
                self.lock.release()
                if booked == 1 and not self.overtaken:
                    self.overtaken = True
                    loads.book(None)

        loads._lock = loads._section = OvertakenOnce()  # type: ignore[assignment]
        loads.book(None)
        assert loads.running == 2
        assert calls


class BookingMachine(RuleBasedStateMachine):
    """Bookings, returns and samples in any order, against a list of counts."""

    @initialize(
        n_devices=st.integers(2, 4),
        tasks_per_device=st.none() | st.integers(1, 3),
        placement=st.sampled_from([*PLACEMENTS.values(), own_least_loaded]),
    )
    def start(self, n_devices: int, tasks_per_device: int | None, placement: Placement) -> None:
        self.loads = make_loads(n_devices, tasks_per_device, placement)
        self.bound = tasks_per_device
        self.counts = [0] * n_devices
        self.used: set[int] = set()
        self.held: list[int] = []
        self.samples: dict[int, tuple[DeviceMemory, float | None]] = {}

    @precondition(lambda self: self.bound is None or len(self.held) < self.bound * len(self.counts))
    @rule(last_position=st.none() | st.integers(0, 1))
    def book(self, last_position: int | None) -> None:
        position = self.loads.book(last_position)
        self.counts[position] += 1
        self.used.add(position)
        self.held.append(position)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        position = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.loads.give_back(position)
        self.counts[position] -= 1

    @rule(position=st.integers(0, 1), memory=memories, utilization=utilizations)
    def sample(self, position: int, memory: DeviceMemory, utilization: float | None) -> None:
        self.loads.record_sample(position, memory, utilization)
        self.samples[position] = memory, utilization

    @invariant()
    def as_the_model(self) -> None:
        snapshots = self.loads.snapshots()
        assert [snapshot.running for snapshot in snapshots] == self.counts
        assert self.loads.running == len(self.held)
        assert {i for i in range(len(self.counts)) if self.loads.was_used(i)} == self.used
        assert all(self.bound is None or count <= self.bound for count in self.counts)
        for position, (memory, utilization) in self.samples.items():
            got = snapshots[position]
            assert got[3:6] == (memory.free_bytes, memory.total_bytes, utilization)


BookingMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestBookings = BookingMachine.TestCase


class Unreasonable:
    def __eq__(self, other: object) -> bool:
        raise ArithmeticError("not comparable")

    __hash__ = None  # type: ignore[assignment]


NONSENSE = [None, True, False, 0.0, 1.0, "0", b"0", 2, -1, [0], (0,), float("nan"), Unreasonable(), torch.device("cpu")]


class TestUserPlacement:
    @pytest.mark.parametrize("answer", NONSENSE, ids=lambda answer: type(answer).__name__ + str(answer)[:4])
    def test_nonsense(self, answer: object) -> None:
        answers: list[object] = [answer, 1]
        loads = make_loads(2, placement=lambda devices, request: answers.pop(0))  # type: ignore[arg-type,return-value]
        with pytest.raises(PlacementError, match=r"returned .*; expected the position of .* one of \[0, 1\]"):
            loads.book(None)
        assert running(loads) == [0, 0]
        assert loads.book(None) == 1

    def test_a_device_that_is_full(self) -> None:
        loads = make_loads(2, tasks_per_device=1, placement=lambda devices, request: 0)
        assert loads.book(None) == 0
        with pytest.raises(PlacementError, match=r"returned 0; .* one of \[1\]"):
            loads.book(None)
        assert running(loads) == [1, 0]

    @pytest.mark.parametrize("error", [KeyError("k"), StopIteration(), AssertionError()], ids=identity)
    def test_raising(self, error: Exception) -> None:
        def placement(devices: Sequence[DeviceSnapshot], request: PlacementRequest) -> int:
            raise error

        loads = make_loads(2, placement=placement)
        with pytest.raises(PlacementError, match="raised") as caught:
            loads.book(None)
        assert caught.value.__cause__ is error
        assert running(loads) == [0, 0]

    def test_integers_of_other_libraries(self) -> None:
        """``argmin`` of whatever library is a natural way to write a placement."""
        numpy = pytest.importorskip("numpy")

        def placement(devices: Sequence[DeviceSnapshot], request: PlacementRequest) -> int:
            return numpy.argmin([device.running for device in devices])

        loads = make_loads(3, placement=placement)
        assert sorted(loads.book(None) for _ in range(6)) == [0, 0, 1, 1, 2, 2]
        assert [loads.was_used(i) for i in range(3)] == [True] * 3

    def test_runs_without_the_lock(self) -> None:
        def placement(devices: Sequence[DeviceSnapshot], request: PlacementRequest) -> int:
            seen: list[list[int]] = []
            in_threads(lambda: seen.append(running(loads)), lambda: loads.record_sample(0, DeviceMemory(1, 2, 1), None))
            assert loads.snapshots()[0].total_bytes == 2
            assert seen == [[device.running for device in devices]]
            return 1

        loads = make_loads(2, placement=placement)
        assert loads.book(None) == 1

    def test_two_never_choose_by_the_same_state(self) -> None:
        """Both look at once, and both would take the first device: the one that books later is asked again."""
        together = threading.Barrier(2)
        asked: list[PlacementRequest] = []

        def placement(devices: Sequence[DeviceSnapshot], request: PlacementRequest) -> int:
            asked.append(request)
            if request.sequence == 0:
                together.wait(WAIT_S)
            return least_loaded(devices, request)

        loads = make_loads(2, placement=placement)
        in_threads(lambda: loads.book(None), lambda: loads.book(None))
        assert running(loads) == [1, 1]
        assert [request.sequence for request in asked] == [0, 0, 1]

    def test_slower_than_all_others_is_answered_in_the_end(self) -> None:
        """Somebody else books in every one of its choices; it is not asked forever."""
        overtaking = threading.local()
        n_asked = 0

        def placement(devices: Sequence[DeviceSnapshot], request: PlacementRequest) -> int:
            nonlocal n_asked
            if not getattr(overtaking, "now", False):
                n_asked += 1
                assert n_asked < 100
                overtaking.now = True
                try:
                    loads.give_back(loads.book(None))
                finally:
                    overtaking.now = False
            return 1

        loads = make_loads(2, placement=placement)
        assert loads.book(None) == 1
        assert running(loads) == [0, 1]
        assert n_asked > 1

    def test_choice_that_filled_up_meanwhile_is_not_taken(self) -> None:
        """Not even after the last retry: the bound holds whatever the placement answers."""
        overtaking = threading.local()

        def placement(devices: Sequence[DeviceSnapshot], request: PlacementRequest) -> int:
            position = devices[0].position
            if not getattr(overtaking, "now", False) and position == 0:
                overtaking.now = True
                try:
                    assert loads.book(None) == 0  # fills the device that is about to be chosen
                finally:
                    overtaking.now = False
            return position

        loads = make_loads(2, tasks_per_device=1, placement=placement)
        assert loads.book(None) == 1
        assert running(loads) == [1, 1]


@pytest.mark.parametrize("tasks_per_device", [None, 2])
@pytest.mark.parametrize("placement", [*PLACEMENTS.values(), own_least_loaded])
def test_bookings_stay_exact_among_many_threads(placement: Placement, tasks_per_device: int | None) -> None:
    """Eight threads, as many as four devices of two take: counted again beside the loads, under a lock of the test."""
    lock = threading.Lock()
    counts, most = Counter(), Counter()  # type: ignore[var-annotated]
    loads = make_loads(4, tasks_per_device, placement)
    together = threading.Barrier(8)

    def work() -> None:
        position = None
        together.wait(WAIT_S)
        for _ in range(60):
            position = loads.book(position)
            with lock:
                counts[position] += 1
                most[position] = max(most[position], counts[position])
            with lock:
                counts[position] -= 1
            loads.give_back(position)

    in_threads(*[work] * 8)
    assert running(loads) == [0] * 4
    assert loads._placed == 8 * 60
    assert all(count <= (tasks_per_device or 8) for count in most.values())


def test_accepted_choices_saw_every_booking_before_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the answers given for one state, one at most is taken."""
    monkeypatch.setattr("managed_exec.scheduling.loads._MAX_STALE_CHOICES", 10**9)
    states: list[tuple[int, int]] = []  # bookings before the choice, tasks running that it saw
    together = threading.Barrier(4)
    local = threading.local()

    def placement(devices: Sequence[DeviceSnapshot], request: PlacementRequest) -> int:
        local.state = request.sequence, sum(device.running for device in devices)
        return devices[request.sequence % len(devices)].position

    loads = make_loads(3, placement=placement)

    def work() -> None:
        together.wait(WAIT_S)
        for _ in range(5):
            loads.book(None)  # and keep it, so that the state of a choice is also its number of tasks
            states.append(local.state)

    in_threads(*[work] * 4)
    assert sorted(sequence for sequence, _ in states) == list(range(20))
    assert all(sequence == n_running for sequence, n_running in states)
    assert running(loads) == [7, 7, 6]
