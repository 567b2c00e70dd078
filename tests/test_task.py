"""``gpu_task`` and ``current_task``."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from conftest import Kind, eventually, identity

from managed_exec import GPUPoolExecutor, current_task, gpu_task
from managed_exec.options import NO_OPTIONS, TaskOptions, name_of, options_of
from managed_exec.task import CurrentTask, Task

WAIT_S = 30


def solve(x: object, /, *args: object, device: object = None, timeout: object = 1, memory: object = 2) -> object:
    """Have the keywords that an executor would like to have."""
    return x, args, device, timeout, memory


class Solver:
    def __call__(self, x: int) -> int:
        return -x

    @gpu_task
    def method(self, x: int) -> tuple[Solver, int]:
        return self, x

    @staticmethod
    @gpu_task()
    def static(x: int) -> int:
        return x

    @classmethod
    @gpu_task
    def of_class(cls, x: int) -> tuple[type, int]:
        return cls, x

    @gpu_task(priority=1)
    @staticmethod
    def static_below(x: int) -> int:
        return x

    @gpu_task(priority=1)
    @classmethod
    def of_class_below(cls, x: int) -> tuple[type, int]:
        return cls, x


CALLABLES: dict[str, Callable[..., object]] = {
    "function": solve,
    "lambda": lambda: None,
    "builtin": abs,
    "instance": Solver(),
    "partial": functools.partial(solve, 1),
    "bound method": Solver().method,
    "torch function": torch.add,
    "module": torch.nn.Linear(1, 1),
}


class TestGpuTask:
    @pytest.mark.parametrize("form", CALLABLES)
    @pytest.mark.parametrize("mark", [gpu_task, gpu_task()], ids=["bare", "with parentheses"])
    def test_what_is_marked_stays_as_it_is(self, mark: Callable[..., Any], form: str) -> None:
        """Or a second mark, from another thread perhaps, would change what the first one has said."""
        function = CALLABLES[form]
        before = dict(getattr(function, "__dict__", {}))
        task = mark(function)
        assert dict(getattr(function, "__dict__", {})) == before
        assert task is not function
        assert (task.__qualname__, task.__wrapped__) == (name_of(function), function)
        assert not hasattr(task, "weight"), "what an object has is not the function's"
        assert options_of(task.options(priority=1)).priority == 1

    def test_name_and_documentation(self) -> None:
        @gpu_task()
        def documented() -> None:
            """Say something."""

        assert (documented.__name__, documented.__doc__) == ("documented", "Say something.")

    def test_own_keywords_are_never_taken(self, kind: Kind) -> None:
        task = gpu_task()(solve)
        expected = (1, (2,), "d", 9, "m")
        assert task(1, 2, device="d", timeout=9, memory="m") == expected
        with kind.pool(max_workers=1) as pool:
            assert pool.submit(task, 1, 2, device="d", timeout=9, memory="m").result(WAIT_S) == expected
            assert pool.submit(task, 1).result(WAIT_S) == (1, (), None, 1, 2)

    def test_methods(self, kind: Kind) -> None:
        solver = Solver()
        with kind.pool(max_workers=1) as pool:
            assert pool.submit(solver.method, 1).result(WAIT_S) == (solver, 1)
            assert pool.submit(solver.static, 2).result(WAIT_S) == 2
            assert pool.submit(Solver.of_class, 3).result(WAIT_S) == (Solver, 3)
            assert pool.submit(solver.static_below, 4).result(WAIT_S) == 4
            assert pool.submit(solver.of_class_below, 5).result(WAIT_S) == (Solver, 5)
        assert options_of(Solver.static_below).priority == options_of(solver.of_class_below).priority == 1

    def test_is_a_new_task_for_each_mark(self) -> None:
        tasks = [gpu_task(priority=i)(solve) for i in range(3)]
        assert [options_of(task).priority for task in tasks] == [0, 1, 2]
        assert options_of(solve) == options_of(gpu_task(solve)) == TaskOptions()

    def test_keeps_nothing_longer_than_a_function_does(self, kind: Kind) -> None:
        """No cycle, and no frame of its own in a traceback, holds what a lambda closes over, or arguments."""

        class Held:
            pass

        def submit(pool: GPUPoolExecutor) -> tuple[list[weakref.ref[Held]], Future[None]]:
            closed_over, argument = Held(), Held()

            def fails(x: Held) -> None:
                del x
                raise ValueError

            task = gpu_task(priority=1)(lambda x: closed_over and None).options(priority=2)
            assert pool.submit(task, argument).result(WAIT_S) is None
            failed = pool.submit(gpu_task(priority=1)(fails), argument)
            assert isinstance(failed.exception(WAIT_S), ValueError)
            return [weakref.ref(closed_over), weakref.ref(argument)], failed

        gc.disable()
        try:
            with kind.pool(max_workers=1) as pool:
                held, failed = submit(pool)
                assert eventually(lambda: [each() for each in held] == [None, None])
            assert failed.done()
        finally:
            gc.enable()

    @pytest.mark.parametrize("mark", [gpu_task, gpu_task()], ids=["bare", "with parentheses"])
    def test_class_stays_one(self, mark: Callable[..., object]) -> None:
        with pytest.raises(
            TypeError, match=r"gpu_task: <class 'dict'> is a class, .* a function that makes an instance"
        ):
            mark(dict)

    @pytest.mark.parametrize("thing", [3, "2GiB", [solve]], ids=identity)
    def test_what_cannot_be_called(self, thing: object) -> None:
        for mark in (gpu_task, gpu_task()):
            with pytest.raises(TypeError, match=r"gpu_task: expected a callable, got .*; options are keywords"):
                mark(thing)  # type: ignore[operator]

    def test_parentheses_with_nothing_to_mark(self) -> None:
        with pytest.raises(TypeError, match="expected a callable, got None"):
            gpu_task()(None)  # type: ignore[type-var]

    def test_function_is_not_a_keyword(self) -> None:
        with pytest.raises(TypeError):
            gpu_task(fn=solve)  # type: ignore[call-overload]

    def test_unknown_option(self) -> None:
        with pytest.raises(TypeError, match="colour"):
            gpu_task(colour="red")  # type: ignore[call-overload]


class TestCurrentTask:
    def test_not_in_an_initializer_nor_a_callback(self, kind: Kind) -> None:
        seen: list[object] = []
        gate = threading.Event()
        with kind.pool(max_workers=1, initializer=lambda: seen.append(current_task())) as pool:
            future = pool.submit(gate.wait, WAIT_S)
            future.add_done_callback(lambda _: seen.append(current_task()))
            gate.set()
            future.result(WAIT_S)
        assert seen == [None, None]

    def test_threads_of_a_task_are_not_the_task(self, kind: Kind) -> None:
        """Not even where they run in its context: the binding is the thread's, not a context variable."""

        def task() -> list[object]:
            seen: list[object] = []
            context = contextvars.copy_context()
            thread = threading.Thread(target=context.run, args=(lambda: seen.append(current_task()),))
            thread.start()
            thread.join()
            return seen

        with kind.pool(max_workers=1) as pool:
            assert pool.submit(task).result(WAIT_S) == [None]

    def test_same_through_calls_generators_and_an_event_loop(self, kind: Kind) -> None:
        async def ask() -> CurrentTask | None:
            await asyncio.sleep(0)
            return current_task()

        def task() -> list[CurrentTask | None]:
            return [current_task(), *(current_task() for _ in range(2)), asyncio.run(ask())]

        with kind.pool(max_workers=1) as pool:
            seen = pool.submit(task).result(WAIT_S)
        assert isinstance(seen[0], CurrentTask)
        assert set(seen) == {seen[0]}

    def test_ids_follow_the_order_of_submission(self, kind: Kind) -> None:
        with kind.pool(max_workers=4) as pool:
            ids = [future.result(WAIT_S).id for future in [pool.submit(current_task) for _ in range(32)]]
        assert ids == list(range(32))

    def test_each_of_several_at_once_sees_itself(self, kind: Kind) -> None:
        together = threading.Barrier(8)

        def task() -> tuple[CurrentTask | None, CurrentTask | None]:
            before = current_task()
            together.wait(WAIT_S)
            return before, current_task()

        with kind.pool(max_workers=8) as pool:
            pairs = [future.result(WAIT_S) for future in [pool.submit(task) for _ in range(8)]]
        assert all(before == after for before, after in pairs)
        assert sorted(before.id for before, _ in pairs) == list(range(8))

    def test_two_pools_nested_three_deep(self, kind: Kind) -> None:
        with kind.pool(max_workers=3) as outer, kind.pool(max_workers=3) as inner:

            def descend(depth: int) -> list[int]:
                before = current_task()
                below = (inner, outer)[depth % 2].submit(descend, depth - 1).result(WAIT_S) if depth else []
                assert current_task() == before
                return [before.id, *below]

            assert outer.submit(descend, 2).result(WAIT_S) == [0, 0, 1]

    def test_is_a_plain_record(self, kind: Kind) -> None:
        with kind.pool(max_workers=1) as pool:
            current = pool.submit(current_task).result(WAIT_S)
        assert current._fields[:3] == ("device", "stream", "id")
        with pytest.raises(AttributeError):
            current.id = 5


class TestTask:
    def test_has_no_room_for_anything_else(self) -> None:
        task = Task(0, abs, (-1,), {}, None, None, None)
        assert not hasattr(task, "__dict__")

    def test_drop_call(self) -> None:
        task = Task(7, solve, (1,), {"device": 2}, contextvars.copy_context(), None, None)
        task.drop_call()
        assert (task.id, task.fn, task.args, task.kwargs, task.context) == (7, None, None, None, None)
        assert not task.future.done()


def test_a_mark_on_what_answers_any_name_with_anything() -> None:
    class Proxy:
        def __getattr__(self, name: str) -> Proxy:
            return Proxy()

        def __call__(self, x: int) -> int:
            return x + 1

    assert gpu_task(priority=1)(Proxy())(3) == 4
    assert gpu_task(Proxy())(3) == 4
    assert options_of(Proxy()) is NO_OPTIONS


def test_a_mark_on_what_raises_at_any_name() -> None:
    class Remote:
        def __getattr__(self, name: str) -> None:
            raise KeyError(name)

        def __call__(self, x: int) -> int:
            return x + 1

    assert options_of(Remote()) is NO_OPTIONS
    marked = gpu_task(priority=1)(Remote())
    assert marked(3) == 4
    assert options_of(marked).priority == 1
    with GPUPoolExecutor(1, devices="cpu") as pool:
        assert pool.submit(Remote(), 3).result(60) == 4
