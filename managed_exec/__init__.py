"""Run tasks on every GPU of the machine through the interface of ``concurrent.futures``."""

from managed_exec import errors, sim
from managed_exec.executor import GPUPoolExecutor
from managed_exec.task import current_task, gpu_task

__all__ = ["GPUPoolExecutor", "current_task", "errors", "gpu_task", "sim"]
