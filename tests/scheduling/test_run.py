"""What a failed task keeps: its traceback, and of an out-of-memory error no memory."""

from __future__ import annotations

import gc
import traceback
import weakref
from typing import Any

import pytest
import torch
from conftest import Kind, allocated_bytes

from managed_exec import gpu_task, sim
from managed_exec.scheduling.run import drop_frames

WAIT_S = 30


class Frozen(torch.OutOfMemoryError):
    """An error whose class lets nothing be set, and has names of its own for what others have."""

    __cause__ = __context__ = __traceback__ = property(lambda self: 1 / 0)  # type: ignore[assignment]

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"cannot assign to {name!r}")


def test_frames_are_dropped_of_an_error_that_lets_nothing_be_set() -> None:
    def fail() -> None:
        kept = torch.ones(3)
        gone.append(weakref.ref(kept))
        raise Frozen("no")

    gone: list[weakref.ref[torch.Tensor]] = []
    try:
        fail()
    except Frozen as raised:
        error = raised
    drop_frames(error)
    assert gone[0]() is None


class TestFailures:
    @pytest.mark.parametrize("options", [{}, {"on_oom": "retry", "retries": 1}, {"on_oom": "cpu"}], ids=str)
    def test_error_that_lets_nothing_be_set(self, simulator: Kind, options: dict[str, Any]) -> None:
        def fail() -> None:
            raise Frozen("no")

        with simulator.pool(max_workers=1) as pool:
            assert isinstance(pool.submit(gpu_task(**options)(fail)).exception(WAIT_S), Frozen)
            assert pool.submit(abs, -1).result(WAIT_S) == 1

    @pytest.mark.parametrize("style", ["function", "closure", "generator", "method"])
    def test_out_of_memory_in_any_style_of_task_holds_no_memory(self, simulator: Kind, style: str) -> None:
        """A closure's function keeps what it closes over, also when its frame was cleared."""
        sim.enable(devices=1, memory="4MiB")

        def task() -> None:
            kept = torch.ones(2**18, device="cuda")

            class Greedy:
                mine = kept

                def take(self) -> torch.Tensor:
                    return torch.ones(2**22, device="cuda") + self.mine[0]

            def take() -> torch.Tensor:
                return torch.ones(2**22, device="cuda") + kept[0]

            if style == "function":
                torch.ones(2**22, device="cuda")
            elif style == "closure":
                take()
            elif style == "generator":
                sum(torch.ones(2**22, device="cuda") + kept[i] for i in range(2))
            else:
                Greedy().take()

        for memory in (None, False):
            with simulator.pool(max_workers=1, memory=memory) as pool:
                error = pool.submit(task).exception(WAIT_S)
            assert isinstance(error, torch.OutOfMemoryError)
            gc.collect()
            assert torch.accelerator.memory_allocated(0) == 0
            text = "".join(traceback.format_exception(error))
            assert 'torch.ones(2**22, device="cuda")' in text, "the source of its lines"
            assert text.index("in task") < text.index("DeviceMemoryError" if memory is None else "OutOfMemoryError")

    def test_traceback_of_a_failure_names_the_task(self, kind: Kind) -> None:
        def diverging_solver() -> None:
            raise ArithmeticError("no convergence")

        with kind.pool(max_workers=1) as pool:
            error = pool.submit(diverging_solver).exception()
        assert error is not None
        assert "diverging_solver" in "".join(traceback.format_exception(error))

    def test_out_of_memory_failure_holds_no_device_memory(self, simulator: Kind) -> None:
        def greedy_solver() -> None:
            held = torch.ones(10 * 2**20, device="cuda")
            try:
                torch.ones(10 * 2**20, device="cuda")
            except torch.OutOfMemoryError as error:
                raise torch.OutOfMemoryError("a solver that says more") from error
            held.sum()

        with simulator.pool(max_workers=1, devices=1, memory=False) as pool:
            future = pool.submit(greedy_solver)
            error = future.exception()
            assert isinstance(error, torch.OutOfMemoryError)
            assert allocated_bytes() == 0
            assert "greedy_solver" in "".join(traceback.format_exception(error))
            assert pool.submit(lambda: torch.ones(12 * 2**20, device="cuda").sum().item()).result() == 12 * 2**20
