"""Every exception of the package. Each class says whose fault it is and what state is left behind."""

from __future__ import annotations

import concurrent.futures

import torch


class ManagedExecError(Exception):
    """Base of the package's own exceptions."""


class SimulatorUnavailableError(ManagedExecError, RuntimeError):
    """The simulated accelerator cannot be used here: no compiler, no ninja, or a torch too old.

    The environment's fault. Nothing was registered with torch; install what the text names and try again.
    """


class SimulatorBusyError(ManagedExecError, RuntimeError):
    """The simulator was asked to change while simulated memory is in use.

    The caller's fault. Nothing was changed; drop the tensors the text counts and try again.
    """


class PlacementError(ManagedExecError, RuntimeError):
    """A placement function raised, or returned something that is not one of the devices it was offered.

    The placement function's fault. The task did not run; its future holds this error, and the pool goes on.
    """


class TaskTimeoutError(ManagedExecError, TimeoutError):
    """A task ran for longer than its ``gpu_task(timeout=)``.

    The task's fault, or its timeout's. Raised in the task where it can stop, and the error of its future; what it had
    is given back. From Python 3.11 on ``concurrent.futures.TimeoutError`` catches it too; in 3.10 that is a class of
    its own, and only of a wait that was too short.
    """


class TaskCancelledError(ManagedExecError, concurrent.futures.CancelledError):
    """A task was told to stop by ``Future.cancel()`` while it ran.

    The caller's wish. Raised in the task where it can stop, and the error of its future, which is done and not
    ``cancelled()``: the task has run in part. Of a task that never started the error is the standard
    ``CancelledError``, which catches this one too.
    """


class DeviceOutOfServiceError(ManagedExecError, torch.AcceleratorError):
    """Every device that could have run a task broke earlier, and is out of service. The text says when and why.

    The machine's fault. The task did not run. The pool goes on with what it has left; a broken GPU is back in a new
    process.
    """


class TierFullError(ManagedExecError, RuntimeError):
    """A tier cannot take a copy: its budget is spent, the disk is full or cannot be written.

    Nobody's fault: the next tier is tried, and the tensor stays where it is if there is none.
    """


class NotMovableError(ManagedExecError, RuntimeError):
    """A managed tensor was asked to move and must not; the text says why.

    The caller's to resolve. The tensor is where it was, unharmed.
    """


class DeviceMemoryError(ManagedExecError, torch.OutOfMemoryError):
    """A kernel found no room on its device, and none could be made. The text lists who holds what there.

    The program's memory need. The kernel changed nothing, and no tensor was lost.
    """


class TensorLostError(ManagedExecError, torch.AcceleratorError):
    """The only copy of a managed tensor was in the memory of another device, and that device broke.

    The machine's fault. The tensor cannot be used any more; all others are as they were.
    """


class WorkerLostError(ManagedExecError, RuntimeError):
    """The process that ran a task ended before the task did: killed, crashed, or ended by the task itself.

    The task's fault, or that of whoever killed the process; the text has its exit code or signal. The process was
    replaced, and no other task has noticed. What the task had done outside its process, such as files, is done.
    """


class NotSendableError(ManagedExecError, TypeError):
    """A task, or its result, cannot go from one process to another; the text names the part that cannot.

    The caller's fault: with ``workers="processes"`` what a task is given and returns is pickled. A task that could not
    be sent has not run; the result of one that has is lost.
    """


class RemoteError(ManagedExecError, RuntimeError):
    """Stands for an exception that a task raised in another process and that cannot be pickled. It has its text.

    The task's fault. The process goes on.
    """
