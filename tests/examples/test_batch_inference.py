"""The inference example: one load a device, whoever asks first, and the bound on bytes."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from conftest import Kind
from programs import imported, run_example

from managed_exec import gpu_task

WAIT_S = 60


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    with imported("batch_inference") as module:
        yield module


def test_tasks_that_ask_at_once_load_once(example: ModuleType, kind: Kind) -> None:
    """Four tasks a device meet before they ask."""
    places = 4 if kind.is_accelerator else 1
    barrier = threading.Barrier(4 * places)
    model = torch.nn.Linear(300, 100).requires_grad_(False)  # large enough to be managed
    models = example.PerDevice(model)

    @gpu_task
    def ask(x: torch.Tensor) -> tuple[int, torch.Tensor]:
        barrier.wait(WAIT_S)
        found = models.get()
        return id(found), found(x.cuda()).cpu()

    x = torch.randn(2, 300)
    with kind.pool(max_workers=4 * places) as pool:
        futures = [pool.submit(ask.options(device=i % places), x) for i in range(4 * places)]
        found = [future.result(WAIT_S) for future in futures]
    assert len(models.loads) == len(set(models.loads)) == places
    assert len({number for number, _ in found}) == places
    for _, y in found:
        torch.testing.assert_close(y, model(x))
    assert all(not parameter.is_cuda and parameter.device.type == "cpu" for parameter in model.parameters())


def test_a_device_that_loads_does_not_keep_others_waiting(example: ModuleType, simulator: Kind) -> None:
    gate = threading.Event()

    class Slow(torch.nn.Module):
        def __deepcopy__(self, memo: object) -> torch.nn.Module:
            if example.current_task().device.index == 0:
                assert gate.wait(WAIT_S)
            return torch.nn.Linear(1, 1)

    models = example.PerDevice(Slow())
    get = gpu_task(lambda: models.get() is not None)
    with simulator.pool(max_workers=2) as pool:
        slow = pool.submit(get.options(device=0))
        try:
            assert pool.submit(get.options(device=1)).result(WAIT_S)
            assert not slow.done()
        finally:
            gate.set()
        assert slow.result(WAIT_S)


@pytest.mark.timeout(400)  # the first use of the simulator compiles it
@pytest.mark.parametrize("simulated", ["", "3x64MiB"])
def test_program_keeps_to_the_bound(simulated: str) -> None:
    done = run_example(
        "batch_inference", "--batches", "40", "--batch", "2", "--in-flight", "256KiB", simulated=simulated
    )
    assert done.returncode == 0, done.stdout + done.stderr
    loads = re.search(r"^network brought to: (.*)$", done.stdout, re.MULTILINE)[1].split(", ")
    assert len(loads) == len(set(loads))
    assert set(loads) <= ({f"sim:{i}" for i in range(3)} if simulated else {"cpu"})
    everything, at_once = re.search(
        r"^([\d.]+) MiB of images, ([\d.]+) KiB at once", done.stdout, re.MULTILINE
    ).groups()
    assert float(everything) == pytest.approx(40 * 48 / 1024, abs=0.1)
    assert 48 <= float(at_once) <= 256 + 48
    assert "largest difference from the scores of one device" in done.stdout


def test_program_refuses_a_bad_bound() -> None:
    done = run_example("batch_inference", "--in-flight", "some")
    assert done.returncode == 2
    assert "--in-flight: cannot read 'some'" in done.stderr
