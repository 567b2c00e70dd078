"""Hooks are told what happens, and can do no harm."""

from __future__ import annotations

import logging
import threading
from dataclasses import FrozenInstanceError

import pytest
import torch
from conftest import Kind, eventually

from managed_exec import manage, sim
from managed_exec.events import (
    CallMigrated,
    Event,
    Hooks,
    TaskFinished,
    TaskStarted,
    TaskSubmitted,
    TensorMoved,
    logging_hook,
)
from managed_exec.memory.manager import configure
from managed_exec.memory.policy import MemoryPolicy

MOVED = TensorMoved("spilled", torch.device("cpu"), "host", 8, None, 0.0, 1.0)


class TestHooks:
    def test_each_is_called_in_order(self) -> None:
        seen: list[tuple[int, Event]] = []
        hooks = Hooks([lambda event: seen.append((1, event)), lambda event: seen.append((2, event))])
        hooks.emit(MOVED)
        assert seen == [(1, MOVED), (2, MOVED)]

    def test_come_and_go(self) -> None:
        hooks, seen = Hooks(), []
        assert not hooks.hooks
        key = hooks.add(seen.append)
        assert list(hooks.hooks.values()) == [seen.append]
        hooks.remove(key)
        hooks.remove(key)
        assert not hooks.hooks

    @pytest.mark.parametrize("error", [ValueError, SystemExit])
    def test_one_that_fails_is_reported_and_called_no_more(
        self, error: type[BaseException], caplog: pytest.LogCaptureFixture
    ) -> None:
        calls, seen = [], []

        def failing(event: Event) -> None:
            calls.append(event)
            raise error("mine")

        hooks = Hooks([failing, seen.append])
        hooks.emit(MOVED)
        hooks.emit(MOVED)
        assert (len(calls), len(seen)) == (1, 2)
        assert [record.levelno for record in caplog.records] == [logging.ERROR]
        assert "failing" in caplog.text

    def test_interrupt_of_the_program_is_not_the_hook_s(self, kind: Kind) -> None:
        presses, seen, others = [KeyboardInterrupt], [], []

        def interrupted(event: Event) -> None:
            seen.append(event)
            if presses:
                raise presses.pop()

        with kind.pool(max_workers=1, hooks=[interrupted, others.append]) as pool:
            with pytest.raises(KeyboardInterrupt):
                pool.submit(others.append, "the task")
            assert pool.submit(int).result(60) == 0
        assert "the task" not in others
        kinds = [TaskSubmitted, TaskFinished, TaskSubmitted, TaskStarted, TaskFinished]
        assert [type(event) for event in seen] == [type(event) for event in others] == kinds
        assert isinstance(seen[1].error, KeyboardInterrupt)

    @pytest.mark.parametrize("where", ["hook", "done callback"])
    def test_interrupt_leaves_no_task_that_was_to_be_cancelled(self, kind: Kind, where: str) -> None:
        presses, seen, go = list[type[BaseException]](), list[Event](), threading.Event()

        def interrupted(event: Event) -> None:
            seen.append(event)
            if presses:
                raise presses.pop()

        def interrupt(future: object) -> None:
            raise KeyboardInterrupt

        with kind.pool(max_workers=1, hooks=[interrupted]) as pool:
            running = pool.submit(go.wait, 60)
            assert eventually(running.running)
            waiting = [pool.submit(int) for _ in range(3)]
            if where == "hook":
                presses.append(KeyboardInterrupt)
            else:
                waiting[0].add_done_callback(interrupt)
            with pytest.raises(KeyboardInterrupt):
                pool.shutdown(cancel_futures=True)
            assert all(future.cancelled() for future in waiting)
            go.set()
            assert running.result(60)
        assert [event.task_id for event in seen if isinstance(event, TaskFinished)] == [1, 2, 3, 0]

    @pytest.mark.parametrize("equal", [True, ValueError("cannot be compared")], ids=["equal", "raises"])
    def test_hooks_are_not_compared(self, equal: object) -> None:
        class Comparing:
            def __init__(self, fails: bool) -> None:
                self.fails = fails
                self.seen: list[Event] = []

            def __eq__(self, other: object) -> bool:
                if isinstance(equal, Exception):
                    raise equal
                return True

            __hash__ = None  # type: ignore[assignment]

            def __call__(self, event: Event) -> None:
                self.seen.append(event)
                if self.fails:
                    raise RuntimeError("mine")

        failing, other = Comparing(True), Comparing(False)
        hooks = Hooks([failing, other])
        hooks.emit(MOVED)
        hooks.emit(MOVED)
        assert (len(failing.seen), len(other.seen)) == (1, 2)

    def test_what_cannot_be_called(self) -> None:
        with pytest.raises(TypeError, match=r"hooks: expected callables that take one event, got 3"):
            Hooks([3])  # type: ignore[list-item]

    def test_events_are_frozen(self) -> None:
        with pytest.raises(FrozenInstanceError):
            MOVED.n_bytes = 1  # type: ignore[misc]

    def test_logging_hook(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.DEBUG):
            Hooks([logging_hook(level=logging.DEBUG)]).emit(MOVED)
        assert [(r.name, r.levelno) for r in caplog.records] == [("managed_exec.events", logging.DEBUG)]
        assert "spilled" in caplog.text


class TestMemory:
    def test_moves_there_and_back(self, simulator: Kind) -> None:
        sim.enable(devices=1, memory="2MiB")
        keeper = configure(MemoryPolicy(min_bytes=1024))
        seen: list[TensorMoved] = []
        key = keeper.hooks.add(seen.append)
        try:
            x = manage(torch.ones(1024)).to("sim:0")
            x.spill("disk")
            assert x.sum().item() == 1024
        finally:
            keeper.hooks.remove(key)
        assert [(e.what, str(e.device), e.tier, e.n_bytes, e.task) for e in seen] == [
            ("spilled", "sim:0", "disk", 4096, None),
            ("unspilled", "sim:0", "disk", 4096, None),
        ]
        assert all(event.started_s <= event.at_s for event in seen)

    def test_a_call_made_elsewhere(self, simulator: Kind) -> None:
        sim.enable(devices=2, memory="2MiB")
        keeper = configure(MemoryPolicy(min_bytes=1024, spill=()))
        seen: list[Event] = []
        key = keeper.hooks.add(seen.append)
        try:
            with simulator.pool(max_workers=1, memory=keeper.policy) as executor:
                full = executor.submit(lambda: [torch.ones(3 * 2**17, device="cuda") for _ in range(2)]).result(60)
        finally:
            keeper.hooks.remove(key)
        assert {str(tensor.device) for tensor in full} == {"sim:0", "sim:1"}
        assert [(type(event), event.task) for event in seen] == [(CallMigrated, "task 0")]
