"""A simulated accelerator: a real PyTorch backend named ``sim`` that needs no hardware.

    from managed_exec import sim
    sim.enable(devices=4, memory="1GiB")
    x = torch.ones(3, device="sim:2")

Tensors, autograd, streams, events, pinned memory, generators and ``torch.accelerator`` work as on CUDA; kernels are
the CPU's. Each device has a capacity, beyond which allocations raise ``torch.OutOfMemoryError``; freed memory is filled
with 0xFF bytes. `faults` lets allocations fail and devices break. Time on links and in kernels can be simulated.

Automatic mixed precision (``torch.autocast("sim")``) covers the operators that torch lists for all accelerators: matrix
products, convolutions and recurrent cells in lower precision, losses and reductions in float32, promotion for the rest.

Importing this package builds and registers nothing.
"""

from __future__ import annotations

from managed_exec.sim import faults
from managed_exec.sim.simulator import (
    configuration,
    disable,
    enable,
    enable_from_environment,
    is_enabled,
    set_capacity,
)
from managed_exec.sim.streams import hold_stream, kernel_time, run_kernel

__all__ = [
    "configuration",
    "disable",
    "enable",
    "enable_from_environment",
    "faults",
    "hold_stream",
    "is_enabled",
    "kernel_time",
    "run_kernel",
    "set_capacity",
]
