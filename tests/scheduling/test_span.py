"""Tasks in the traces of ``torch.profiler``, and the two traces beside each other."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Kind
from torch._C._profiler import _ExperimentalConfig
from torch.autograd import profiler as autograd_profiler
from torch.profiler import ProfilerActivity, profile

from managed_exec.scheduling import run
from managed_exec.scheduling.span import TaskSpan

WAIT_S = 60


def compute() -> float:
    return torch.ones(1000).mul(3).sum().item()


def profiler_of_all_threads() -> profile:
    return profile(activities=[ProfilerActivity.CPU], experimental_config=_ExperimentalConfig(profile_all_threads=True))


def exported(profiled: profile, path: Path) -> list[dict[str, Any]]:
    """Return torch's own trace, with times since 1970, in microseconds."""
    profiled.export_chrome_trace(str(path))
    return read(path)


def read(path: Path) -> list[dict[str, Any]]:
    trace = json.loads(path.read_text())
    base_us = trace["baseTimeNanoseconds"] / 1e3
    return [{**entry, "ts": entry["ts"] + base_us} for entry in trace["traceEvents"] if "ts" in entry]


def named(entries: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [entry for entry in entries if entry.get("name") == name and entry["ph"] == "X"]


class TestProfiler:
    def test_tasks_of_all_threads(self, kind: Kind, tmp_path: Path) -> None:
        """Each task is there under its name, its operations within it; also of threads that were there before."""
        with kind.pool(max_workers=2) as pool:
            pool.submit(compute).result(WAIT_S)
            with profiler_of_all_threads() as profiled:
                assert list(pool.map(lambda _: compute(), range(3))) == [3000.0] * 3
                assert pool.submit(compute).result(WAIT_S) == 3000
                assert pool.submit(int, "x").exception(WAIT_S) is not None
        entries = exported(profiled, tmp_path / "torch.json")
        assert len(named(entries, "compute")) == 1
        assert len(named(entries, "int")) == 1, "one that fails ends as well"
        (task,) = named(entries, "compute")
        sums = [each for each in named(entries, "aten::sum") if each["tid"] == task["tid"]]
        assert any(task["ts"] <= each["ts"] <= each["ts"] + each["dur"] <= task["ts"] + task["dur"] for each in sums)

    def test_one_that_asks_for_its_own_thread_alone(self, kind: Kind, tmp_path: Path) -> None:
        """What the documentation says of it: workers' operations are missing."""
        with kind.pool(max_workers=1) as pool:
            with profile(activities=[ProfilerActivity.CPU]) as profiled:
                torch.ones(3).neg()
                pool.submit(compute).result(WAIT_S)
        entries = exported(profiled, tmp_path / "torch.json")
        assert named(entries, "aten::neg")
        assert not named(entries, "compute")

    def test_in_the_task_itself(self, kind: Kind, tmp_path: Path) -> None:
        def task() -> profile:
            with profile(activities=[ProfilerActivity.CPU]) as profiled:
                compute()
            return profiled

        with kind.pool(max_workers=1) as pool:
            profiled = pool.submit(task).result(WAIT_S)
        assert named(exported(profiled, tmp_path / "torch.json"), "aten::sum")

    def test_switched_on_and_off_while_a_task_runs(self, kind: Kind) -> None:
        started, go = threading.Event(), threading.Event()

        def task() -> float:
            started.set()
            assert go.wait(WAIT_S)
            return compute()

        with kind.pool(max_workers=1) as pool:
            future = pool.submit(task)
            assert started.wait(WAIT_S)
            with profiler_of_all_threads():
                go.set()
                assert future.result(WAIT_S) == 3000
            started.clear()
            go.clear()
            with profiler_of_all_threads():
                future = pool.submit(task)
                assert started.wait(WAIT_S)
            go.set()
            assert future.result(WAIT_S) == 3000
            assert pool.submit(compute).result(WAIT_S) == 3000

    def test_no_profiler_no_span(self, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
        def span(name: str, device: torch.device) -> TaskSpan:
            pytest.fail("a span was made")

        monkeypatch.setattr(run, "TaskSpan", span)
        assert autograd_profiler._is_profiler_enabled is False
        with kind.pool(max_workers=1) as pool:
            assert pool.submit(compute).result(WAIT_S) == 3000

    def test_the_traces_have_one_time_base(self, kind: Kind, tmp_path: Path) -> None:
        ours, torch_s = tmp_path / "ours.json", tmp_path / "torch.json"
        with kind.pool(max_workers=1) as pool:
            pool.submit(compute).result(WAIT_S)
            with profiler_of_all_threads() as profiled, pool.trace(ours):
                pool.submit(compute).result(WAIT_S)
        (theirs,) = named(exported(profiled, torch_s), "compute")
        (mine,) = named(read(ours), "compute")
        bases = [json.loads(path.read_text())["baseTimeNanoseconds"] for path in (ours, torch_s)]
        assert bases[0] == bases[1], "or tools that know of no base would show them months apart"
        # Ours begins before the device is entered, and ends after it is left. Clocks are read at different moments.
        tolerance_us = 5_000
        assert mine["ts"] - tolerance_us <= theirs["ts"]
        assert theirs["ts"] + theirs["dur"] <= mine["ts"] + mine["dur"] + tolerance_us


class TestRanges:
    def test_pushed_and_popped_on_cuda_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[str] = []
        monkeypatch.setattr(torch.cuda.nvtx, "range_push", calls.append)
        monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("pop"))
        TaskSpan("solve", torch.device("cpu")).end()
        assert calls == []
        TaskSpan("solve", torch.device("cuda", 1)).end()
        assert calls == ["solve", "pop"]


def test_any_name(kind: Kind) -> None:
    def task() -> int:
        return 1

    task.__qualname__ = "half a pair: \ud800"
    with kind.pool(max_workers=1) as pool, profiler_of_all_threads():
        assert pool.submit(task).result(WAIT_S) == 1
