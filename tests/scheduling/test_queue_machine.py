"""Queue, admission and placement together, in any order of events, driven by hand: one thread stands for all workers.

Between two events every worker that may do anything has done it, so the model knows what must have started.
"""

from __future__ import annotations

import queue
from types import SimpleNamespace

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from managed_exec.options import ANY, Need, TaskOptions
from managed_exec.scheduling.appraisal import Appraiser
from managed_exec.scheduling.footprints import Footprints
from managed_exec.scheduling.held import MAX_PASSED
from managed_exec.scheduling.loads import DeviceLoads
from managed_exec.scheduling.placement import PLACEMENTS, DeviceSnapshot, Placement, PlacementRequest
from managed_exec.scheduling.queue import TaskQueue
from managed_exec.task import Task

CAPACITY = 100


def first_offered(devices: object, request: PlacementRequest) -> int:
    """Choose without sense, and be a stranger to the loads."""
    return devices[0].position  # type: ignore[index]


def small() -> None: ...


def large() -> None: ...


def failing() -> None: ...


FUNCTIONS = {small: 20, large: 70, failing: 500}  # what their tasks need, in bytes


class Queueing(RuleBasedStateMachine):
    """Tasks come, start, end, run again, are cancelled; the pool's rules hold after every step."""

    @initialize(
        n_devices=st.integers(1, 3),
        n_workers=st.integers(1, 6),
        tasks_per_device=st.none() | st.integers(1, 3),
        placement=st.sampled_from([*PLACEMENTS.values(), first_offered]),
        holds_back=st.booleans(),
    )
    def start(
        self, n_devices: int, n_workers: int, tasks_per_device: int | None, placement: Placement, holds_back: bool
    ) -> None:
        devices = [SimpleNamespace(torch_device=torch.device("cuda", i)) for i in range(n_devices)]
        self.loads = DeviceLoads(devices, tasks_per_device, placement, lambda position: CAPACITY)  # type: ignore[arg-type]
        self.footprints = Footprints()
        self.appraiser = Appraiser(devices, self.loads, self.footprints, True, holds_back)  # type: ignore[arg-type]
        self.queue = TaskQueue(self.loads, self.appraiser)
        self.n_workers = n_workers if tasks_per_device is None else min(n_workers, n_devices * tasks_per_device)
        self.tasks_per_device = tasks_per_device
        self.n_devices = n_devices
        self.waiting: dict[int, Task] = {}  # by number, as the next three
        self.running: dict[int, tuple[Task, int]] = {}
        self.ended: set[int] = set()
        self.cancelled: set[int] = set()
        self.n_submitted = 0
        self.n_exits = 0  # None in the queue, for nobody

    # -- events -----------------------------------------------------------------------------------------------------

    @rule(
        fn=st.sampled_from(list(FUNCTIONS)),
        priority=st.integers(-1, 1),
        n_bytes=st.just(0) | st.integers(1, CAPACITY),
        device=st.none() | st.integers(0, 2),
    )
    def submit(self, fn, priority: int, n_bytes: int, device: int | None) -> None:
        allowed = None if device is None else frozenset({device % self.n_devices})
        need = Need(n_bytes, allowed) if n_bytes or allowed else ANY
        task = Task(self.n_submitted, fn, (), {}, None, None, None, TaskOptions(priority=priority), need)
        self.waiting[task.id] = task
        self.n_submitted += 1
        self.queue.put(task)
        self.let_workers_act()

    @precondition(lambda self: self.running)
    @rule(data=st.data(), learns=st.booleans())
    def end(self, data: st.DataObject, learns: bool) -> None:
        task, position = self.running.pop(data.draw(st.sampled_from(sorted(self.running))))
        if learns:
            self.appraiser.learn(task, FUNCTIONS[task.fn], failed=False, out_of_memory=False)
        self.loads.give_back(position, task.need)
        self.queue.look_again()
        self.ended.add(task.id)
        task.future.set_result(None)
        self.let_workers_act()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def run_again(self, data: st.DataObject) -> None:
        """Have a task run out of memory."""
        task, position = self.running.pop(data.draw(st.sampled_from(sorted(self.running))))
        self.appraiser.learn(task, FUNCTIONS[task.fn], failed=True, out_of_memory=True)
        self.loads.give_back(position, task.need)
        self.queue.look_again()
        task.attempts += 1
        task.need = task.need._replace(alone=True, unknown=None)
        self.waiting[task.id] = task
        self.queue.put_back(task)
        self.let_workers_act()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        """Have a task follow a call of its own to another device."""
        number = data.draw(st.sampled_from(sorted(self.running)))
        to_position = data.draw(st.integers(0, self.n_devices - 1))
        task, position = self.running[number]
        if position != to_position and self.loads.move(position, to_position, task.need):
            self.running[number] = task, to_position
            self.queue.look_again()
            self.let_workers_act()

    @precondition(lambda self: any(not task.attempts for task in self.waiting.values()))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(n for n, task in self.waiting.items() if not task.attempts)))
        assert self.waiting[number].future.cancel()

    @rule()
    def forget_footprints(self) -> None:
        self.footprints.clear()

    @rule()
    def drain(self) -> None:
        """Shut down with ``cancel_futures``: what has not started is given out, what is to run again stays."""
        while True:
            try:
                task = self.queue.get_nowait()
            except queue.Empty:
                break
            if task is None:
                self.n_exits -= 1
            else:
                assert self.waiting.pop(task.id).attempts == 0
                self.cancelled.add(task.id)
        assert all(task.attempts for task in self.waiting.values())
        self.let_workers_act()

    # -- the workers ------------------------------------------------------------------------------------------------

    def let_workers_act(self) -> None:
        """Have every idle worker take tasks until there is none for it."""
        last_position = None
        self.put_exit()
        while len(self.running) < self.n_workers:
            taken = self.queue.take(last_position)
            if taken is None:
                self.n_exits -= 1
                if self.n_exits == 0:
                    return  # it has come behind all others
                continue
            task, position, error = taken
            assert error is None
            assert self.waiting.pop(task.id) is task, "run twice, or after it was cancelled"
            if position is None:
                assert not task.future.set_running_or_notify_cancel()
                self.cancelled.add(task.id)
                self.put_exit()  # what was behind it in the queue was not looked at
                continue
            if not task.attempts:
                assert task.future.set_running_or_notify_cancel()
            self.running[task.id] = task, position
            last_position = position
            self.put_exit()

    def put_exit(self) -> None:
        self.queue.put(None)
        self.n_exits += 1

    # -- what holds -------------------------------------------------------------------------------------------------

    def booked(self, position: int) -> list[Task]:
        return [task for task, place in self.running.values() if place == position]

    @invariant()
    def no_task_is_lost(self) -> None:
        groups = [set(self.waiting), set(self.running), self.ended, self.cancelled]
        assert sum(map(len, groups)) == self.n_submitted
        assert set().union(*groups) == set(range(self.n_submitted))

    @invariant()
    def devices_have_what_they_may(self) -> None:
        for snapshot in self.loads.snapshots():
            tasks = self.booked(snapshot.position)
            assert snapshot.running == len(tasks)
            assert snapshot.reserved_bytes == sum(CAPACITY if t.need.unknown else t.need.n_bytes for t in tasks)
            assert snapshot.reserved_bytes <= CAPACITY
            assert self.tasks_per_device is None or len(tasks) <= self.tasks_per_device
            assert all(task.need.takes(snapshot.position) for task in tasks)
            assert len(tasks) == 1 or not any(task.need.alone for task in tasks)

    @invariant()
    def nobody_waits_without_a_reason(self) -> None:
        """A worker without a task, and a task that waits: then something runs, whose end will look at it again."""
        if self.waiting and len(self.running) < self.n_workers:
            assert self.running
            for task in self.waiting.values():
                if not task.future.cancelled():
                    assert not self.loads.has_room(task.need)

    @invariant()
    def what_asks_for_nothing_is_held_for_drained_devices_alone(self) -> None:
        idle = len(self.running) < self.n_workers
        if idle and any(task.need is ANY and not task.future.cancelled() for task in self.waiting.values()):
            assert self.loads._kept_for

    @invariant()
    def devices_are_kept_for_those_alone_that_are_tried(self) -> None:
        firsts = [group.heap[0].task.need for group in self.queue._held._groups.values()]
        for position, need in self.loads._kept_for.items():
            runs_alone = any(task.need is need for task in self.booked(position))
            assert runs_alone or any(need is first for first in firsts)

    def teardown(self) -> None:
        if not hasattr(self, "queue"):
            return
        while self.running:
            number = next(iter(self.running))
            task, position = self.running.pop(number)
            self.loads.give_back(position, task.need)
            self.queue.look_again()
            self.ended.add(number)
            self.let_workers_act()
        assert not self.waiting
        assert len(self.ended) + len(self.cancelled) == self.n_submitted
        assert self.snapshots_at_rest() == [(0, 0, 0)] * self.n_devices
        assert not self.loads._kept_for

    def snapshots_at_rest(self) -> list[tuple[int, int, int]]:
        snapshots: list[DeviceSnapshot] = self.loads.snapshots()
        return [(s.running, s.reserved_bytes, s.expected_bytes) for s in snapshots]


Queueing.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestQueueing = Queueing.TestCase


def test_bound_of_passes_by_hand() -> None:
    """A large task that is held, and small ones that come without end: so many start before it, and no more."""
    devices = [SimpleNamespace(torch_device=torch.device("cuda", 0))]
    loads = DeviceLoads(devices, None, PLACEMENTS["least-loaded"], lambda position: CAPACITY)  # type: ignore[arg-type]
    tasks = TaskQueue(loads)

    def submitted(number: int, n_bytes: int) -> Task:
        task = Task(number, small, (), {}, None, None, None, TaskOptions(), Need(n_bytes))
        tasks.put(task)
        return task

    first = submitted(0, 60)
    assert tasks.take(None) == (first, 0, None)
    submitted(1, 60)
    for number in range(2, 2 + MAX_PASSED):
        small_one = submitted(number, 10)
        assert tasks.take(0) == (small_one, 0, None)
        loads.give_back(0, small_one.need)
        tasks.look_again()
    late = submitted(999, 10)
    tasks.put(None)
    assert tasks.take(0) is None, "the device is kept"
    loads.give_back(0, first.need)
    tasks.look_again()
    taken = tasks.take(0)
    assert taken is not None
    assert taken[0].id == 1
    assert tasks.take(0) == (late, 0, None)
