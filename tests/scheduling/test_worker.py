"""What a worker guarantees: the order in which it gives things back, and that it survives its tasks."""

from __future__ import annotations

import asyncio
import concurrent.futures
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future

import pytest
import torch
from conftest import Kind, allocated_bytes, identity

from managed_exec import GPUPoolExecutor, current_task, sim
from managed_exec.errors import PlacementError
from managed_exec.scheduling.placement import DeviceSnapshot, PlacementRequest, least_loaded

WAIT_S = 30


class Stop(BaseException):
    pass


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")

    __repr__ = __str__


def raising(error: BaseException) -> None:
    raise error


def looping() -> BaseException:
    """Return an error that is its own cause."""
    first, second = torch.OutOfMemoryError("first"), RuntimeError("second")
    first.__cause__, second.__context__ = second, first
    return first


ERRORS: dict[str, BaseException] = {
    "SystemExit": SystemExit(3),
    "KeyboardInterrupt": KeyboardInterrupt(),
    "GeneratorExit": GeneratorExit(),
    "BaseException": Stop(),
    "StopIteration": StopIteration(1),
    "CancelledError": CancelledError(),
    "asyncio.CancelledError": asyncio.CancelledError(),
    "TimeoutError": TimeoutError(),
    "Unprintable": Unprintable(),
    "OutOfMemoryError": torch.OutOfMemoryError("of the task's own making"),
    "AcceleratorError": torch.AcceleratorError("likewise"),
    "in a circle": looping(),
    "PlacementError": PlacementError("of a pool within the task"),
    "RecursionError": RecursionError(),
    "MemoryError": MemoryError(),
}


def bookings(pool: GPUPoolExecutor) -> int:
    return sum(snapshot.running for snapshot in pool._loads.snapshots())


def thread_id() -> int:
    return threading.get_ident()


class TestSurvival:
    @pytest.mark.parametrize("name", ERRORS)
    def test_the_very_error_is_in_the_future_and_the_worker_goes_on(self, kind: Kind, name: str) -> None:
        error = ERRORS[name]
        with kind.pool(max_workers=1) as pool:
            worker = pool.submit(thread_id).result(WAIT_S)
            assert pool.submit(raising, error).exception(WAIT_S) is error
            assert bookings(pool) == 0
            assert pool.submit(thread_id).result(WAIT_S) == worker
        error.__traceback__ = None

    def test_same_error_from_many_tasks(self, kind: Kind) -> None:
        error = ValueError("shared")
        with kind.pool(max_workers=4) as pool:
            futures = [pool.submit(raising, error) for _ in range(20)]
            assert all(future.exception(WAIT_S) is error for future in futures)
            assert bookings(pool) == 0
        error.__traceback__ = None

    def test_exit_in_a_task(self, kind: Kind) -> None:
        with kind.pool(max_workers=1) as pool:
            error = pool.submit(sys.exit, 3).exception(WAIT_S)
            assert isinstance(error, SystemExit)
            assert error.code == 3
            assert list(pool.map(str, range(3), timeout=WAIT_S)) == ["0", "1", "2"]

    def test_arguments_that_do_not_fit(self, kind: Kind) -> None:
        with kind.pool(max_workers=1) as pool:
            assert isinstance(pool.submit(abs).exception(WAIT_S), TypeError)
            assert isinstance(pool.submit("not a function").exception(WAIT_S), TypeError)  # type: ignore[arg-type]
            assert pool.submit(abs, -1).result(WAIT_S) == 1

    def test_out_of_memory_while_a_frame_of_the_task_still_runs(self, simulator: Kind) -> None:
        """Frames that run cannot be cleared; here one of another thread."""
        gate, inside = threading.Event(), threading.Event()
        errors: list[BaseException] = []

        def hold_on() -> None:
            try:
                torch.ones(10**9, device="sim:0")
            except torch.OutOfMemoryError as error:
                errors.append(error)
                inside.set()
                gate.wait(WAIT_S)

        thread = threading.Thread(target=hold_on)
        thread.start()
        assert inside.wait(WAIT_S)
        with simulator.pool(max_workers=1, devices=1) as pool:
            assert pool.submit(raising, errors[0]).exception(WAIT_S) is errors[0]
            assert pool.submit(abs, -1).result(WAIT_S) == 1
        gate.set()
        thread.join()
        assert allocated_bytes() == 0

    def test_out_of_memory_in_the_words_of_the_task_holds_no_device_memory(self, simulator: Kind) -> None:
        def task() -> None:
            held = torch.ones(2**20, device="cuda")
            try:
                torch.ones(10**9, device="cuda")
            except torch.OutOfMemoryError as error:
                raise RuntimeError(f"no room beside {held.numel()} values") from error

        with simulator.pool(max_workers=1, devices=1) as pool:
            future = pool.submit(task)
            assert "1048576" in str(future.exception(WAIT_S))
            held_bytes = allocated_bytes()
            del future
        assert held_bytes == 0

    @pytest.mark.parametrize("error", [ValueError("callback"), Unprintable()], ids=["plain", "unprintable"])
    def test_done_callback_that_fails(self, kind: Kind, error: Exception, caplog: pytest.LogCaptureFixture) -> None:
        seen: list[int] = []
        with kind.pool(max_workers=1) as pool:
            gate = threading.Event()
            future = pool.submit(gate.wait, WAIT_S)
            future.add_done_callback(lambda _: raising(error))
            future.add_done_callback(lambda _: seen.append(bookings(pool)))
            gate.set()
            assert future.result(WAIT_S)
            assert pool.submit(abs, -1).result(WAIT_S) == 1
        assert seen == [0], "the other callbacks are called"
        assert "exception calling callback" in caplog.text

    @pytest.mark.parametrize("fails", [False, True], ids=["after a result", "after an error"])
    def test_done_callback_that_exits(self, kind: Kind, fails: bool) -> None:
        """The standard pool loses the worker, and with its last worker every later task."""
        with kind.pool(max_workers=1) as pool:
            gate = threading.Event()
            future = pool.submit(lambda: gate.wait(WAIT_S) and fails and raising(ValueError()))
            future.add_done_callback(lambda _: sys.exit(3))
            gate.set()
            assert (future.exception(WAIT_S) is not None) is fails
            later = pool.submit(abs, -1)
            try:
                assert later.result(5) == 1
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def test_cancelled_tasks_are_not_run_nor_booked(self, simulator: Kind) -> None:
        gate, started = threading.Event(), threading.Event()
        with simulator.pool(max_workers=1) as pool:
            running = pool.submit(lambda: started.set() or gate.wait(WAIT_S))
            assert started.wait(WAIT_S)
            pending = [pool.submit(gate.set) for _ in range(10)]
            assert all(future.cancel() for future in pending)
            assert bookings(pool) == 1
            assert not gate.is_set()
            gate.set()
            assert running.result(WAIT_S)
            last = pool.submit(current_task).result(WAIT_S)
            assert last is not None
            assert last.id == 11
            assert pool._loads._placed == 2


class TestOrder:
    """What holds when the future becomes done, as its callbacks see it in the worker's thread."""

    def observe(
        self, kind: Kind, task: Callable[[object], object], look: Callable[[GPUPoolExecutor], object]
    ) -> object:
        seen: list[object] = []
        with kind.pool(max_workers=1) as pool:
            gate = threading.Event()
            future = pool.submit(lambda x: gate.wait(WAIT_S) and task(x), 1)
            future.add_done_callback(lambda _: seen.append(look(pool)))
            gate.set()
            future.exception(WAIT_S)
        return seen[0]

    @pytest.mark.parametrize("fails", [False, True], ids=["result", "error"])
    def test_booking_is_given_back(self, kind: Kind, fails: bool) -> None:
        assert self.observe(kind, lambda _: fails and raising(ValueError()), bookings) == 0

    @pytest.mark.parametrize("fails", [False, True], ids=["result", "error"])
    def test_context_is_left(self, kind: Kind, fails: bool) -> None:
        def look(_: GPUPoolExecutor) -> tuple[object, ...]:
            return current_task(), torch._C._len_torch_function_stack(), torch.is_grad_enabled()

        def task(_: object) -> None:
            torch.set_grad_enabled(False)
            if fails:
                raise ValueError

        assert self.observe(kind, task, look) == (None, 0, True)

    @pytest.mark.parametrize("fails", [False, True], ids=["result", "error"])
    def test_arguments_are_dropped(self, kind: Kind, fails: bool) -> None:
        class Argument:
            pass

        alive: list[object] = []
        gate = threading.Event()

        def task(argument: Argument) -> None:
            gate.wait(WAIT_S)
            del argument  # a failure keeps the locals of the task, which are the task's own matter
            if fails:
                raise ValueError

        with kind.pool(max_workers=1) as pool:
            argument = Argument()
            reference = weakref.ref(argument)
            future = pool.submit(task, argument)
            future.add_done_callback(lambda _: alive.append(reference()))
            del argument
            gate.set()
            future.exception(WAIT_S)
        assert alive == [None]

    def test_device_is_booked_while_the_task_runs(self, simulator: Kind) -> None:
        with simulator.pool(max_workers=1) as pool:
            counts = pool.submit(lambda: [snapshot.running for snapshot in pool._loads.snapshots()]).result(WAIT_S)
        assert sorted(counts) == [0, 0, 0, 1]

    def test_device_stays_booked_until_its_work_is_done(self, simulator: Kind) -> None:
        streams: list[torch.Stream] = []
        gate, ready = threading.Event(), threading.Event()

        def task() -> torch.Tensor:
            current = current_task()
            assert current is not None
            streams.append(current.stream)
            source = torch.full((1000,), 7.0).pin_memory()
            ready.set()
            assert gate.wait(WAIT_S)
            return source.to("cuda", non_blocking=True)

        with simulator.pool(max_workers=1) as pool:
            future: Future[torch.Tensor] = pool.submit(task)
            assert ready.wait(WAIT_S)
            with sim.hold_stream(streams[0]):
                gate.set()
                with pytest.raises(concurrent.futures.TimeoutError):
                    future.result(timeout=0.05)
                assert bookings(pool) == 1
            future.result(WAIT_S)
            assert bookings(pool) == 0
        del future


class TestPlacement:
    def test_worker_stays_on_its_device(self, simulator: Kind) -> None:
        """Its stream and what it warmed up are there."""
        with simulator.pool(max_workers=1) as pool:
            devices = {pool.submit(lambda: current_task().device).result(WAIT_S) for _ in range(10)}
        assert len(devices) == 1

    @pytest.mark.parametrize("placement", ["round-robin", lambda devices, request: request.sequence % 4])
    def test_may_send_it_elsewhere(self, simulator: Kind, placement: object) -> None:
        with simulator.pool(max_workers=1, placement=placement) as pool:
            devices = [pool.submit(lambda: current_task().device.index).result(WAIT_S) for _ in range(8)]
        assert devices == [0, 1, 2, 3] * 2

    def test_own_placement_sees_each_device(self, simulator: Kind) -> None:
        seen: list[tuple[Sequence[DeviceSnapshot], PlacementRequest]] = []

        def placement(devices: Sequence[DeviceSnapshot], request: PlacementRequest) -> int:
            seen.append((devices, request))
            return 2

        with simulator.pool(max_workers=1, placement=placement) as pool:
            assert [pool.submit(lambda: current_task().device.index).result(WAIT_S) for _ in range(2)] == [2, 2]
        assert [str(snapshot.device) for snapshot in seen[0][0]] == [f"sim:{i}" for i in range(4)]
        assert [request[:2] for _, request in seen] == [(0, None), (1, 2)]

    @pytest.mark.parametrize(
        "wrong",
        [lambda d, r: None, lambda d, r: "0", lambda d, r: 1.0, lambda d, r: 9, lambda d, r: raising(KeyError("k"))],
        ids=["None", "text", "float", "not offered", "raises"],
    )
    def test_wrong_placement_fails_the_task_alone(self, simulator: Kind, wrong: Callable[..., int]) -> None:
        ran: list[int] = []
        wrongs = [True, False, True, False]

        def placement(devices: Sequence[DeviceSnapshot], request: PlacementRequest) -> int:
            return wrong(devices, request) if wrongs.pop(0) else least_loaded(devices, request)

        with simulator.pool(max_workers=1, placement=placement) as pool:
            for i in range(2):
                assert isinstance(pool.submit(ran.append, -1).exception(WAIT_S), PlacementError)
                assert bookings(pool) == 0
                pool.submit(ran.append, i).result(WAIT_S)
        assert ran == [0, 1]

    @pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), Stop()], ids=identity)
    def test_placement_that_exits_fails_the_task_alone(self, simulator: Kind, error: BaseException) -> None:
        errors = [error]

        def placement(devices: Sequence[DeviceSnapshot], request: PlacementRequest) -> int:
            if errors:
                raise errors.pop()
            return 0

        with simulator.pool(max_workers=1, placement=placement) as pool:
            failing, later = pool.submit(abs, -1), pool.submit(abs, -2)
            try:
                caught = failing.exception(5)
                assert isinstance(caught, PlacementError) or caught is error
                assert later.result(WAIT_S) == 2
                assert bookings(pool) == 0
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def test_placement_may_use_the_pool(self, simulator: Kind) -> None:
        """It is called with no lock held: it may look at the loads, submit, and wait for what it submitted."""
        nested: list[object] = []

        def placement(devices: Sequence[DeviceSnapshot], request: PlacementRequest) -> int:
            if not nested:
                nested.append("now")
                nested.append(pool.submit(lambda: current_task().device.index).result(WAIT_S))
                nested.append(bookings(pool))
            return 1

        with simulator.pool(max_workers=2, placement=placement) as pool:
            assert pool.submit(lambda: current_task().device.index).result(WAIT_S) == 1
        assert nested == ["now", 1, 0]

    def test_placement_that_blocks_stops_nobody_else(self, simulator: Kind) -> None:
        gate, asked = threading.Event(), threading.Event()

        def placement(devices: Sequence[DeviceSnapshot], request: PlacementRequest) -> int:
            if not asked.is_set():
                asked.set()
                assert gate.wait(WAIT_S)
            return least_loaded(devices, request)

        with simulator.pool(max_workers=2, placement=placement) as pool:
            blocked = pool.submit(abs, -1)
            assert asked.wait(WAIT_S)
            assert [pool.submit(abs, -i).result(WAIT_S) for i in range(5)] == list(range(5))
            assert not blocked.done()
            gate.set()
            assert blocked.result(WAIT_S) == 1

    def test_own_placement_under_load(self, simulator: Kind) -> None:
        """Never more than two tasks on a device, and all bookings given back, failures among them."""
        lock = threading.Lock()
        running, most = [0] * 4, [0] * 4

        def placement(devices: Sequence[DeviceSnapshot], request: PlacementRequest) -> int:
            assert all(snapshot.running < 2 for snapshot in devices)
            return devices[-1].position

        def task(i: int) -> int:
            index = current_task().device.index
            with lock:
                running[index] += 1
                most[index] = max(most[index], running[index])
            with lock:
                running[index] -= 1
            return 1 // (i % 3)

        with simulator.pool(tasks_per_device=2, placement=placement) as pool:
            futures = [pool.submit(task, i) for i in range(300)]
            failures = [future.exception(WAIT_S) for future in futures]
            assert bookings(pool) == 0
        assert [isinstance(failure, ZeroDivisionError) for failure in failures] == [i % 3 == 0 for i in range(300)]
        assert all(isinstance(failure, ZeroDivisionError) or failure is None for failure in failures)
        assert max(most) <= 2


@pytest.mark.parametrize("answer", [7, None, torch.device("cpu")])
def test_wrong_placement_is_noticed_with_one_device_too(answer: object) -> None:
    with GPUPoolExecutor(1, devices="cpu", placement=lambda devices, request: answer) as pool:
        assert isinstance(pool.submit(abs, 1).exception(), PlacementError)
