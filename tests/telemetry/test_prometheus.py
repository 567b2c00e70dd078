"""The metrics of pools, as a server of the real ``prometheus_client`` would show them."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import wait

import pytest
import torch
from conftest import Kind, eventually

from managed_exec import GPUPoolExecutor, MemoryPolicy, current_task, gpu_task, sim
from managed_exec.errors import TaskCancelledError
from managed_exec.events import TaskFinished, TaskRetried, TaskStarted, TaskSubmitted
from managed_exec.telemetry.prometheus import BUCKETS_S, PoolMetrics

prometheus_client = pytest.importorskip("prometheus_client", reason="prometheus-client, the extra metrics")

WAIT_S = 60
MIB = 2**20


def shown(registry: object) -> dict[str, float]:
    """Return every sample that is exposed, by its name and labels."""
    lines = prometheus_client.generate_latest(registry).decode().splitlines()
    samples = [line.rpartition(" ") for line in lines if not line.startswith("#")]
    return {name: float(value) for name, _, value in samples if "_created" not in name}


@pytest.fixture
def registry() -> object:
    return prometheus_client.CollectorRegistry()


class TestTasks:
    def test_what_becomes_of_them(self, kind: Kind, registry: object) -> None:
        metrics = PoolMetrics(registry)
        started, go = threading.Event(), threading.Event()

        def task() -> None:
            started.set()
            assert go.wait(WAIT_S)
            current_task().checkpoint()

        with kind.pool(max_workers=1, hooks=[metrics.hook("solver")]) as pool:
            stopped = pool.submit(task)
            assert started.wait(WAIT_S)
            waiting = [pool.submit(abs, 1), pool.submit(int, "x"), pool.submit(abs, 2)]
            assert waiting[2].cancel()
            stopped.cancel()
            device = pool._devices[0].torch_device
            if pool._devices[1:]:
                device = next(each.device for each in pool.statistics().devices if each.running)
            seen = shown(registry)
            assert seen['managed_exec_tasks_submitted_total{pool="solver"}'] == 4
            assert seen['managed_exec_tasks_queued{pool="solver"}'] == 3
            assert seen[f'managed_exec_tasks_running{{device="{device}",pool="solver"}}'] == 1
            go.set()
            wait(waiting[:2], WAIT_S)
        seen = shown(registry)
        done = {name: value for name, value in seen.items() if name.startswith("managed_exec_tasks_done_total")}
        assert sum(done.values()) == 4
        assert done['managed_exec_tasks_done_total{device="none",outcome="cancelled",pool="solver"}'] == 1
        assert sum(value for name, value in done.items() if 'outcome="cancelled"' in name) == 2
        assert sum(value for name, value in done.items() if 'outcome="failed"' in name) == 1
        assert seen['managed_exec_tasks_queued{pool="solver"}'] == 0
        assert seen[f'managed_exec_tasks_running{{device="{device}",pool="solver"}}'] == 0
        for what in ("waited", "ran"):
            counts = [v for name, v in seen.items() if name.startswith(f"managed_exec_task_{what}_seconds_count")]
            assert sum(counts) == 3
        total_s = sum(value for name, value in seen.items() if name.startswith("managed_exec_task_ran_seconds_sum"))
        assert total_s == pytest.approx(pool.statistics().tasks.ran_s)

    def test_gauges_when_a_pool_ends_early(self, kind: Kind, registry: object) -> None:
        metrics = PoolMetrics(registry)
        started, go = threading.Event(), threading.Event()

        def task() -> None:
            started.set()
            assert go.wait(WAIT_S)

        with kind.pool(max_workers=1, hooks=[metrics.hook()]) as pool:
            pool.submit(task)
            assert started.wait(WAIT_S)
            for _ in range(5):
                pool.submit(abs, 1)
            pool.shutdown(wait=False, cancel_futures=True)
            with pytest.raises(RuntimeError, match="after shutdown"):
                pool.submit(abs, 1)
            go.set()
        seen = shown(registry)
        assert seen['managed_exec_tasks_submitted_total{pool="default"}'] == 6
        assert seen['managed_exec_tasks_queued{pool="default"}'] == 0
        assert seen['managed_exec_tasks_done_total{device="none",outcome="cancelled",pool="default"}'] == 5

    def test_of_tasks_that_were_there_before(self, kind: Kind, registry: object) -> None:
        hook = PoolMetrics(registry).hook()
        with kind.pool(max_workers=1) as pool:
            device = pool._devices[0].torch_device
        hook(TaskFinished(7, "f", device, "w", 1.0, 2.0, 3.5, None))
        seen = shown(registry)
        assert not any(value < 0 for value in seen.values())
        assert seen[f'managed_exec_task_ran_seconds_sum{{device="{device}",pool="default"}}'] == 1.5

    def test_one_that_went_on_elsewhere_runs_nowhere_when_it_is_done(self, registry: object) -> None:
        hook = PoolMetrics(registry).hook()
        first, second = torch.device("cuda:0"), torch.device("cuda:1")
        hook(TaskStarted(0, "f", first, "w", 0, 1.0))
        hook(TaskFinished(0, "f", second, "w", 0.0, 1.0, 2.0, None))
        assert shown(registry)['managed_exec_tasks_running{device="cuda:0",pool="default"}'] == 0

    def test_one_that_was_to_run_again_has_run_until_then(self, registry: object) -> None:
        hook = PoolMetrics(registry).hook()
        device = torch.device("cuda:0")
        hook(TaskSubmitted(0, "f", 1.0))
        hook(TaskStarted(0, "f", device, "w", 0, 2.0))
        hook(TaskRetried(0, "f", "w", 5.0, "out of memory"))
        hook(TaskFinished(0, "f", device, "w", 1.0, 2.0, 105.0, TaskCancelledError(), 1))
        assert shown(registry)['managed_exec_task_ran_seconds_sum{device="cuda:0",pool="default"}'] == 3
        assert shown(registry)['managed_exec_tasks_queued{pool="default"}'] == 0

    def test_buckets_go_up(self) -> None:
        assert list(BUCKETS_S) == sorted(set(BUCKETS_S))


def test_memory(simulator: Kind, registry: object) -> None:
    sim.enable(devices=2, memory="2MiB")
    metrics = PoolMetrics(registry)
    policy = MemoryPolicy(min_bytes=1024, spill=("host",))
    with GPUPoolExecutor(1, devices=1, memory=policy, hooks=[metrics.hook()]) as pool:
        kept = pool.submit(lambda: torch.ones(MIB // 4, device="cuda")).result(WAIT_S)
        kept.spill("host")
        where = 'device="sim:0",direction="{}",pool="default",tier="host"'
        seen = shown(registry)
        assert seen[f"managed_exec_moved_bytes_total{{{where.format('spilled')}}}"] == MIB
        assert seen['managed_exec_tier_bytes{tier="host"}'] == MIB
        kept.unspill()
        assert shown(registry)[f"managed_exec_moved_bytes_total{{{where.format('unspilled')}}}"] == MIB
        kept.spill("host")
        del kept
        assert eventually(lambda: shown(registry)['managed_exec_tier_bytes{tier="host"}'] == 0)
        again = pool.submit(gpu_task(on_oom="retry", retries=2)(lambda: torch.ones(MIB, device="cuda")))
        assert isinstance(again.exception(WAIT_S), torch.OutOfMemoryError)
    seen = shown(registry)
    assert seen['managed_exec_task_retries_total{pool="default"}'] == 2
    assert seen['managed_exec_tasks_queued{pool="default"}'] == 0


def test_calls_made_elsewhere(simulator: Kind, registry: object) -> None:
    sim.enable(devices=2, memory="2MiB")
    metrics = PoolMetrics(registry)
    with GPUPoolExecutor(1, memory=MemoryPolicy(min_bytes=1024, spill=()), hooks=[metrics.hook()]) as pool:
        held = pool.submit(lambda: [torch.ones(3 * MIB // 8, device="cuda") for _ in range(2)]).result(WAIT_S)
        device = held[1].device
        del held
    assert shown(registry)[f'managed_exec_migrated_calls_total{{device="{device}",pool="default"}}'] == 1


class TestRegistry:
    def test_two_pools(self, kind: Kind, registry: object) -> None:
        metrics = PoolMetrics(registry)
        with (
            kind.pool(max_workers=1, hooks=[metrics.hook("a")]) as a,
            kind.pool(max_workers=1, hooks=[metrics.hook("b")]) as b,
        ):
            list(a.map(abs, range(3)))
            list(b.map(abs, range(2)))
        seen = shown(registry)
        assert seen['managed_exec_tasks_submitted_total{pool="a"}'] == 3
        assert seen['managed_exec_tasks_submitted_total{pool="b"}'] == 2

    def test_twice(self, registry: object) -> None:
        PoolMetrics(registry)
        before = shown(registry)
        with pytest.raises(ValueError, match="make one PoolMetrics, and a hook of it for each pool"):
            PoolMetrics(registry)
        assert shown(registry) == before

    def test_names_follow_the_conventions(self, registry: object) -> None:
        PoolMetrics(registry)
        for family in registry.collect():
            assert family.name.startswith("managed_exec_")
            assert family.documentation.endswith(".")
            if "seconds" in family.documentation or family.type == "histogram":
                assert family.name.endswith("_seconds")

    def test_without_the_library(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "prometheus_client", None)
        with pytest.raises(ImportError, match=r"pip install 'managed_exec\[metrics\]'"):
            PoolMetrics()

    def test_wrong_label(self, registry: object) -> None:
        with pytest.raises(TypeError, match="pool: expected the text of a label, got 3"):
            PoolMetrics(registry).hook(3)  # type: ignore[arg-type]
