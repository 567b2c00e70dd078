"""The held tasks by themselves: order, groups, by-passes, and for whom a device is kept."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from managed_exec.options import ANY, Need, TaskOptions
from managed_exec.scheduling.held import MAX_PASSED, HeldTasks
from managed_exec.scheduling.loads import DeviceLoads
from managed_exec.scheduling.placement import PLACEMENTS
from managed_exec.scheduling.queue import TaskQueue
from managed_exec.task import Task

CAPACITY = 100


class Counted(DeviceLoads):
    """Counts how often it is asked for room."""

    asked = 0

    def has_room(self, need: Need) -> bool:
        self.asked += 1
        return super().has_room(need)


@pytest.fixture
def loads() -> Counted:
    devices = [SimpleNamespace(torch_device=torch.device("cuda", 0))]
    loads = Counted(devices, None, PLACEMENTS["least-loaded"], lambda position: CAPACITY)  # type: ignore[arg-type]
    assert loads.largest_bytes(ANY) == CAPACITY  # asked for by each task's first try
    return loads


@pytest.fixture
def held(loads: Counted) -> HeldTasks:
    return HeldTasks(loads, None)


def new_task(number: int, n_bytes: int, priority: int = 0) -> Task:
    return Task(number, print, (), {}, None, None, None, TaskOptions(priority=priority), Need(n_bytes))


def taken(held: HeldTasks) -> int | None:
    found = held.take()
    return None if found is None else found.task.id


class TestOrder:
    def test_priority_then_age_over_all_groups(self, held: HeldTasks) -> None:
        for number, (n_bytes, priority) in enumerate([(10, 0), (20, 0), (10, 0), (20, 1), (10, -1), (20, 0)]):
            held.add(new_task(number, n_bytes, priority))
        assert [taken(held) for _ in range(7)] == [3, 0, 1, 2, 5, 4, None]
        assert len(held) == 0

    def test_what_runs_again_comes_first_of_its_priority(self, loads: Counted, held: HeldTasks) -> None:
        held.add(new_task(0, 10))
        for number in (1, 2):
            again = new_task(number, 10)
            again.attempts, again.need = 1, again.need._replace(alone=True)
            held.add_first(again)
            loads.keep_no_longer(again.need)  # nothing would start before it
        held.add(new_task(3, 10, priority=1))
        assert [taken(held) for _ in range(4)] == [3, 1, 2, 0]

    def test_one_that_was_put_back_has_its_old_place(self, held: HeldTasks) -> None:
        for number in range(3):
            held.add(new_task(number, 10))
        first = held.take()
        assert first is not None
        held.put(first)
        assert [taken(held) for _ in range(3)] == [0, 1, 2]

    def test_those_that_fit_go_before_one_that_does_not(self, loads: Counted, held: HeldTasks) -> None:
        loads.book(None, Need(50))
        held.add(new_task(0, 60))
        held.add(new_task(1, 50))
        assert [taken(held), taken(held)] == [1, None]


class TestGroups:
    def test_room_is_asked_for_once_a_group(self, loads: Counted, held: HeldTasks) -> None:
        loads.book(None, Need(90))
        for number in range(3000):
            held.add(new_task(number, 20 + 10 * (number % 3)))
        assert held.take() is None
        assert loads.asked == 3

    def test_cancelled_first_one_is_given_out_though_nothing_fits(self, loads: Counted, held: HeldTasks) -> None:
        loads.book(None, Need(90))
        tasks = [new_task(number, 20) for number in range(3)]
        for task in tasks:
            held.add(task)
        tasks[0].future.cancel()
        tasks[2].future.cancel()
        assert [taken(held), taken(held)] == [0, None], "the last is behind one that waits, as in any queue"
        tasks[1].future.cancel()
        assert [taken(held), taken(held), taken(held)] == [1, 2, None]

    def test_unstarted_ones_are_given_out_and_others_stay(self, held: HeldTasks) -> None:
        again = new_task(0, 10)
        again.attempts, again.need = 1, again.need._replace(alone=True)
        held.add_first(again)
        for number in range(1, 5):
            held.add(new_task(number, 10 * (number % 2)))
        found = [held.take_unstarted() for _ in range(5)]
        assert sorted(task.id for task in found if task is not None) == [1, 2, 3, 4]
        assert found[-1] is None
        assert len(held) == 1

    def test_stranded_ones_leave_in_order(self, loads: Counted, held: HeldTasks) -> None:
        need = Need(90)
        loads.book(None, need)
        loads.give_back_place(0, need)  # given up, and its bytes are still reserved
        for number, n_bytes in enumerate([20, 10, 20, 30]):
            held.add(new_task(number, n_bytes))
        assert [task.id for task in held.take_stranded()] == [0, 2, 3]
        assert [taken(held), taken(held)] == [1, None]


class TestPassing:
    def pass_by(self, held: HeldTasks, times: int) -> None:
        for _ in range(times):
            held.note_start(0, 0, None)

    def test_device_is_kept_for_one_that_was_passed_so_often(self, loads: Counted, held: HeldTasks) -> None:
        held.add(task := new_task(0, 60))
        self.pass_by(held, MAX_PASSED - 1)
        assert not loads._kept_for
        self.pass_by(held, 1)
        assert loads._kept_for == {0: task.need}

    def test_what_starts_in_its_turn_passes_nobody(self, loads: Counted, held: HeldTasks) -> None:
        for number in range(3 * MAX_PASSED):
            held.add(new_task(number, 60))
        while (first := held.take()) is not None:
            held.note_start(0, 0, first)
            assert not loads._kept_for

    def test_higher_priority_passes_nobody_and_lower_does(self, loads: Counted, held: HeldTasks) -> None:
        held.add(new_task(0, 60))
        for _ in range(2 * MAX_PASSED):
            held.note_start(0, 1, None)
        assert not loads._kept_for
        for _ in range(MAX_PASSED):
            held.note_start(0, -1, None)
        assert loads._kept_for

    def test_second_was_passed_by_those_that_started_since_it_came(self, loads: Counted, held: HeldTasks) -> None:
        held.add(new_task(0, 60))
        self.pass_by(held, 5)
        held.add(second := new_task(1, 60))
        self.pass_by(held, 6)
        first = held.take()
        assert first is not None
        held.note_start(0, 0, first)
        self.pass_by(held, MAX_PASSED - 6 - 1)
        assert not loads._kept_for
        self.pass_by(held, 1)
        assert loads._kept_for == {0: second.need}

    def test_count_survives_a_try_that_fails(self, loads: Counted, held: HeldTasks) -> None:
        held.add(new_task(0, 60))
        self.pass_by(held, MAX_PASSED - 1)
        first = held.take()
        assert first is not None
        held.put(first)
        self.pass_by(held, 1)
        assert loads._kept_for


class TestClaims:
    """A device is kept for the first of a group only, or nobody would use it."""

    def test_one_of_higher_priority_takes_the_place_of_the_first(self, loads: Counted, held: HeldTasks) -> None:
        held.add(task := new_task(0, 60))
        loads.keep_for(task.need)
        held.add(new_task(1, 60, priority=1))
        assert not loads._kept_for
        assert [taken(held), taken(held)] == [1, 0]

    def test_one_that_comes_back_behind_another(self, loads: Counted, held: HeldTasks) -> None:
        held.add(new_task(0, 60))
        held.add(second := new_task(1, 60))
        first, other = held.take(), held.take()  # two workers try them at once
        assert first is not None
        assert other is not None
        loads.keep_for(second.need)
        held.put(first)
        held.put(other)
        assert not loads._kept_for

    def test_cancelled_one_has_none(self, loads: Counted, held: HeldTasks) -> None:
        held.add(task := new_task(0, 60))
        loads.keep_for(task.need)
        task.future.cancel()
        assert taken(held) == 0
        assert not loads._kept_for

    def test_none_is_kept_for_what_asks_for_nothing(self, loads: Counted, held: HeldTasks) -> None:
        held.add(Task(0, print, (), {}, None, None, None, TaskOptions(), ANY))
        for _ in range(2 * MAX_PASSED):
            held.note_start(0, 0, None)
        assert not loads._kept_for


def test_no_device_is_kept_for_one_that_is_cancelled_in_a_worker_s_hands(
    loads: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = TaskQueue(loads)
    task = new_task(0, 20)
    task.attempts, task.need = 1, task.need._replace(alone=True)
    tasks.put_back(task)
    find = tasks._next_held

    def find_and_cancel() -> object:
        found = find()
        task.future.cancel()
        return found

    monkeypatch.setattr(tasks, "_next_held", find_and_cancel)
    assert tasks.take(None) == (task, None, None)
    assert not loads._kept_for


class TestClosedQueue:
    """A task in a worker's hands while the pool is shut down, or breaks, and that no device takes in the end."""

    def test_is_cancelled(self, loads: Counted) -> None:
        tasks = TaskQueue(loads)
        loads.book(None, Need(90))
        tasks.put(task := new_task(0, 20))
        tasks.close()
        assert tasks.take(None) == (task, None, None)
        assert task.future.cancelled()
        assert not tasks.has_held

    @pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, ValueError])
    def test_is_cancelled_whatever_its_callback_raises(self, loads: Counted, error: type[BaseException]) -> None:
        def callback(future: object) -> None:
            raise error

        tasks = TaskQueue(loads)
        loads.book(None, Need(90))
        tasks.put(task := new_task(0, 20))
        task.future.add_done_callback(callback)
        tasks.close()
        assert tasks.take(None) == (task, None, None)
        assert task.future.cancelled()

    def test_fails(self, loads: Counted) -> None:
        tasks = TaskQueue(loads)
        loads.book(None, Need(90))
        tasks.put(task := new_task(0, 20))
        tasks.close(error := RuntimeError)
        taken = tasks.take(None)
        assert taken is not None
        assert taken[:2] == (task, None)
        assert type(taken[2]) is error
        assert not task.future.done(), "the worker's to do"

    def test_one_that_has_run_is_held_all_the_same(self, loads: Counted) -> None:
        tasks = TaskQueue(loads)
        loads.book(None, Need(90))
        task = new_task(0, 20)
        task.attempts, task.need = 1, task.need._replace(alone=True)
        tasks.close()
        tasks.put_back(task)
        tasks.put(None)
        assert tasks.take(None) is None
        assert tasks.has_held
