"""Run tasks on every GPU of the machine through the interface of ``concurrent.futures``."""

from managed_exec import errors, sim
from managed_exec.executor import GPUPoolExecutor
from managed_exec.memory.policy import MemoryPolicy
from managed_exec.task import current_task, gpu_task
from managed_exec.tensors.managed import ManagedTensor, manage

__all__ = [
    "GPUPoolExecutor",
    "ManagedTensor",
    "MemoryPolicy",
    "current_task",
    "errors",
    "gpu_task",
    "manage",
    "sim",
]
