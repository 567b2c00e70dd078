"""Two small simulated devices, and the check that nothing is left on them."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from managed_exec import sim

CAPACITY = 2**20


@pytest.fixture
def devices() -> Iterator[None]:
    """Two simulated devices of 1 MiB."""
    if torch.cuda.is_available():
        pytest.skip("the simulator would hide the real accelerator from later tests; set CUDA_VISIBLE_DEVICES=''")
    sim.enable(2, CAPACITY)
    yield
    sim.faults.clear()
    gc.collect()
    for index in range(torch.sim.device_count()):
        torch.sim.synchronize(index)
        assert torch.sim.memory_allocated(index) == 0
    sim.disable()
