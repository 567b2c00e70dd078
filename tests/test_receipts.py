"""Receipts, hooks and traces of a pool's tasks."""

from __future__ import annotations

import functools
import gc
import json
import threading
import time
import weakref
from collections import Counter
from concurrent.futures import CancelledError
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
import torch
from conftest import Kind, eventually

from managed_exec import GPUPoolExecutor, MemoryPolicy, current_task, gpu_task, sim
from managed_exec.errors import TaskCancelledError, TaskTimeoutError
from managed_exec.events import Event, TaskFinished, TaskRetried, TaskStarted, TaskSubmitted, TensorMoved
from managed_exec.future import TaskFuture
from managed_exec.memory.manager import manager
from managed_exec.scheduling import watchdog

WAIT_S = 60
MIB = 2**20


def ones(n_bytes: int) -> torch.Tensor:
    return torch.ones(n_bytes // 4, device="cuda")


class TestReceipt:
    def test_none_until_done(self, kind: Kind) -> None:
        go = threading.Event()
        with kind.pool(max_workers=1) as pool:
            future = pool.submit(go.wait, WAIT_S)
            assert future.receipt() is None
            go.set()
            assert future.result(WAIT_S)
            receipt = future.receipt()
        assert receipt is not None
        assert receipt == future.receipt()
        assert str(receipt.device).startswith(kind.name)
        assert receipt.error is None
        assert receipt.retries == 0
        with pytest.raises(FrozenInstanceError):
            receipt.retries = 1  # type: ignore[misc]

    def test_times_are_those_of_queue_and_run(self, kind: Kind) -> None:
        with kind.pool(max_workers=1) as pool:
            begin = time.perf_counter()
            first, second = pool.submit(time.sleep, 0.2), pool.submit(time.sleep, 0.1)
            second.result(WAIT_S)
            total_s = time.perf_counter() - begin
        one, two = first.receipt(), second.receipt()
        assert 0 <= one.waited_s < one.waited_s + one.ran_s <= total_s
        assert one.ran_s >= 0.2
        assert two.ran_s >= 0.1
        assert two.waited_s >= 0.2 - 0.05, "it came an instant after the first had been submitted"

    def test_seen_by_done_callbacks(self, kind: Kind) -> None:
        seen = []
        with kind.pool(max_workers=1) as pool:
            pool.submit(abs, -1).add_done_callback(lambda future: seen.append(future.receipt()))
        assert seen[0] is not None

    def test_of_a_failure_and_of_a_cancelled_task(self, kind: Kind) -> None:
        go = threading.Event()
        with kind.pool(max_workers=1) as pool:
            failed = pool.submit(int, "x")
            blocking = pool.submit(go.wait, WAIT_S)
            cancelled = pool.submit(abs, 1)
            assert cancelled.cancel()
            go.set()
            assert blocking.result(WAIT_S)
        assert failed.receipt().error is ValueError
        receipt = cancelled.receipt()
        assert (receipt.device, receipt.error, receipt.waited_s) == (None, CancelledError, None)
        assert receipt.reason == "it has not run"

    def test_of_a_failed_placement(self, simulator: Kind) -> None:
        with simulator.pool(max_workers=1, devices=2, placement=lambda devices, request: 7) as pool:
            future = pool.submit(abs, 1)
            assert future.exception(WAIT_S) is not None
        assert (future.receipt().device, future.receipt().reason) == (None, "it has not run")
        assert future.receipt().error is type(future.exception())

    def test_memory(self, simulator: Kind) -> None:
        sim.enable(devices=1, memory="4MiB")

        def task() -> float:
            parts = [ones(MIB) for _ in range(6)]
            return sum(part.sum().item() for part in parts)

        with GPUPoolExecutor(1, memory=MemoryPolicy(min_bytes=1024, spill=("host",))) as pool:
            future = pool.submit(gpu_task(memory="3MiB")(task))
            assert future.result(WAIT_S) == 6 * MIB // 4
            small = pool.submit(abs, 1)
            small.result(WAIT_S)
        receipt = future.receipt()
        assert receipt.expected_bytes == 3 * MIB
        assert receipt.peak_bytes >= 6 * MIB, "what it would have taken of a device with room"
        assert receipt.spilled_bytes["host"] >= 2 * MIB
        assert receipt.unspilled_bytes["host"] >= 2 * MIB
        assert "3.0 MiB could be reserved" in receipt.reason
        assert (small.receipt().peak_bytes, small.receipt().spilled_bytes) == (0, {})

    def test_not_counted_where_nothing_is_managed(self, kind: Kind) -> None:
        with kind.pool(max_workers=1, memory=False) as pool:
            future = pool.submit(abs, 1)
            future.result(WAIT_S)
        assert future.receipt().peak_bytes is None

    def test_reasons(self, simulator: Kind) -> None:
        with simulator.pool(max_workers=1, devices=2) as pool:
            plain = pool.submit(abs, 1)
            bound = pool.submit(gpu_task(device=1)(lambda: ones(2 * MIB)))
            there = pool.submit(lambda x: x.sum().item(), bound.result(WAIT_S))
            there.result(WAIT_S)
        assert plain.receipt().reason == "least-loaded"
        assert bound.receipt().reason == "least-loaded; device= allows sim:1"
        assert there.receipt().reason == "least-loaded; 2.0 MiB of its arguments were there"
        assert str(there.receipt().device) == "sim:1"
        with simulator.pool(max_workers=1, devices=1) as pool:
            only = pool.submit(abs, 1)
        assert only.receipt().reason == "the pool's only device"

    def test_of_a_call_made_elsewhere(self, simulator: Kind) -> None:
        sim.enable(devices=2, memory="2MiB")
        with GPUPoolExecutor(1, memory=MemoryPolicy(min_bytes=1024, spill=())) as pool:
            future = pool.submit(lambda: [ones(MIB + MIB // 2) for _ in range(2)])
            devices = [tensor.device for tensor in future.result(WAIT_S)]
        receipt = future.receipt()
        assert receipt.migrated_calls == 1
        assert receipt.device == devices[1]
        assert f"moved from {devices[0]}" in receipt.reason

    def test_retries_and_the_cpu(self, simulator: Kind) -> None:
        sim.enable(devices=1, memory="2MiB")

        def too_large() -> torch.device:
            return ones(4 * MIB).device

        seen: list[Event] = []
        with GPUPoolExecutor(1, hooks=[seen.append]) as pool:
            again = pool.submit(gpu_task(on_oom="retry", retries=2)(too_large))
            on_cpu = pool.submit(gpu_task(on_oom="cpu")(too_large))
            assert on_cpu.result(WAIT_S).type == "cpu"
        assert again.receipt().retries == 2
        assert issubclass(again.receipt().error, torch.OutOfMemoryError)
        assert again.receipt().reason == "alone there, after it had run out of memory"
        assert on_cpu.receipt().device == torch.device("cpu")
        assert "on_oom='cpu'" in on_cpu.receipt().reason
        assert on_cpu.receipt().retries == 1
        assert on_cpu.receipt().peak_bytes is None
        of_cpu = [event for event in seen if not isinstance(event, TensorMoved) and event.task_id == 1]
        assert [type(event) for event in of_cpu] == [TaskSubmitted, TaskStarted, TaskRetried, TaskStarted, TaskFinished]
        assert (of_cpu[2].reason, of_cpu[3].device, of_cpu[3].attempt) == ("out of memory", torch.device("cpu"), 1)

    def test_stopped_before_it_runs_again(self, simulator: Kind) -> None:
        sim.enable(devices=1, memory="2MiB")
        go, retried = threading.Event(), threading.Event()
        seen: list[Event] = []

        def hook(event: Event) -> None:
            seen.append(event)
            if isinstance(event, TaskRetried):
                retried.set()

        with GPUPoolExecutor(2, hooks=[hook]) as pool:
            blocking = pool.submit(go.wait, WAIT_S)  # the second run is to be alone on the device
            future = pool.submit(gpu_task(on_oom="retry", retries=3)(lambda: ones(4 * MIB)))
            assert retried.wait(WAIT_S)
            future.cancel()
            assert isinstance(future.exception(WAIT_S), TaskCancelledError)
            go.set()
            assert blocking.result(WAIT_S)
        receipt = future.receipt()
        assert receipt.device == torch.device("sim", 0)
        assert receipt.reason == "it was to run again after a run there, and has not"
        assert [event.device for event in seen if isinstance(event, TaskFinished) and event.task_id == 1] == [
            torch.device("sim", 0)
        ]

    def test_cancelled_by_who_hears_that_it_runs_again(self, simulator: Kind, tmp_path: Path) -> None:
        sim.enable(devices=1, memory="2MiB")
        ran, seen, futures = list[str](), list[Event](), list[TaskFuture[None]]()
        submitted = threading.Event()

        def hook(event: Event) -> None:
            seen.append(event)
            if isinstance(event, TaskRetried):
                assert submitted.wait(WAIT_S)
                futures[0].cancel()

        def task() -> None:
            ran.append(current_task().device.type)
            ones(4 * MIB)

        with GPUPoolExecutor(1, hooks=[hook]) as pool, pool.trace(tmp_path / "run.json"):
            futures.append(pool.submit(gpu_task(on_oom="cpu")(task)))
            submitted.set()
            assert isinstance(futures[0].exception(WAIT_S), TaskCancelledError)
        assert ran == ["sim"]
        assert [type(event) for event in seen] == [TaskSubmitted, TaskStarted, TaskRetried, TaskFinished]
        assert (seen[-1].device, futures[0].receipt().device) == (torch.device("sim", 0),) * 2
        entries = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
        assert [entry["ph"] for entry in entries if entry.get("cat") == "wait"] == ["b", "e"] * 2

    def test_of_a_task_that_was_given_up(self, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(watchdog, "GRACE_S", 0.05)
        go = threading.Event()
        with kind.pool(max_workers=1) as pool:
            future = pool.submit(gpu_task(timeout=0.05)(functools.partial(go.wait, WAIT_S)))
            assert isinstance(future.exception(WAIT_S), TaskTimeoutError)
            go.set()
        receipt = future.receipt()
        assert receipt.error is TaskTimeoutError
        assert str(receipt.device).startswith(kind.name)
        assert receipt.ran_s >= 0.05

    def test_keeps_nothing_of_the_task(self, simulator: Kind) -> None:
        class Argument:
            pass

        argument = Argument()
        gone = weakref.ref(argument)
        with simulator.pool(max_workers=1) as pool:
            future = pool.submit(lambda x: None, argument)
            future.result(WAIT_S)
            del argument
            assert eventually(lambda: gone() is None)
        assert future.receipt() is not None


class TestHooks:
    def test_a_life(self, kind: Kind) -> None:
        seen: list[Event] = []
        with kind.pool(max_workers=1, hooks=[seen.append]) as pool:
            assert pool.submit(int, "7").result(WAIT_S) == 7
        assert [type(event) for event in seen] == [TaskSubmitted, TaskStarted, TaskFinished]
        assert {(event.task_id, event.name) for event in seen} == {(0, "int")}
        started, finished = seen[1], seen[2]
        assert started.device == finished.device
        assert started.worker == finished.worker
        assert seen[0].at_s <= started.at_s <= finished.at_s
        assert finished.error is None

    def test_finished_is_told_before_the_future_is_done(self, kind: Kind) -> None:
        futures, done = [], []
        told = threading.Event()

        def hook(event: Event) -> None:
            if isinstance(event, TaskFinished):
                assert submitted.wait(WAIT_S)
                done.append(futures[0].done())
                told.set()

        submitted = threading.Event()
        with kind.pool(max_workers=1, hooks=[hook]) as pool:
            futures.append(pool.submit(abs, 1))
            submitted.set()
            assert told.wait(WAIT_S)
        assert done == [False]

    def test_a_failing_hook_harms_nothing(self, kind: Kind, caplog: pytest.LogCaptureFixture) -> None:
        def hook(event: Event) -> None:
            raise ValueError("mine")

        with kind.pool(max_workers=2, hooks=[hook]) as pool:
            assert list(pool.map(abs, range(5))) == list(range(5))
        assert "is called no more" in caplog.text

    def test_retries_and_memory(self, simulator: Kind) -> None:
        sim.enable(devices=1, memory="2MiB")
        seen: list[Event] = []
        with GPUPoolExecutor(1, memory=MemoryPolicy(min_bytes=1024), hooks=[seen.append]) as pool:
            kept = pool.submit(ones, MIB).result(WAIT_S)
            pool.submit(ones, MIB + MIB // 2).result(WAIT_S)
            failed = pool.submit(gpu_task(on_oom="retry", retries=1)(lambda: ones(4 * MIB)))
            assert failed.exception(WAIT_S) is not None
            assert any(isinstance(event, TensorMoved) and event.task == "task 0" for event in seen)
            assert [event.task_id for event in seen if isinstance(event, TaskRetried)] == [2]
            assert [event.attempt for event in seen if isinstance(event, TaskStarted) and event.task_id == 2] == [0, 1]
        n_events = len(seen)
        kept.spill("disk")
        assert len(seen) == n_events, "the pool is shut down"

    def test_the_manager_lets_go_of_a_pool_that_is_collected(self, simulator: Kind) -> None:
        pool = simulator.pool(max_workers=1, hooks=[print])
        listening = len(manager().hooks.hooks)
        del pool
        gc.collect()
        assert len(manager().hooks.hooks) == listening - 1

    @pytest.mark.parametrize("wrong", [[3], 3, ["print"]])
    def test_wrong(self, kind: Kind, wrong: object) -> None:
        with pytest.raises(TypeError, match="hooks"):
            kind.pool(hooks=wrong)


class TestTrace:
    def test_tasks_waits_and_moves(self, simulator: Kind, tmp_path: Path) -> None:
        sim.enable(devices=1, memory="2MiB")
        path = tmp_path / "run.json"
        with GPUPoolExecutor(1, memory=MemoryPolicy(min_bytes=1024, spill=("host",))) as pool:
            pool.submit(abs, 1).result(WAIT_S)
            begin = time.time() * 1e6
            with pool.trace(path):
                kept = [pool.submit(ones, MIB + 4096 * i).result(WAIT_S) for i in range(2)]
                assert pool.submit(int, "x").exception(WAIT_S) is not None
            pool.submit(abs, 1).result(WAIT_S)
        del kept
        trace = json.loads(path.read_text())
        entries = trace["traceEvents"]
        runs = [entry for entry in entries if entry["ph"] == "X"]
        assert [run["name"] for run in runs] == ["ones", "ones", "int"]
        begin -= trace["baseTimeNanoseconds"] / 1e3
        assert "ValueError" in runs[2]["args"]["error"]
        assert all(begin - 1e6 < run["ts"] <= run["ts"] + run["dur"] < begin + 60e6 for run in runs)
        processes = {e["pid"]: e["args"]["name"] for e in entries if e["name"] == "process_name"}
        assert {processes[run["pid"]] for run in runs} == {"sim:0"}
        waits = [entry["ph"] for entry in entries if entry.get("cat") == "wait"]
        assert Counter(waits) == {"b": 3, "e": 3}
        counters = [entry["args"] for entry in entries if entry["ph"] == "C"]
        assert counters[0]["host"] >= MIB
        spans = [entry["ph"] for entry in entries if entry.get("cat") == "memory"]
        assert spans.count("b") == spans.count("e") >= 1

    def test_each_run_of_a_task_that_ran_again(self, simulator: Kind, tmp_path: Path) -> None:
        sim.enable(devices=1, memory="2MiB")
        with GPUPoolExecutor(1) as pool, pool.trace(tmp_path / "run.json"):
            pool.submit(gpu_task(on_oom="retry", retries=1)(lambda: ones(4 * MIB))).exception(WAIT_S)
        entries = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
        assert [entry["args"]["attempt"] for entry in entries if entry["ph"] == "X"] == [0, 1]
        assert [entry["ph"] for entry in entries if entry.get("cat") == "wait"] == ["b", "e"] * 2

    def test_error_that_cannot_be_shown(self, kind: Kind, tmp_path: Path) -> None:
        class Unspeakable(Exception):
            def __repr__(self) -> str:
                raise ValueError("mine")

        def fail() -> None:
            raise Unspeakable

        with kind.pool(max_workers=1) as pool, pool.trace(tmp_path / "run.json"):
            pool.submit(fail).exception(WAIT_S)
        assert "Unspeakable" in (tmp_path / "run.json").read_text()

    def test_written_also_when_the_block_fails(self, kind: Kind, tmp_path: Path) -> None:
        with kind.pool(max_workers=1) as pool:
            with pytest.raises(ValueError, match="invalid literal"), pool.trace(tmp_path / "run.json"):
                pool.submit(int, "x").result(WAIT_S)
            assert not pool._hooks.hooks
        assert len(json.loads((tmp_path / "run.json").read_text())["traceEvents"]) > 1

    def test_nobody_listens_to_memory_after_it(self, simulator: Kind, tmp_path: Path) -> None:
        seen: list[Event] = []
        for hooks in ([], [seen.append]):
            with simulator.pool(max_workers=1, hooks=hooks) as pool:
                for i in range(2):
                    with pool.trace(tmp_path / f"{i}.json"):
                        assert len(manager().hooks.hooks) == 1
                    assert len(manager().hooks.hooks) == len(hooks)
            assert not manager().hooks.hooks

    def test_nowhere_to_write(self, kind: Kind, tmp_path: Path) -> None:
        with kind.pool(max_workers=1) as pool:
            with pytest.raises(FileNotFoundError), pool.trace(tmp_path / "missing" / "run.json"):
                pytest.fail("the block must not begin")
            assert not pool._hooks.hooks
