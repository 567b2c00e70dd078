"""What of the submitting thread holds in the task, and what of the task holds nowhere else."""

from __future__ import annotations

import concurrent.futures
import contextlib
import contextvars
import decimal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import SimpleNamespace

import pytest
import torch
from conftest import Kind

from managed_exec import current_task, sim
from managed_exec.devices import resolve_devices
from managed_exec.inheritance import SubmitterModes, SubmitterStreams

WAIT_S = 30

variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="default")


def both(*managers: Callable[[], AbstractContextManager[object]]) -> Callable[[], AbstractContextManager[object]]:
    @contextlib.contextmanager
    def entered():
        with ExitStack() as stack:
            for manager in managers:
                stack.enter_context(manager())
            yield

    return entered


def autocast(device_type: str = "cpu", **options: object) -> Callable[[], AbstractContextManager[object]]:
    return lambda: torch.autocast(device_type, **options)  # type: ignore[arg-type]


MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "none": nullcontext,
    "no grad": torch.no_grad,
    "grad again": both(torch.no_grad, torch.enable_grad),
    "inference": torch.inference_mode,
    "grad in inference": both(torch.inference_mode, torch.enable_grad),
    "inference left for a moment": both(torch.inference_mode, lambda: torch.inference_mode(False)),
    "no grad, no inference in inference": both(
        torch.inference_mode, lambda: torch.inference_mode(False), torch.no_grad
    ),
    "autocast": autocast(dtype=torch.bfloat16),
    "autocast to half": autocast(dtype=torch.float16),
    "autocast without cache": autocast(dtype=torch.bfloat16, cache_enabled=False),
    "autocast left for a moment": both(autocast(dtype=torch.bfloat16), autocast(enabled=False)),
    "autocast twice": both(autocast(dtype=torch.bfloat16), autocast(dtype=torch.float16)),
    "autocast and no grad": both(autocast(dtype=torch.bfloat16), torch.no_grad),
    "autocast and inference": both(torch.inference_mode, autocast(dtype=torch.bfloat16)),
}


def modes(*device_types: str) -> dict[str, object]:
    """Return every mode of the calling thread that a task can inherit."""
    state: dict[str, object] = {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "cache": torch.is_autocast_cache_enabled(),
    }
    for device_type in ("cpu", *device_types):
        if torch.is_autocast_enabled(device_type):
            state[device_type] = torch.get_autocast_dtype(device_type)
    return state


class TestModes:
    @pytest.mark.parametrize("name", MODES)
    def test_of_the_submitter_hold_in_the_task_and_nowhere_else(self, kind: Kind, name: str) -> None:
        fresh = modes()
        with kind.pool(max_workers=1) as pool:
            with MODES[name]():
                expected = modes()
                assert pool.submit(modes).result(WAIT_S) == expected
                assert next(pool.map(lambda _: modes(), [0])) == expected
                assert modes() == expected
            assert pool.submit(modes).result(WAIT_S) == fresh
        assert modes() == fresh

    @pytest.mark.parametrize("outer", MODES)
    @pytest.mark.parametrize("inner", ["none", "grad again", "no grad", "grad in inference", "autocast"])
    def test_from_a_task_into_another_pool(self, outer: str, inner: str) -> None:
        """The task's own modes are the submitter's there, those that it turned back included."""

        def task() -> tuple[dict[str, object], dict[str, object]]:
            with MODES[inner]():
                return modes(), second.submit(modes).result(WAIT_S)

        kind = Kind("cpu")
        with kind.pool(max_workers=1) as first, kind.pool(max_workers=1) as second:
            with MODES[outer]():
                expected, got = first.submit(task).result(WAIT_S)
            assert got == expected

    @pytest.mark.parametrize("name", MODES)
    def test_not_inherited(self, kind: Kind, name: str) -> None:
        fresh = modes()
        with kind.pool(max_workers=1, inherit_context=False) as pool:
            with MODES[name]():
                assert pool.submit(modes).result(WAIT_S) == fresh

    def test_are_those_at_submission(self, kind: Kind) -> None:
        gate = threading.Event()
        with kind.pool(max_workers=1) as pool:
            first = pool.submit(gate.wait, WAIT_S)
            with torch.no_grad():
                second = pool.submit(torch.is_grad_enabled)
            third = pool.submit(torch.is_grad_enabled)
            with torch.no_grad():
                gate.set()
                assert first.result(WAIT_S)
                assert second.result(WAIT_S) is False
                assert third.result(WAIT_S) is True

    def test_are_those_of_the_submitting_thread(self, kind: Kind) -> None:
        """Two threads with different modes, one pool."""
        together = threading.Barrier(2)
        wrong: list[bool] = []

        def submit(grad: bool) -> None:
            with torch.set_grad_enabled(grad):
                together.wait(WAIT_S)
                wrong.extend(pool.submit(torch.is_grad_enabled).result(WAIT_S) is not grad for _ in range(50))

        with kind.pool(max_workers=2) as pool:
            threads = [threading.Thread(target=submit, args=(grad,)) for grad in (False, True)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert wrong == [False] * 100

    def test_of_a_failing_task_are_left_too(self, kind: Kind) -> None:
        with kind.pool(max_workers=1) as pool:
            with torch.inference_mode():
                assert isinstance(pool.submit(lambda: 1 // 0).exception(WAIT_S), ZeroDivisionError)
            assert pool.submit(modes).result(WAIT_S) == modes()

    def test_autocast_of_the_device(self, simulator: Kind) -> None:
        def task() -> tuple[torch.dtype, dict[str, object]]:
            a = torch.ones(2, 2, device="cuda")
            return (a @ a).dtype, modes("sim")

        with simulator.pool(max_workers=1) as pool:
            with torch.autocast("sim", dtype=torch.bfloat16):
                dtype, inside = pool.submit(task).result(WAIT_S)
            assert dtype == inside["sim"] == torch.bfloat16
            assert pool.submit(task).result(WAIT_S)[0] == torch.float32

    def test_effects(self, kind: Kind) -> None:
        weight = torch.ones(2, 2, requires_grad=True)

        def task() -> torch.Tensor:
            return weight @ weight

        with kind.pool(max_workers=1) as pool:
            with torch.inference_mode():
                assert pool.submit(task).result(WAIT_S).is_inference()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert pool.submit(task).result(WAIT_S).dtype == torch.bfloat16
            with torch.no_grad():
                assert not pool.submit(task).result(WAIT_S).requires_grad
            assert pool.submit(task).result(WAIT_S).grad_fn is not None

    def test_autocast_cache_of_one_task_is_not_the_next_one_s(self, kind: Kind) -> None:
        """A cached cast of a weight that has changed since would be a wrong value."""
        weight = torch.ones(2, 2, requires_grad=True)

        def task() -> float:
            return (torch.ones(2, 2) @ weight)[0, 0].item()

        with kind.pool(max_workers=1) as pool, torch.autocast("cpu", dtype=torch.bfloat16):
            for expected in (2, 4):
                assert pool.submit(task).result(WAIT_S) == expected
                with torch.no_grad():
                    weight.mul_(2)

    def test_nothing_is_captured_of_a_fresh_thread(self) -> None:
        assert SubmitterModes.capture("cpu") is None
        with torch.no_grad():
            assert SubmitterModes.capture("cpu") == (False, False, (), True)


class TestContextVariables:
    def test_are_the_submitter_s(self, kind: Kind) -> None:
        token = variable.set("submitter's")
        try:
            with kind.pool(max_workers=1) as pool:
                assert pool.submit(variable.get).result(WAIT_S) == "submitter's"
                with decimal.localcontext() as context:
                    context.prec = 5
                    assert pool.submit(lambda: decimal.getcontext().prec).result(WAIT_S) == 5
        finally:
            variable.reset(token)

    def test_set_in_a_task_stay_there(self, kind: Kind) -> None:
        with kind.pool(max_workers=1) as pool:
            assert pool.submit(lambda: variable.set("task's") and variable.get()).result(WAIT_S) == "task's"
            assert pool.submit(variable.get).result(WAIT_S) == "default"
        assert variable.get() == "default"

    def test_of_two_tasks_at_once_are_apart(self, kind: Kind) -> None:
        together = threading.Barrier(4)

        def task(value: str) -> str:
            variable.set(value)
            together.wait(WAIT_S)
            return variable.get()

        with kind.pool(max_workers=4) as pool:
            assert list(pool.map(task, "abcd")) == list("abcd")

    def test_are_those_at_submission(self, kind: Kind) -> None:
        gate = threading.Event()
        with kind.pool(max_workers=1) as pool:
            first = pool.submit(gate.wait, WAIT_S)
            token = variable.set("early")
            second = pool.submit(variable.get)
            variable.reset(token)
            gate.set()
            assert first.result(WAIT_S)
            assert second.result(WAIT_S) == "early"

    def test_with_modes(self, kind: Kind) -> None:
        token = variable.set("submitter's")
        try:
            with kind.pool(max_workers=1) as pool, torch.no_grad():
                seen = pool.submit(lambda: (variable.get(), torch.is_grad_enabled())).result(WAIT_S)
            assert seen == ("submitter's", False)
        finally:
            variable.reset(token)

    def test_not_inherited(self, kind: Kind) -> None:
        """As in the standard pool: the worker's own, where what one task sets the next one sees."""
        token = variable.set("submitter's")
        try:
            with kind.pool(max_workers=1, inherit_context=False) as pool:
                assert pool.submit(variable.get).result(WAIT_S) == "default"
                pool.submit(variable.set, "task's").result(WAIT_S)
                assert pool.submit(variable.get).result(WAIT_S) == "task's"
        finally:
            variable.reset(token)


class TestStreams:
    def test_idle_streams_cost_no_event(self, simulator: Kind) -> None:
        devices = resolve_devices()
        captured = SubmitterStreams.capture(devices)
        assert captured.streams == tuple(torch.accelerator.current_stream(i) for i in range(4))
        assert captured.pending == ()

    def test_an_event_for_each_busy_stream(self, simulator: Kind) -> None:
        devices = resolve_devices()
        target = torch.zeros(1000, device="sim:2")
        with sim.hold_stream(torch.accelerator.current_stream(2)):
            target.copy_(torch.ones(1000).pin_memory(), non_blocking=True)
            captured = SubmitterStreams.capture(devices)
            assert len(captured.pending) == 1
            assert not captured.pending[0].query()
        captured.pending[0].synchronize()
        assert target.eq(1).all()
        assert SubmitterStreams.capture(devices).pending == ()

    def test_are_the_submitting_thread_s_current_ones(self, simulator: Kind) -> None:
        other = torch.Stream("sim:1")
        seen: list[SubmitterStreams] = []

        def submit() -> None:
            torch.accelerator.set_stream(other)
            seen.append(SubmitterStreams.capture(resolve_devices(2)))

        thread = threading.Thread(target=submit)
        thread.start()
        thread.join()
        assert seen[0].streams[1] == other
        assert SubmitterStreams.capture(resolve_devices(2)).streams[1] != other

    def test_task_waits_for_a_stream_that_is_not_the_default_one(self, simulator: Kind) -> None:
        source, target = torch.full((1000,), 7.0).pin_memory(), torch.zeros(1000, device="sim:0")
        default, other = torch.accelerator.current_stream(0), torch.Stream("sim:0")
        with simulator.pool(max_workers=1, devices=1) as pool:
            torch.accelerator.set_stream(other)
            try:
                with sim.hold_stream(other):
                    target.copy_(source, non_blocking=True)
                    future = pool.submit(target.clone)
                    with pytest.raises(concurrent.futures.TimeoutError):
                        future.result(timeout=0.05)
                assert future.result(WAIT_S).eq(7).all()
            finally:
                torch.accelerator.set_stream(default)
        del future

    def test_task_on_another_device_reads_what_was_queued(self, simulator: Kind) -> None:
        """The task's stream waits for all of the submitter's streams, not only for the one on its own device."""
        source, target = torch.full((1000,), 7.0).pin_memory(), torch.zeros(1000, device="sim:3")
        with simulator.pool(max_workers=1, placement=lambda devices, request: 0) as pool:
            with sim.hold_stream(torch.accelerator.current_stream(3)):
                target.copy_(source, non_blocking=True)
                future = pool.submit(lambda: (current_task().device.index, target.to("cuda")))
                with pytest.raises(concurrent.futures.TimeoutError):
                    future.result(timeout=0.05)
            index, copy = future.result(WAIT_S)
        assert index == 0
        assert copy.cpu().eq(7).all()
        del future

    def test_broken_device_does_not_make_submit_raise(self, simulator: Kind) -> None:
        with simulator.pool(max_workers=1, placement="round-robin") as pool:
            sim.faults.break_device(2)
            try:
                futures = [pool.submit(lambda: torch.ones(3, device="cuda").sum().item()) for _ in range(4)]
                errors = [future.exception(WAIT_S) for future in futures]
            finally:
                sim.faults.clear()
        assert [isinstance(error, torch.AcceleratorError) for error in errors] == [False, False, True, False]
        assert [error is None for error in errors] == [True, True, False, True]

    def test_broken_device_with_work_queued(self, simulator: Kind) -> None:
        target = torch.zeros(1000, device="sim:1")
        with simulator.pool(max_workers=1, placement=lambda devices, request: 0) as pool:
            with sim.hold_stream(torch.accelerator.current_stream(1)):
                target.copy_(torch.ones(1000).pin_memory(), non_blocking=True)
                sim.faults.break_device(1)
                future = pool.submit(lambda: torch.ones(3, device="cuda").sum().item())
            try:
                assert future.exception(WAIT_S) is None
            finally:
                sim.faults.clear()

    @pytest.mark.parametrize("broken", ["query", "record_event"])
    def test_device_that_breaks_while_it_is_looked_at(self, broken: str) -> None:
        def gone() -> None:
            raise torch.AcceleratorError("gone")

        stream = SimpleNamespace(query=lambda: False, record_event=lambda: "event")
        bad = SimpleNamespace(query=lambda: False, record_event=lambda: "event")
        setattr(bad, broken, gone)
        devices = [SimpleNamespace(current_stream=lambda s=s: s) for s in (bad, None, stream)]
        captured = SubmitterStreams.capture(devices)  # type: ignore[arg-type]
        assert captured == ((bad, stream), ("event",))
