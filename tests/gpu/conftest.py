"""The executor's contract on a real accelerator.

    pytest tests/gpu                               skips, saying why, where there is none
    MANAGED_EXEC_GPU_TESTS=sim pytest tests/gpu    the simulator stands in; only what is CUDA's own is skipped

The fixtures of ``tests/conftest.py`` that name a kind of device are replaced here, so that the tests written for the
CPU and the simulator, imported by the modules beside this one, run on the accelerator. Tests that need the simulator's
own abilities (held streams, faults, a set capacity) are left out; what they show is shown again in CUDA's terms.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import HAS_GPU, Kind, make_kind

HERE = Path(__file__).parent
SIMULATOR_STANDS_IN = os.environ.get("MANAGED_EXEC_GPU_TESTS") == "sim"
HAS_ACCELERATOR = HAS_GPU or SIMULATOR_STANDS_IN
WHY_NOT = f"torch {torch.__version__} finds no accelerator"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark this directory's tests, and leave out those of the contract that ask for the simulator."""
    left_out = []
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("gpu")
            if _needs_simulator(item):
                left_out.append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


def _needs_simulator(item: pytest.Item) -> bool:
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return "simulator" in getattr(item, "fixturenames", ()) or bool(parameters.get("simulated"))


@pytest.fixture
def accelerator() -> Iterator[Kind]:
    """The machine's accelerator, or what stands in for it."""
    if not HAS_ACCELERATOR:
        pytest.skip(WHY_NOT)
    if SIMULATOR_STANDS_IN:
        yield from make_kind("sim")
    else:
        yield Kind(torch.accelerator.current_accelerator().type)


@pytest.fixture
def kind(accelerator: Kind) -> Kind:
    """The kind of device that the contract runs on; here there is one."""
    return accelerator


@pytest.fixture
def cuda(accelerator: Kind) -> Kind:
    """The same, in tests that use CUDA's own means; ROCm has the same name for them."""
    assert accelerator.name == "cuda"
    return accelerator


@pytest.fixture(autouse=True)
def nothing_left(nothing_left: None) -> Iterator[None]:
    """Give cuBLAS workspaces back first: torch keeps one a thread and stream, and counts them as allocated."""
    yield
    if HAS_GPU and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
