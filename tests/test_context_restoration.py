"""What a worker's thread is like after a task, whatever the task did to it."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from conftest import Kind
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from managed_exec import current_task

WAIT_S = 30


def own_device() -> torch.device:
    current = current_task()
    assert current is not None
    return current.device


class Mode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def pop_the_context_s_mode() -> None:
    if torch._C._len_torch_function_stack():  # on CUDA there is none
        torch._C._pop_torch_function_stack()


def pop_everything_and_push_another() -> None:
    while torch._C._len_torch_function_stack():
        torch._C._pop_torch_function_stack()
    Mode().__enter__()


def leave_autocast_on() -> None:
    torch.set_autocast_enabled("cpu", True)
    torch.autocast_increment_nesting()


VANDALS: dict[str, Callable[[], object]] = {
    "grad mode": lambda: torch.set_grad_enabled(False),
    "inference mode": lambda: _kept.append(torch.inference_mode()) or _kept[-1].__enter__(),
    "autocast": leave_autocast_on,
    "autocast entered": lambda: torch.autocast("cpu").__enter__(),
    "multithreaded backward": lambda: torch.autograd.set_multithreading_enabled(True),
    "function mode": lambda: Mode().__enter__(),
    "dispatch mode": lambda: Dispatch().__enter__(),
    "default device": lambda: torch.set_default_device("cuda"),
    "device context": lambda: torch.device("cuda").__enter__(),
    "own mode popped": pop_the_context_s_mode,
    "all modes replaced": pop_everything_and_push_another,
}
_kept: list[torch.inference_mode] = []


def thread_state() -> dict[str, object]:
    accelerator = {}
    if torch.accelerator.is_available():
        accelerator = {
            "index": torch.accelerator.current_device_index(),
            "streams": [torch.accelerator.current_stream(i) for i in range(torch.accelerator.device_count())],
        }
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch._C._is_any_autocast_enabled(),
        "nesting": torch.autocast_increment_nesting() - torch.autocast_decrement_nesting(),
        "multithreading": torch._C._is_multithreading_enabled(),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "default device": str(torch.get_default_device()),
        "factory": str(torch.ones(1).device),
        **accelerator,
    }


def states_around(kind: Kind, vandal: Callable[[], object], **options: object) -> list[dict[str, object]]:
    """Return the worker thread's state after a harmless task and after *vandal*, as a done callback sees it."""
    states: list[dict[str, object]] = []
    with kind.pool(max_workers=1, **options) as pool:
        for task in (int, vandal, int):
            gate = threading.Event()
            future = pool.submit(lambda task=task, gate=gate: gate.wait(WAIT_S) and task() and None)
            future.add_done_callback(lambda _: states.append(thread_state()))
            gate.set()
            future.result(WAIT_S)
        inside = pool.submit(thread_state).result(WAIT_S)
    assert inside["factory"] == "cpu"
    assert inside["grad"] is True
    return states


def no_grad_for_good() -> None:
    torch.set_grad_enabled(False)


def inference_for_good() -> None:
    _kept.append(torch.inference_mode())
    _kept[-1].__enter__()


class TestInitializer:
    """An initializer changes its thread for good; what a task inherits of its submitter comes first."""

    @pytest.mark.parametrize("initializer", [no_grad_for_good, inference_for_good])
    def test_submitter_s_modes_hold_in_the_task(self, kind: Kind, initializer: Callable[[], None]) -> None:
        def modes() -> tuple[bool, bool]:
            return torch.is_grad_enabled(), torch.is_inference_mode_enabled()

        with kind.pool(max_workers=1, initializer=initializer) as pool:
            assert pool.submit(modes).result() == (True, False)
            with torch.no_grad():
                assert pool.submit(modes).result() == (False, False)
        with kind.pool(max_workers=1, initializer=initializer, inherit_context=False) as pool:
            assert pool.submit(modes).result()[0] is False
        _kept.clear()


class TestRestoration:
    @pytest.mark.parametrize("vandal", VANDALS)
    def test_thread_is_as_before(self, kind: Kind, vandal: str) -> None:
        before, after, later = states_around(kind, VANDALS[vandal])
        _kept.clear()
        assert after == before
        assert later == before

    def test_device_and_stream(self, accelerator: Kind) -> None:
        def vandal() -> None:
            last = torch.accelerator.device_count() - 1
            torch.accelerator.set_stream(torch.Stream(torch.accelerator.current_accelerator().type + f":{last}"))

        before, after, later = states_around(accelerator, vandal)
        assert before == after == later

    def test_after_a_failure(self, kind: Kind) -> None:
        def vandal() -> None:
            torch.set_grad_enabled(False)
            Mode().__enter__()
            raise ValueError

        with kind.pool(max_workers=1) as pool:
            assert isinstance(pool.submit(vandal).exception(WAIT_S), ValueError)
            assert pool.submit(torch.is_grad_enabled).result(WAIT_S)
            assert pool.submit(lambda: torch.ones(1, device="cuda").device == own_device()).result(WAIT_S)

    def test_what_an_initializer_set_is_kept(self, kind: Kind) -> None:
        def initialize() -> None:
            torch.set_grad_enabled(False)
            Mode().__enter__()

        with kind.pool(max_workers=1, initializer=initialize, inherit_context=False) as pool:
            for _ in range(3):
                grad, modes = pool.submit(
                    lambda: (torch.is_grad_enabled(), torch._C._len_torch_function_stack())
                ).result(WAIT_S)
                assert grad is False
                assert modes >= 1
