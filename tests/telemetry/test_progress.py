"""``map(..., progress=True)``: it is the same map, with a bar beside it; and bars of tqdm's own around a pool."""

from __future__ import annotations

import gc
import io
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures import as_completed
from typing import Any

import pytest
from conftest import Kind, eventually
from screen import HIDE_CURSOR, RICH, SHOW_CURSOR, WAIT_S, Screen, remove, stand_in

from managed_exec import GPUPoolExecutor
from managed_exec.telemetry import progress

IN_FLIGHT = [None, "1MiB"]


def double(x: int) -> int:
    return 2 * x


def bars() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.endswith("_bar")]


def last_line(screen: Screen) -> str:
    return screen.getvalue().splitlines()[-1]


@pytest.mark.parametrize("in_flight", IN_FLIGHT)
class TestLines:
    def test_counts(self, kind: Kind, monkeypatch: pytest.MonkeyPatch, in_flight: str | None) -> None:
        pipe = stand_in(monkeypatch, is_terminal=False)
        with kind.pool(max_workers=2) as pool:
            results = pool.map(double, range(20), range(0), progress=True, in_flight=in_flight)
            assert list(results) == []
            assert "double: 0 of 0 calls" in last_line(pipe)
            assert list(pool.map(double, range(20), progress=True, in_flight=in_flight)) == [2 * i for i in range(20)]
        assert last_line(pipe).startswith("double: 20 of 20 calls, ")
        assert f"; running on {pool._devices[0].torch_device} 0" in last_line(pipe)
        assert not bars()

    def test_unknown_length(self, kind: Kind, monkeypatch: pytest.MonkeyPatch, in_flight: str | None) -> None:
        pipe = stand_in(monkeypatch, is_terminal=False)

        class Stream:
            def __len__(self) -> int:
                raise TypeError("no length")

            def __iter__(self) -> Iterator[int]:
                return iter(range(3))

        with kind.pool(max_workers=1) as pool:
            for stream in (iter(range(3)), Stream()):
                assert list(pool.map(double, stream, progress=True, in_flight=in_flight)) == [0, 2, 4]
                assert last_line(pipe).startswith("double: 3 of 3 calls, ")

    def test_errors(self, kind: Kind, monkeypatch: pytest.MonkeyPatch, in_flight: str | None) -> None:
        pipe = stand_in(monkeypatch, is_terminal=False)
        with kind.pool(max_workers=1) as pool:
            results = pool.map(int, ["1", "x", "2"], progress=True, in_flight=in_flight)
            assert next(results) == 1
            with pytest.raises(ValueError, match="invalid literal"):
                next(results)
            assert not bars()
            assert list(results) == []
        assert ", 1 failed; running on" in last_line(pipe)
        assert last_line(pipe).startswith("int: ")

    def test_arguments_that_raise(self, kind: Kind, monkeypatch: pytest.MonkeyPatch, in_flight: str | None) -> None:
        stand_in(monkeypatch, is_terminal=False)

        def arguments() -> Iterator[int]:
            yield 1
            raise ValueError("mine")

        with kind.pool(max_workers=1) as pool:
            with pytest.raises(ValueError, match="mine"):
                list(pool.map(double, arguments(), progress=True, in_flight=in_flight))
            assert not bars()

    def test_timeout(self, kind: Kind, monkeypatch: pytest.MonkeyPatch, in_flight: str | None) -> None:
        stand_in(monkeypatch, is_terminal=False)
        go = threading.Event()
        with kind.pool(max_workers=1) as pool:
            results = pool.map(go.wait, [WAIT_S] * 2, progress=True, in_flight=in_flight, timeout=0.05)
            with pytest.raises(FutureTimeoutError):
                next(results)
            assert not bars()
            go.set()

    def test_left_early(self, kind: Kind, monkeypatch: pytest.MonkeyPatch, in_flight: str | None) -> None:
        pipe = stand_in(monkeypatch, is_terminal=False)
        go, closed = threading.Event(), threading.Event()

        def task(i: int) -> int:
            assert i == 0 or go.wait(WAIT_S)
            return i

        def leave(results: Any) -> None:
            for _ in results:
                break

        def close(results: Any) -> None:
            next(results)
            results.close()
            assert not bars()

        def drop(results: Any) -> None:
            pass  # without a look at it

        with kind.pool(max_workers=1) as pool:
            for end in (leave, close, drop):
                closed.clear()
                go.clear()
                end(pool.map(task, range(9), progress=True, in_flight=in_flight))
                gc.collect()
                assert eventually(lambda: not bars())
                go.set()
        assert "of 9 calls" in last_line(pipe)

    def test_what_is_submitted_when(self, kind: Kind, monkeypatch: pytest.MonkeyPatch, in_flight: str | None) -> None:
        """As much is drawn from the arguments before the first result is asked for as without a bar."""
        stand_in(monkeypatch, is_terminal=False)
        go = threading.Event()

        def task(i: int) -> int:
            assert go.wait(WAIT_S)
            return i

        drawn: dict[bool, int] = {}
        with kind.pool(max_workers=1) as pool:
            for with_bar in (False, True):
                go.clear()
                counter = itertools.count()
                results = pool.map(task, (next(counter) for _ in range(50)), progress=with_bar, in_flight=in_flight)
                drawn[with_bar] = next(counter)
                go.set()
                assert len(list(results)) in (50, 49), "one number was taken by this test"
        assert drawn[False] == drawn[True]


class TestTerminal:
    def test_rich(self, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
        terminal = stand_in(monkeypatch, is_terminal=True)
        go = threading.Event()

        def task(i: int) -> int:
            assert i < 2 or go.wait(WAIT_S)
            return i

        with kind.pool(max_workers=2) as pool:
            results = pool.map(task, range(4), progress=True)
            terminal.wait_for("2/4")
            terminal.wait_for(f"{pool._devices[0].torch_device} ")
            go.set()
            assert list(results) == [0, 1, 2, 3]
        text = terminal.getvalue()
        assert "4/4" in text
        assert "<locals>.task" in text
        assert text.rindex(SHOW_CURSOR) > text.rindex(HIDE_CURSOR)
        assert sys.stderr is terminal

    def test_tqdm_where_there_is_no_rich(self, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
        tqdm = pytest.importorskip("tqdm", reason="tqdm is of the extra test").tqdm
        monkeypatch.setattr(tqdm, "monitor_interval", 0)  # or it keeps a thread for all its bars to come
        remove(monkeypatch, *RICH)
        terminal = stand_in(monkeypatch, is_terminal=True)
        with kind.pool(max_workers=1) as pool:
            assert list(pool.map(double, range(4), progress=True)) == [0, 2, 4, 6]
            assert list(pool.map(double, iter(range(3)), progress=True)) == [0, 2, 4]
            with pytest.raises(ValueError, match="invalid"):
                list(pool.map(int, ["x"], progress=True))
        text = terminal.getvalue()
        for part in ("double: 100%", "4/4", "3/3", "1 failed", f"{pool._devices[0].torch_device} 0"):
            assert part in text

    def test_lines_where_there_is_neither(self, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
        remove(monkeypatch, "tqdm", *RICH)
        terminal = stand_in(monkeypatch, is_terminal=True)
        with kind.pool(max_workers=1) as pool:
            list(pool.map(double, range(4), progress=True))
        assert last_line(terminal).startswith("double: 4 of 4 calls")


class TestEnd:
    def test_of_the_pool(self, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
        """The bar ends with the pool; the results can be taken later."""
        pipe = stand_in(monkeypatch, is_terminal=False)
        with kind.pool(max_workers=1) as pool:
            results = pool.map(double, range(4), progress=True)
        assert not bars()
        assert "4 of 4 calls" in last_line(pipe)
        assert list(results) == [0, 2, 4, 6]

    @pytest.mark.parametrize("in_flight", IN_FLIGHT)
    def test_of_a_pool_that_is_shut_down(
        self, kind: Kind, monkeypatch: pytest.MonkeyPatch, in_flight: str | None
    ) -> None:
        stand_in(monkeypatch, is_terminal=False)
        pool = kind.pool(max_workers=1)
        pool.shutdown()
        for with_bar in (False, True):
            with pytest.raises(RuntimeError, match="cannot schedule new futures after shutdown"):
                pool.map(double, range(3), progress=with_bar, in_flight=in_flight)
        assert list(pool.map(double, [], progress=True, in_flight=in_flight)) == []

    def test_of_a_pool_nobody_holds(self, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
        stand_in(monkeypatch, is_terminal=False)
        results = kind.pool(max_workers=1).map(double, range(4), progress=True)
        gc.collect()
        assert list(results) == [0, 2, 4, 6]
        del results
        gc.collect()
        assert eventually(lambda: not bars())


class Tee:
    """Stands for a stream, and cannot say whether it is a terminal."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None: ...


@pytest.mark.parametrize("stream", ["none", "tee", "closed"])
def test_odd_standard_error(kind: Kind, monkeypatch: pytest.MonkeyPatch, stream: str) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", {"none": None, "tee": Tee(), "closed": closed}[stream])
    with kind.pool(max_workers=1) as pool:
        assert list(pool.map(double, range(3), progress=True)) == [0, 2, 4]


def test_not_a_flag(kind: Kind) -> None:
    with kind.pool(max_workers=1) as pool, pytest.raises((TypeError, ValueError), match="progress"):
        pool.map(double, [1], progress="bar")  # type: ignore[arg-type]


def test_a_call_that_was_cancelled_is_not_done() -> None:
    counts = progress.CallCounts("f", 2)
    with GPUPoolExecutor(1, devices="cpu") as pool:
        go = threading.Event()
        pool.submit(go.wait, WAIT_S)
        waiting = pool.submit(abs, 1)
        waiting.add_done_callback(counts.note_done)
        assert waiting.cancel()
        go.set()
    assert counts.done == 0


class TestTqdmItself:
    @pytest.mark.parametrize(
        "iterate",
        [
            lambda pool: as_completed([pool.submit(double, i) for i in range(30)]),
            lambda pool: pool.map(double, range(30)),
            lambda pool: pool.map(double, range(30), in_flight="1MiB"),
        ],
        ids=["as_completed", "map", "map-in-flight"],
    )
    def test_around_a_pool(
        self, kind: Kind, monkeypatch: pytest.MonkeyPatch, iterate: Callable[[GPUPoolExecutor], Iterator[Any]]
    ) -> None:
        tqdm = pytest.importorskip("tqdm", reason="tqdm is of the extra test").tqdm
        monkeypatch.setattr(tqdm, "monitor_interval", 0)
        out = Screen()
        with kind.pool(max_workers=2) as pool:
            found = list(tqdm(iterate(pool), total=30, file=out))
        assert len(found) == 30
        assert "30/30" in out.getvalue()
