"""The placements as the pure functions they are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from managed_exec.scheduling.placement import (
    MIN_LOCAL_BYTES,
    PLACEMENTS,
    DeviceSnapshot,
    PlacementRequest,
    least_loaded,
    pack,
    round_robin,
)

CPU = torch.device("cpu")
FIRST = PlacementRequest(sequence=0, last_position=None)


def snapshot(position: int, running: int = 0, free: int | None = None, utilization: float | None = None):
    """Return a device with *free* percent of its memory free."""
    return DeviceSnapshot(CPU, position, running, free, None if free is None else 100, utilization)


def devices_of(*rows: tuple):
    return [snapshot(position, *row) for position, row in enumerate(rows)]


class TestLeastLoaded:
    @pytest.mark.parametrize(
        ("rows", "position"),
        [
            ([()], 0),
            ([(), ()], 0),
            ([(1,), ()], 1),
            ([(2,), (1,), (3,)], 1),
            # The fewest tasks come before everything else,
            ([(1, 100, 0.0), (0, 0, 1.0)], 1),
            # then memory,
            ([(0, 25), (0, 75)], 1),
            ([(0, 25, 0.0), (0, 75, 1.0)], 1),
            # which is all there until something else is known,
            ([(0, 75), (0, None)], 1),
            # then utilisation.
            ([(0, 50, 0.9), (0, 50, 0.1)], 1),
            ([(0, 50, 0.9), (0, 50, None)], 1),
            # Small differences do not count.
            ([(0, 90), (0, 92)], 0),
            ([(0, 50, 0.05), (0, 50, 0.0)], 0),
        ],
    )
    def test_table(self, rows: list[tuple], position: int) -> None:
        assert least_loaded(devices_of(*rows), FIRST) == position

    @pytest.mark.parametrize("last", range(4))
    def test_among_equals_the_worker_s_last(self, last: int) -> None:
        assert least_loaded(devices_of(*[()] * 4), PlacementRequest(9, last)) == last
        assert least_loaded(devices_of(*[(2, 50, 0.5)] * 4), PlacementRequest(9, last)) == last

    def test_the_last_is_left_for_less_load(self) -> None:
        assert least_loaded(devices_of((1,), ()), PlacementRequest(1, 0)) == 1
        assert least_loaded(devices_of((0, 20), (0, 90)), PlacementRequest(1, 0)) == 1
        assert least_loaded(devices_of((0, 50, 1.0), (0, 50, 0.0)), PlacementRequest(1, 0)) == 1

    def test_the_last_may_not_be_offered(self) -> None:
        assert least_loaded([snapshot(1, 1), snapshot(3)], PlacementRequest(1, 0)) == 3


class TestRoundRobin:
    def test_turns(self) -> None:
        devices = devices_of((5,), (), (2,))
        chosen = [round_robin(devices, PlacementRequest(i, 1)) for i in range(7)]
        assert chosen == [0, 1, 2, 0, 1, 2, 0]

    def test_turns_among_those_offered(self) -> None:
        devices = [snapshot(1), snapshot(3)]
        assert [round_robin(devices, PlacementRequest(i, None)) for i in range(4)] == [1, 3, 1, 3]


class TestPack:
    @pytest.mark.parametrize(
        ("rows", "position"),
        [
            ([(), ()], 0),
            ([(), (1,)], 1),
            ([(2,), (3,), (3,)], 1),
            ([(1, 12), (0, 13)], 1),
            ([(1, 13), (0, 100)], 0),
            # Without room anywhere, as least-loaded.
            ([(1, 10), (0, 5)], 1),
        ],
    )
    def test_table(self, rows: list[tuple], position: int) -> None:
        assert pack(devices_of(*rows), FIRST) == position


def test_free_share() -> None:
    assert snapshot(0).free_share == 1
    assert snapshot(0, 0, 25).free_share == 0.25
    assert DeviceSnapshot(CPU, 0, 0, 0, 100).free_share == 0
    assert DeviceSnapshot(CPU, 0, 0, 0, 0).free_share == 1, "a total that is not known"


offered = st.lists(
    st.builds(
        DeviceSnapshot,
        st.just(CPU),
        st.just(0),
        st.integers(0, 8),
        st.none() | st.integers(0, 1000),
        st.none() | st.integers(1000, 1000),
        st.none() | st.floats(0, 1),
        st.integers(0, 1000),
        st.integers(0, 1000),
        st.none() | st.integers(0, 1000),
    ),
    min_size=1,
    max_size=8,
).flatmap(
    # Positions as the pool gives them: ascending, with gaps where a device has no room.
    lambda devices: st.lists(st.integers(0, 15), min_size=len(devices), max_size=len(devices), unique=True).map(
        lambda positions: [d._replace(position=p) for d, p in zip(devices, sorted(positions), strict=True)]
    )
)
unknown_requests = st.builds(
    PlacementRequest, st.integers(0, 10**6), st.none() | st.integers(0, 15), st.just(0), st.just({})
)
requests = st.builds(
    PlacementRequest,
    st.integers(0, 10**6),
    st.none() | st.integers(0, 15),
    st.integers(0, 1000),
    st.dictionaries(st.integers(0, 15), st.integers(1, 4 * MIN_LOCAL_BYTES)),
)


@pytest.mark.parametrize("name", PLACEMENTS)
@given(devices=offered, request=requests)
def test_choice_is_among_the_offered(name: str, devices: list[DeviceSnapshot], request: PlacementRequest) -> None:
    assert PLACEMENTS[name](devices, request) in [device.position for device in devices]


@pytest.mark.parametrize("name", PLACEMENTS)
@given(devices=offered, request=requests)
def test_same_question_same_answer(name: str, devices: list[DeviceSnapshot], request: PlacementRequest) -> None:
    before = list(devices)
    assert PLACEMENTS[name](devices, request) == PLACEMENTS[name](devices, request)
    assert devices == before


@given(devices=offered, request=unknown_requests)
def test_least_loaded_never_passes_a_device_with_fewer_tasks(
    devices: list[DeviceSnapshot], request: PlacementRequest
) -> None:
    running = {device.position: device.running for device in devices}
    assert running[least_loaded(devices, request)] == min(running.values())


@given(devices=offered, request=requests)
def test_least_loaded_passes_it_by_two_tasks_at_most_whatever_is_known(
    devices: list[DeviceSnapshot], request: PlacementRequest
) -> None:
    """And only for a device that has more of the arguments, or room that the other has not."""
    by_position = {device.position: device for device in devices}
    chosen = by_position[least_loaded(devices, request)]
    fewest = min(devices, key=lambda device: device.running)
    assert chosen.running <= fewest.running + 2
    if chosen.running > fewest.running:
        local = request.local_bytes
        has_more = local.get(chosen.position, 0) > local.get(fewest.position, 0)
        room = request.expected_bytes
        assert has_more or (chosen.has_room_for(room) and not fewest.has_room_for(room))


class TestWhatIsKnown:
    """Four devices with a limit of 100 bytes; what is expected there, and what of the arguments they have."""

    @pytest.mark.parametrize(
        ("rows", "expected_bytes", "local_bytes", "position"),
        [
            # Where there is room, though another has a task less;
            ([(1, 80), (2, 20), (2, 90), (2, 90)], 50, {}, 1),
            # but not for two tasks more,
            ([(1, 80), (3, 20), (3, 90), (3, 90)], 50, {}, 0),
            # and the fewest tasks if there is room for it nowhere, or everywhere.
            ([(2, 80), (1, 80), (2, 80), (2, 80)], 50, {}, 1),
            ([(2, 0), (2, 0), (1, 10), (2, 0)], 50, {}, 2),
            # Where the arguments are, though another has a task less, or room;
            ([(0, 0), (0, 0), (1, 0), (0, 0)], 0, {2: MIN_LOCAL_BYTES}, 2),
            ([(1, 0), (1, 0), (1, 99), (1, 0)], 50, {2: MIN_LOCAL_BYTES}, 0),
            # but not if it is overloaded, they are small, or most of them are elsewhere.
            ([(0, 0), (0, 0), (2, 0), (0, 0)], 0, {2: MIN_LOCAL_BYTES}, 0),
            ([(0, 0), (0, 0), (1, 0), (0, 0)], 0, {2: MIN_LOCAL_BYTES - 1}, 0),
            ([(1, 0), (1, 0), (1, 0), (1, 0)], 0, {2: MIN_LOCAL_BYTES, 3: 2 * MIN_LOCAL_BYTES}, 3),
            ([(1, 0), (0, 0), (1, 0), (1, 0)], 0, {2: MIN_LOCAL_BYTES, 3: 2 * MIN_LOCAL_BYTES}, 1),
        ],
    )
    def test_table(
        self, rows: list[tuple[int, int]], expected_bytes: int, local_bytes: dict[int, int], position: int
    ) -> None:
        devices = [
            DeviceSnapshot(CPU, i, running, expected_bytes=expected, limit_bytes=100)
            for i, (running, expected) in enumerate(rows)
        ]
        assert least_loaded(devices, PlacementRequest(0, None, expected_bytes, local_bytes)) == position


@given(devices=offered, request=requests)
def test_pack_takes_the_busiest_with_room(devices: list[DeviceSnapshot], request: PlacementRequest) -> None:
    chosen = {device.position: device for device in devices}[pack(devices, request)]
    roomy = [device for device in devices if device.free_share >= 1 / 8]
    if roomy:
        assert chosen in roomy
        assert chosen.running == max(device.running for device in roomy)


@given(devices=offered, start=st.integers(0, 10**6))
def test_round_robin_serves_all_alike(devices: list[DeviceSnapshot], start: int) -> None:
    turns = [round_robin(devices, PlacementRequest(start + i, None)) for i in range(2 * len(devices))]
    assert sorted(turns) == sorted([device.position for device in devices] * 2)
