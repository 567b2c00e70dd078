"""``map(..., in_flight=)``: what is drawn, submitted and held at once, and that the rest of ``map`` stays as it is."""

from __future__ import annotations

import concurrent.futures
import gc
import itertools
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from conftest import Kind, eventually

from managed_exec import GPUPoolExecutor, gpu_task
from managed_exec.streaming import CALL_BYTES, bytes_in

WAIT_S = 30
KIB = 1024


def block(n_bytes: int, value: int = 0) -> torch.Tensor:
    return torch.full((n_bytes,), value, dtype=torch.uint8)


class Blocks:
    """An iterable of tensors that knows how many it gave, and how many of those still exist."""

    def __init__(self, n_bytes: int, count: int | None = None) -> None:
        self.n_bytes = n_bytes
        self.count = count
        self.given = 0
        self.existing: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
        self.most = 0  # that existed at once

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.count is None or self.given < self.count:
            yield self._make()

    def _make(self) -> torch.Tensor:
        made = block(self.n_bytes, self.given % 251)
        self.existing.add(made)
        self.given += 1
        self.most = max(self.most, len(self.existing))
        return made


class Gates:
    """Tasks that wait until the test lets them go, each by its number; ends are opened in ``with``."""

    def __init__(self, count: int) -> None:
        self.started = [threading.Event() for _ in range(count)]
        self.open = [threading.Event() for _ in range(count)]

    def __enter__(self) -> Gates:
        return self

    def __exit__(self, *_: object) -> None:
        for gate in self.open:
            gate.set()

    def task(self, number: int, *rest: Any) -> Any:
        self.started[number].set()
        assert self.open[number].wait(WAIT_S)
        return rest[0] if rest else number


class TestBytes:
    def test_tensors_arrays_and_byte_strings_count(self) -> None:
        numpy = pytest.importorskip("numpy")

        @dataclass
        class Record:
            image: torch.Tensor
            label: int

        assert bytes_in(torch.zeros(10, dtype=torch.float64)) == 80
        assert bytes_in(torch.zeros(100, 4)[:10]) == 160, "a view is what its elements take"
        assert bytes_in(numpy.zeros((3, 5), numpy.float32)) == 60
        assert bytes_in(b"12345") == bytes_in(bytearray(5)) == bytes_in(memoryview(b"12345")) == 5
        assert bytes_in([block(7), {"a": (block(5), "text", 3, None)}, Record(block(1), 2), numpy.zeros(1)]) == 21
        assert bytes_in(torch.eye(4).to_sparse()) == 4 * 4 + 2 * 4 * 8
        assert bytes_in(torch.nn.Linear(3, 2)) == 4 * (6 + 2)

    def test_what_has_no_size_counts_nothing(self) -> None:
        assert bytes_in((None, 1, 2.5, "text", object(), range(9), [])) == 0

    def test_one_object_counts_once(self) -> None:
        shared = block(8)
        assert bytes_in((shared, [shared])) == 8


class TestBound:
    def test_first_call_runs_alone_then_as_many_as_fit(self, kind: Kind) -> None:
        blocks = Blocks(KIB, 8)
        with Gates(8) as gates, kind.pool(max_workers=8) as pool:
            results = pool.map(gates.task, range(8), blocks, in_flight=9 * KIB)
            assert blocks.given == 2, "one that runs, one that waits for what its result shows"
            gates.open[0].set()
            assert torch.equal(next(results), block(KIB, 0))
            # Each call takes a block, returns one, and counts another for itself.
            for number in (1, 2, 3):
                assert gates.started[number].wait(WAIT_S)
            assert blocks.given == 5
            for number in range(1, 8):
                gates.open[number].set()
            assert [int(result[0]) for result in results] == list(range(1, 8))

    @pytest.mark.parametrize("n_bytes", [32 * KIB, "32KiB"])
    def test_results_that_wait_count(self, kind: Kind, n_bytes: int | str) -> None:
        made = threading.Semaphore(0)

        def make(number: int) -> torch.Tensor:
            made.release()
            return block(7 * KIB, number)

        with kind.pool(max_workers=4) as pool:
            drawn = itertools.count()
            results = pool.map(make, drawn, in_flight=n_bytes)
            assert next(results)[0] == 0
            for _ in range(5):
                assert made.acquire(timeout=WAIT_S)
            assert not made.acquire(blocking=False), "four results wait, and a fifth has no room"
            assert [int(next(results)[0]) for _ in range(20)] == list(range(1, 21))
            assert next(drawn) <= 21 + 4 + 1
            results.close()

    def test_arguments_never_exceed_the_bound(self, kind: Kind) -> None:
        blocks = Blocks(KIB, 200)
        with kind.pool(max_workers=3) as pool:
            results = list(pool.map(lambda x: int(x[0]), blocks, in_flight="5KiB"))
        assert results == [number % 251 for number in range(200)]
        assert 2 <= blocks.most <= 5 + 1, "five in flight, and one that was drawn"
        assert eventually(lambda: not blocks.existing)

    def test_call_larger_than_the_bound_runs_alone(self, kind: Kind) -> None:
        running = threading.Semaphore(1)

        def alone(x: torch.Tensor) -> int:
            assert running.acquire(blocking=False)
            running.release()
            return len(x)

        with kind.pool(max_workers=4) as pool:
            assert list(pool.map(alone, Blocks(9 * KIB, 6), in_flight=KIB)) == [9 * KIB] * 6

    def test_later_results_are_expected_as_large_as_the_largest(self, kind: Kind) -> None:
        sizes = [1, 8 * KIB, 1, 1, 1, 1, 1]
        with Gates(len(sizes)) as gates, kind.pool(max_workers=8) as pool:

            def make(number: int) -> torch.Tensor:
                gates.task(number)
                return block(sizes[number])

            results = pool.map(make, range(len(sizes)), in_flight=4 * (KIB + 1))
            gates.open[0].set()
            next(results)
            assert all(started.wait(WAIT_S) for started in gates.started[1:5])
            for number in range(1, 5):
                gates.open[number].set()
                assert not gates.started[5].is_set(), "with any other it would be too much"
                assert len(next(results)) == sizes[number]
            assert gates.started[5].wait(WAIT_S)
            assert not gates.started[6].is_set()
            gates.open[5].set()
            gates.open[6].set()
            assert len(list(results)) == 2

    def test_endless_stream_of_quick_calls_is_bounded(self, kind: Kind) -> None:
        drawn = itertools.count()
        with kind.pool(max_workers=4) as pool:
            results = pool.map(abs, drawn, in_flight=8 * CALL_BYTES)
            assert list(itertools.islice(results, 500)) == list(range(500))
            assert next(drawn) <= 500 + 8 + 1
            results.close()

    def test_slow_call_does_not_let_others_pile_up(self, kind: Kind) -> None:
        with Gates(1) as gates, kind.pool(max_workers=2) as pool:
            drawn = itertools.count(1)
            ran = threading.Semaphore(0)

            def call(number: int) -> int:
                if number == 2:
                    gates.task(0)
                ran.release()
                return number

            results = pool.map(call, drawn, in_flight=8 * CALL_BYTES)
            assert next(results) == 1
            taken: list[int] = []
            taker = threading.Thread(target=lambda: taken.append(next(results)))
            taker.start()
            # The first, and seven beside the second, which waits.
            assert all(ran.acquire(timeout=WAIT_S) for _ in range(8))
            assert not ran.acquire(blocking=False)
            gates.open[0].set()
            taker.join(WAIT_S)
            assert taken == [2]
            results.close()

    def test_taking_results_late_loses_none(self, kind: Kind) -> None:
        with kind.pool(max_workers=4) as pool:
            results = pool.map(block, [KIB] * 100, range(100), in_flight="4KiB")
            assert [int(result[0]) for result in results] == list(range(100))


class TestMap:
    """What the standard ``map`` promises."""

    def test_results_are_in_order(self, kind: Kind) -> None:
        with Gates(3) as gates, kind.pool(max_workers=3) as pool:
            gates.open[0].set()
            results = pool.map(gates.task, range(3), in_flight="1MiB")
            assert next(results) == 0
            assert gates.started[2].wait(WAIT_S), "its result may wait"
            gates.open[2].set()
            gates.open[1].set()
            assert list(results) == [1, 2]

    def test_shortest_iterable_ends_it(self, kind: Kind) -> None:
        with kind.pool(max_workers=2) as pool:
            assert list(pool.map(pow, itertools.count(), [2] * 5, in_flight=1)) == [0, 1, 4, 9, 16]
            assert list(pool.map(pow, [], [2], in_flight=1)) == []
            assert list(pool.map(abs, in_flight=1)) == []
            assert list(pool.map(abs, [-1, -2], chunksize=7, in_flight=1)) == [1, 2]

    def test_timeout(self, kind: Kind) -> None:
        with Gates(3) as gates, kind.pool(max_workers=1) as pool:
            gates.open[0].set()
            results = pool.map(gates.task, range(3), timeout=0.2, in_flight=1)
            with pytest.raises(
                concurrent.futures.TimeoutError, match=r"^result \d did not come in time; \d calls with"
            ):
                list(results)
            assert list(results) == []
            for gate in gates.open:
                gate.set()
            assert pool.submit(abs, -1).result(WAIT_S) == 1
            assert list(pool.map(abs, [-1], timeout=WAIT_S, in_flight=1)) == [1]

    def test_failure_comes_in_its_turn_and_cancels_the_rest(self, kind: Kind) -> None:
        ran: list[int] = []

        def fail_at_two(number: int) -> int:
            ran.append(number)
            if number == 2:
                raise KeyError(number)
            return number

        with kind.pool(max_workers=1) as pool:
            results = pool.map(fail_at_two, itertools.count(), in_flight="1MiB", buffersize=2)
            assert next(results) == 0
            assert next(results) == 1
            with pytest.raises(KeyError):
                next(results)
            with pytest.raises(StopIteration):
                next(results)
        assert ran in ([0, 1, 2], [0, 1, 2, 3])

    def test_close_cancels_what_has_not_started(self, kind: Kind) -> None:
        with Gates(6) as gates, kind.pool(max_workers=1) as pool:
            gates.open[0].set()
            results = pool.map(gates.task, range(6), in_flight="1MiB")
            assert next(results) == 0
            assert gates.started[1].wait(WAIT_S)
            results.close()
            gates.open[1].set()
        assert not any(started.is_set() for started in gates.started[2:])

    def test_iterables_are_drawn_in_the_caller_s_thread(self, kind: Kind) -> None:
        threads: set[threading.Thread] = set()

        def numbers() -> Iterator[int]:
            for number in range(20):
                threads.add(threading.current_thread())
                yield number

        with kind.pool(max_workers=3) as pool:
            assert list(pool.map(abs, numbers(), in_flight=1)) == list(range(20))
        assert threads == {threading.current_thread()}

    @pytest.mark.parametrize("given", [0, 3])
    def test_iterable_that_raises(self, kind: Kind, given: int) -> None:
        def numbers() -> Iterator[int]:
            yield from range(given)
            raise LookupError("no more")

        with kind.pool(max_workers=2) as pool:
            with pytest.raises(LookupError, match="no more"):
                list(pool.map(abs, numbers(), in_flight=1))
            assert pool.submit(abs, -1).result(WAIT_S) == 1

    def test_buffersize_bounds_calls(self, kind: Kind) -> None:
        drawn = itertools.count()
        with kind.pool(max_workers=2) as pool:
            results = pool.map(abs, drawn, in_flight="1GiB", buffersize=4)
            assert [next(results) for _ in range(3)] == [0, 1, 2]
            assert next(drawn) == 3 + 4
            results.close()

    @pytest.mark.parametrize(
        ("options", "error", "text"),
        [
            ({"in_flight": "much"}, ValueError, "in_flight: cannot read 'much'"),
            ({"in_flight": 0}, ValueError, "in_flight: expected a positive amount, got 0"),
            ({"in_flight": 1.5}, TypeError, "in_flight: expected bytes as an int or text"),
            ({"in_flight": 1, "buffersize": 0}, ValueError, "buffersize: expected 1 or more calls"),
            ({"in_flight": 1, "buffersize": 2.0}, TypeError, "buffersize: expected an int or None"),
            ({"in_flight": 1, "buffer": 2}, TypeError, "unexpected keyword argument 'buffer'"),
            ({"buffer": 2}, TypeError, "unexpected keyword argument 'buffer'"),
        ],
    )
    def test_bad_options_submit_nothing(self, options: dict[str, Any], error: type[Exception], text: str) -> None:
        drawn = itertools.count()
        with GPUPoolExecutor(1) as pool, pytest.raises(error, match=text):
            pool.map(abs, drawn, **options)
        assert next(drawn) == 0

    def test_options_of_the_function_hold(self, simulator: Kind) -> None:
        @gpu_task(device=3)
        def where(x: torch.Tensor) -> str:
            return str(x.cuda().device)

        with simulator.pool(max_workers=4) as pool:
            assert set(pool.map(where, Blocks(KIB, 8), in_flight="4KiB")) == {"sim:3"}


class TestEnds:
    """The pool, or the stream, goes away."""

    def test_shutdown_that_cancels_ends_it(self, kind: Kind) -> None:
        with Gates(4) as gates:
            pool = kind.pool(max_workers=1)
            gates.open[0].set()
            results = pool.map(gates.task, range(4), in_flight="1MiB")
            assert next(results) == 0
            assert gates.started[1].wait(WAIT_S)
            pool.shutdown(wait=False, cancel_futures=True)
            gates.open[1].set()
            assert next(results) == 1
            with pytest.raises(concurrent.futures.CancelledError):
                next(results)
            pool.shutdown()

    def test_shutdown_with_more_to_draw_is_an_error(self, kind: Kind) -> None:
        with kind.pool(max_workers=1) as pool:
            results = pool.map(abs, itertools.count(), in_flight="1MiB", buffersize=2)
        with pytest.raises(RuntimeError, match="cannot schedule new futures after shutdown"):
            list(results)

    def test_pool_lives_as_long_as_its_stream(self, kind: Kind) -> None:
        results = kind.pool(max_workers=1).map(abs, range(-50, 0), in_flight="1MiB", buffersize=3)
        gc.collect()
        assert list(results) == list(range(50, 0, -1))

    def test_nothing_is_held_of_what_was_handed_out(self, kind: Kind) -> None:
        blocks = Blocks(KIB, 3)

        class Result:
            pass

        with kind.pool(max_workers=1) as pool:
            gc.disable()
            try:
                results = pool.map(lambda _: Result(), blocks, in_flight="1MiB")
                seen = [weakref.ref(next(results)) for _ in range(3)]
                assert [ref() for ref in seen] == [None] * 3
                assert eventually_without_collecting(lambda: not blocks.existing)
            finally:
                gc.enable()

    def test_abandoned_stream_leaves_nothing(self, kind: Kind) -> None:
        blocks = Blocks(KIB, 6)
        with kind.pool(max_workers=1) as pool:
            gc.disable()
            try:
                results = pool.map(lambda x: x, blocks, in_flight="1MiB")
                next(results)
                del results
                assert eventually_without_collecting(lambda: not blocks.existing)
            finally:
                gc.enable()


def eventually_without_collecting(condition: Any) -> bool:
    """Wait for *condition*: reference counts alone have to bring it about."""
    done = threading.Event()
    for _ in range(1000):
        if condition():
            return True
        done.wait(0.01)
    return False
