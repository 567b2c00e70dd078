"""The three ways to use several devices for one training: same losses, right places, stages that overlap."""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from conftest import Kind
from programs import imported, run_example

WAIT_S = 60
PROGRAMS = ("data_parallel", "model_parallel", "pipeline_parallel")


@pytest.fixture(scope="module")
def cifar() -> Iterator[ModuleType]:
    with imported("cifar") as module:
        yield module


@pytest.fixture(scope="module")
def pipeline() -> Iterator[ModuleType]:
    with imported("pipeline_parallel") as module:
        yield module


def difference(output: str) -> float:
    return float(re.search(r"^largest difference from the losses of one device: (\S+), allowed", output, re.M)[1])


class TestShared:
    def test_parts_of_a_batch_add_up_to_its_loss(self, cifar: ModuleType) -> None:
        (batch,) = cifar.batches(1, 7)
        scores = torch.randn(7, 10, dtype=torch.float64)
        parts = batch.split(3)
        assert [len(part.labels) for part in parts] == [3, 2, 2]
        assert torch.equal(torch.cat([part.images for part in parts]), batch.images)
        shares = [
            cifar.loss_share(cut, part.labels, 7) for cut, part in zip(scores.tensor_split(3), parts, strict=True)
        ]
        torch.testing.assert_close(sum(shares), torch.nn.functional.cross_entropy(scores, batch.labels))

    def test_network_is_the_seed_s_and_leaves_the_generator_alone(self, cifar: ModuleType) -> None:
        torch.manual_seed(3)
        expected = torch.rand(1)
        torch.manual_seed(3)
        one, same, other = cifar.network(8), cifar.network(8), cifar.network(8, seed=1)
        assert torch.equal(torch.rand(1), expected)
        assert all(map(torch.equal, one.parameters(), same.parameters()))
        assert not torch.equal(one[3].weight, other[3].weight)
        (batch,) = cifar.batches(1, 2)
        assert one(batch.images).shape == (2, 10)

    def test_training_learns(self, cifar: ModuleType) -> None:
        with Kind("cpu").pool(1) as pool:
            losses = pool.submit(cifar.train_alone, cifar.network(16, channels=4), cifar.batches(60, 8)).result()
        assert losses[-1] < losses[0] / 2

    @pytest.mark.parametrize("wrong", [1e-6, float("nan")])
    def test_report_ends_the_program_where_losses_differ(
        self, cifar: ModuleType, capsys: pytest.CaptureFixture[str], wrong: float
    ) -> None:
        cifar.report([2.0, 1.0], [2.0, 1.0 + 1e-12])
        assert difference(capsys.readouterr().out) == pytest.approx(1e-12, rel=0.1)
        with pytest.raises(SystemExit, match="the losses are not those of one device"):
            cifar.report([2.0, 1.0], [2.0, 1.0 + wrong])


@pytest.mark.timeout(400)  # the first use of the simulator compiles it
@pytest.mark.parametrize("simulated", ["", "2x64MiB", "3x64MiB"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_losses_are_those_of_one_device(program: str, simulated: str) -> None:
    done = run_example(program, "--steps", "6", "--hidden", "16", simulated=simulated)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^loss of 6 steps: 2\.", done.stdout, re.MULTILINE)
    assert difference(done.stdout) <= 1e-9
    devices = {"": {"cpu"}, "2x64MiB": {"sim:0", "sim:1"}}.get(simulated)
    if devices is not None:
        assert set(re.findall(r"cpu|sim:\d", done.stdout)) == devices


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("program", "options", "text"),
    [
        ("data_parallel", ("--replicas", "5", "--batch", "4"), "--batch 4: each of 5 replicas needs an image"),
        ("pipeline_parallel", ("--parts", "5", "--batch", "4"), "--batch 4: each of 5 parts needs an image"),
        ("model_parallel", ("--steps", "0"), "argument --steps: expected 1 or more, got 0"),
        ("model_parallel", ("--sim", "2"), "--sim takes NxSIZE, such as 4x256MiB: memory: cannot read ''"),
    ],
)
def test_program_refuses_bad_options(program: str, options: tuple[str, ...], text: str) -> None:
    done = run_example(program, *options)
    assert done.returncode == 2
    assert text in done.stderr


class Meeting(torch.nn.Module):
    """A stage that cannot go on before another one is at work as well."""

    def __init__(self, barrier: threading.Barrier, meets: list[bool]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.barrier = barrier
        self.meets = meets  # at each of its calls, whether it meets the other

    def __deepcopy__(self, memo: Any) -> Meeting:
        return self  # a barrier cannot be copied

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.meets.pop(0):
            self.barrier.wait(WAIT_S)
        return x * self.weight


class TestPipeline:
    def test_stages_work_at_the_same_time(self, simulator: Kind, pipeline: ModuleType) -> None:
        """The first stage meets the second at its next part, while that one has the part before."""
        barrier = threading.Barrier(2)
        # F0 F1 F2 and then B0 B1 B2 with their own forward; the last stage's three. F1 meets the first, F2 the second.
        first = Meeting(barrier, [False, True, True, False, False, False])
        last = Meeting(barrier, [True, True, False])
        batch = pipeline.Batch(torch.randn(3, 10, dtype=torch.float64), torch.tensor([1, 2, 3]))
        with simulator.pool(max_workers=4) as pool:
            stages = pipeline.make_stages(pool, torch.nn.Sequential(first, last), 2)
            loss = pipeline.step(stages, batch, parts=3)
        expected = torch.nn.functional.cross_entropy(batch.images, batch.labels)
        assert loss == pytest.approx(expected.item(), rel=1e-12)
        assert not first.meets
        assert not last.meets

    def test_tasks_of_a_stage_run_one_after_another(self, simulator: Kind, pipeline: ModuleType) -> None:
        with imported("cifar") as cifar, simulator.pool(max_workers=8) as pool:
            stages = pipeline.make_stages(pool, cifar.network(8), 4)
            for batch in cifar.batches(2, 4):
                pipeline.step(stages, batch, parts=4)
        for stage in stages:
            spans = stage.spans
            assert len(spans) == 2 * (4 + 1 if stage is stages[-1] else 8 + 1)
            assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(spans))

    def test_a_failing_stage_is_the_step_s_error(self, simulator: Kind, pipeline: ModuleType) -> None:
        class Failing(torch.nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                raise LookupError("no such stage")

        batch = pipeline.Batch(torch.randn(2, 10, dtype=torch.float64), torch.tensor([1, 2]))
        model = torch.nn.Sequential(torch.nn.Linear(10, 10).double(), Failing())
        with simulator.pool(max_workers=2) as pool:
            model[1].weight = torch.nn.Parameter(torch.ones(1))
            stages = pipeline.make_stages(pool, model, 2)
            with pytest.raises(LookupError, match="no such stage"):
                pipeline.step(stages, batch, parts=2)

    def test_overlap_is_counted_by_stages(self, pipeline: ModuleType) -> None:
        span = pipeline.Span
        assert pipeline.at_once([span(0, 0, 1), span(0, 0.5, 2), span(1, 1, 2)]) == 2
        assert pipeline.at_once([span(0, 0, 1), span(1, 1, 2)]) == 1

    @pytest.mark.timeout(400)
    def test_program_prints_makespan_beside_work(self) -> None:
        done = run_example("pipeline_parallel", "--steps", "1", "--hidden", "8", "--stages", "4", "--sim", "4x64MiB")
        assert done.returncode == 0, done.stdout + done.stderr
        found = re.search(r"one step: work ([\d.]+) s, makespan ([\d.]+) s; stages at work at once: (\d)", done.stdout)
        assert float(found[2]) > 0
        assert 2 <= int(found[3]) <= 4
        work_s = sum(float(text) for text in re.findall(r"^stage \d: \d+ tasks, ([\d.]+) s$", done.stdout, re.M))
        assert work_s == pytest.approx(float(found[1]), abs=0.005)
