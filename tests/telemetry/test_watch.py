"""The live view of a pool: what it shows, and that it ends whatever ends around it."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import types
import weakref
from typing import Any

import pytest
import torch
from conftest import Kind, eventually
from screen import HIDE_CURSOR, RICH, SHOW_CURSOR, WAIT_S, Screen, remove, stand_in

from managed_exec import GPUPoolExecutor, MemoryPolicy, gpu_task, sim
from managed_exec.telemetry import watch
from managed_exec.telemetry.statistics import PoolStatistics

MIB = 2**20


def threads() -> list[threading.Thread]:
    """The threads that draw."""
    return [thread for thread in threading.enumerate() if thread.name.endswith("_view")]


class TestLines:
    def test_what_happens(self, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
        pipe = stand_in(monkeypatch, is_terminal=False)
        go = threading.Event()
        with kind.pool(max_workers=1) as pool:
            futures = [pool.submit(go.wait, WAIT_S) for _ in range(3)]
            with pool.watch(0.05) as view:
                assert isinstance(view, watch.View)
                pipe.wait_for("queued 2, running 1, done 0 (0.0 a second)  |  ", times=2)
                go.set()
                futures[2].result(WAIT_S)
                pipe.wait_for("queued 0, running 0, done 3")
            assert not threads()
        lines = pipe.getvalue().splitlines()
        assert all(line[2] == line[5] == ":" for line in lines), "each begins with the time of day"
        assert f"{pool._devices[0].torch_device} 1 running, " in lines[0]
        assert "failed" not in pipe.getvalue()

    def test_memory_and_failures(self, simulator: Kind) -> None:
        sim.enable(devices=2, memory="4MiB")
        out = Screen(is_terminal=False)
        with GPUPoolExecutor(1, devices=2, memory=MemoryPolicy(min_bytes=1024)) as pool:
            kept = pool.submit(gpu_task(device=0)(lambda: torch.ones(MIB // 4, device="cuda"))).result(WAIT_S)
            kept.spill("host")
            pool.submit(int, "x").exception(WAIT_S)
            with pool.watch(file=out):
                pass
        assert "done 2 (0.0 a second), failed 1" in out.getvalue()
        assert "sim:0 0 running, 0 B of 4.0 MiB, host 1.0 MiB  |  sim:1 0 running, 0 B of 4.0 MiB" in out.getvalue()
        del kept

    def test_rates(self, kind: Kind) -> None:
        with kind.pool(max_workers=1) as pool:
            before = pool.statistics()
            list(pool.map(abs, range(6)))
            now = pool.statistics()
        rate = 6 / (now.at_s - before.at_s)
        assert f"done 6 ({rate:.1f} a second)" in watch.page(now, before).plain
        assert "done 6 (0.0 a second)" in watch.page(now, None).plain

    def test_on_a_terminal_without_rich(self, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
        terminal = stand_in(monkeypatch, is_terminal=True)
        remove(monkeypatch, *RICH)
        with kind.pool(max_workers=1) as pool, pool.watch():
            terminal.wait_for("running 0")
        assert "\x1b" not in terminal.getvalue()


class TestTerminal:
    def test_table(self, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
        terminal = stand_in(monkeypatch, is_terminal=True)
        go = threading.Event()
        with kind.pool(max_workers=1) as pool:
            future = pool.submit(go.wait, WAIT_S)
            with pool.watch(0.05):
                terminal.wait_for("queued 0, running 1, done 0")
                go.set()
                future.result(WAIT_S)
        text = terminal.getvalue()
        for part in ("device", "memory", "spilled", "busy", str(pool._devices[0].torch_device), "workers 1 of 1"):
            assert part in text
        assert "queued 0, running 0, done 1" in text, "the last state is shown"
        assert text.rindex(SHOW_CURSOR) > text.rindex(HIDE_CURSOR)

    def test_what_is_printed_goes_where_it_goes(self, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
        terminal = stand_in(monkeypatch, is_terminal=True)
        to_file, to_terminal = Screen(is_terminal=False), Screen()
        for out, where in ((to_file, to_file), (to_terminal, terminal)):
            monkeypatch.setattr(sys, "stdout", out)
            with kind.pool(max_workers=1) as pool, pool.watch():
                print("a result")
            assert sys.stdout is out
            assert "a result" in where.getvalue()
        assert sys.stderr is terminal

    def test_an_error_in_the_block(self, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
        terminal = stand_in(monkeypatch, is_terminal=True)
        error = ValueError("mine")
        with kind.pool(max_workers=1) as pool:
            with pytest.raises(ValueError, match="mine") as raised, pool.watch():
                raise error
        assert raised.value is error
        assert error.__context__ is None
        text = terminal.getvalue()
        assert text.rindex(SHOW_CURSOR) > text.rindex(HIDE_CURSOR)
        assert sys.stderr is terminal


class TestEnd:
    def test_with_the_pool(self, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
        pipe = stand_in(monkeypatch, is_terminal=False)
        pool = kind.pool(max_workers=1)
        view = pool.watch().start()
        assert view.start() is view, "it does nothing more"
        assert len(threads()) == 1
        pool.submit(abs, 1)
        pool.shutdown()
        assert not threads()
        assert "running 0, done 1" in pipe.getvalue().splitlines()[-1]
        view.stop()
        with pytest.raises(RuntimeError, match="shut down"):
            view.start()
        with pytest.raises(RuntimeError, match="shut down"), pool.watch():
            pytest.fail("the block must not begin")

    def test_with_shutdown_that_does_not_wait(self, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
        stand_in(monkeypatch, is_terminal=False)
        go = threading.Event()
        with kind.pool(max_workers=1) as pool:
            pool.submit(go.wait, WAIT_S)
            with pool.watch():
                pool.shutdown(wait=False)
                assert eventually(lambda: not threads())
            go.set()

    def test_with_a_pool_that_is_collected(self, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
        stand_in(monkeypatch, is_terminal=False)
        pool = kind.pool(max_workers=1)
        gone = weakref.ref(pool)
        view = pool.watch()
        view.start()
        pool.submit(abs, 1).result(WAIT_S)
        del pool
        gc.collect()
        assert gone() is None, "a view keeps no pool alive"
        assert eventually(lambda: not threads())
        with pytest.raises(RuntimeError, match="shut down"):
            view.start()

    def test_again(self, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
        stand_in(monkeypatch, is_terminal=False)
        with kind.pool(max_workers=1) as pool:
            view = pool.watch()
            for _ in range(3):
                with view:
                    assert len(threads()) == 1
                assert not threads()
            view.stop()

    def test_several(self, kind: Kind) -> None:
        screens = [Screen(is_terminal=False) for _ in range(3)]
        with kind.pool(max_workers=1) as pool:
            for screen in screens:
                pool.watch(file=screen).start()
            assert len(threads()) == 3
        assert not threads()
        assert all(screen.getvalue() for screen in screens)

    def test_where_it_writes_is_closed(self, kind: Kind, caplog: pytest.LogCaptureFixture) -> None:
        out = Screen(is_terminal=False)
        with kind.pool(max_workers=1) as pool:
            with pool.watch(0.05, file=out):
                out.wait_for("running 0")
                out.close()
                assert eventually(lambda: not threads())
            assert pool.submit(abs, -1).result(WAIT_S) == 1
        assert "view ends" in caplog.text

    @pytest.mark.parametrize("statement", ["", "view.start()\nraise SystemExit(3)", "view.start()"])
    def test_with_the_interpreter(self, statement: str) -> None:
        """It neither keeps the process alive nor loses its last line, also while a task still runs."""
        program = (
            "import time\nfrom managed_exec import GPUPoolExecutor\npool = GPUPoolExecutor(devices='cpu')\n"
            f"view = pool.watch()\npool.submit(time.sleep, 0.1)\n{statement}"
        )
        run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
        assert run.returncode == (3 if "SystemExit" in statement else 0)
        assert run.stderr.count("running") == (4 if statement else 0), run.stderr  # two lines, each of pool and device


class TestNotebook:
    @pytest.mark.parametrize("with_rich", [True, False])
    def test_the_cell_is_rewritten(self, kind: Kind, monkeypatch: pytest.MonkeyPatch, with_rich: bool) -> None:
        """A front end that shows what it is given, in the place of what was there before."""
        shown: list[dict[str, str]] = []

        class Handle:
            def update(self, bundle: dict[str, str], *, raw: bool) -> None:
                assert raw
                shown.append(bundle)

        def display(bundle: dict[str, str], *, raw: bool, display_id: bool) -> Handle:
            assert raw is display_id is True
            return Handle()

        shell = types.SimpleNamespace(kernel=object())
        ipython: Any = types.ModuleType("IPython")
        ipython.get_ipython, ipython.display = lambda: shell, types.ModuleType("IPython.display")
        ipython.display.display = display
        monkeypatch.setitem(sys.modules, "IPython", ipython)
        monkeypatch.setitem(sys.modules, "IPython.display", ipython.display)
        if not with_rich:
            remove(monkeypatch, *RICH)
        with kind.pool(max_workers=1) as pool, pool.watch():
            pool.submit(abs, 1).result(WAIT_S)
        assert len(shown) >= 2
        assert "running 0, done 1" in shown[-1]["text/plain"]
        assert ("text/html" in shown[-1]) == with_rich


@pytest.mark.parametrize("wrong", [0, 0.01, -1, float("nan"), 10**6, "1", True])
def test_wrong_interval(kind: Kind, wrong: Any) -> None:
    with kind.pool(max_workers=1) as pool, pytest.raises((TypeError, ValueError), match="interval_s: expected"):
        pool.watch(wrong)


def test_statistics_that_cannot_be_taken(
    kind: Kind, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, is_terminal=False)

    def take() -> PoolStatistics:
        raise RuntimeError("lost")

    with kind.pool(max_workers=1) as pool:
        pool._observers.census.take = take  # type: ignore[method-assign]
        with pool.watch():
            assert eventually(lambda: not threads())
    assert "lost" in caplog.text
