"""Run tasks on every GPU of the machine through the interface of ``concurrent.futures``."""

from managed_exec import errors, sim
from managed_exec.executor import GPUPoolExecutor
from managed_exec.memory.policy import MemoryPolicy
from managed_exec.options import gpu_task
from managed_exec.task import current_task
from managed_exec.tensors.device_manager import device_manager
from managed_exec.tensors.managed import ManagedTensor, manage
from managed_exec.tensors.module import ManagedModule

__all__ = [
    "GPUPoolExecutor",
    "ManagedModule",
    "ManagedTensor",
    "MemoryPolicy",
    "current_task",
    "device_manager",
    "errors",
    "gpu_task",
    "manage",
    "sim",
]
