"""Two small simulated devices, and the check that nothing is left on them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from conftest import allocated_bytes, eventually

from managed_exec import sim

CAPACITY = 2**20


@pytest.fixture
def devices() -> Iterator[None]:
    """Two simulated devices of 1 MiB."""
    if torch.cuda.is_available():
        pytest.skip("the simulator would hide the real accelerator from later tests; set CUDA_VISIBLE_DEVICES=''")
    sim.enable(2, CAPACITY)
    try:
        yield
        sim.faults.clear()
        for index in range(torch.sim.device_count()):
            torch.sim.synchronize(index)
        # Autograd's own threads let go of a graph a moment after ``backward`` has returned.
        assert eventually(lambda: allocated_bytes() == 0), f"device bytes left: {allocated_bytes()}"
    finally:
        sim.disable()
