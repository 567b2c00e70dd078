"""Every exception of the package. Each class says whose fault it is and what state is left behind."""

from __future__ import annotations


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
