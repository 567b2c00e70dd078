"""Takes a device out of service that broke under a task, so that no other task is sent there.

A broken device fails its tasks fast, and so would always be the least loaded one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import torch

from managed_exec.devices import Device
from managed_exec.scheduling.loads import DeviceLoads

_log = logging.getLogger("concurrent.futures")  # where the standard pool reports what befalls a worker


class DeviceHealth:
    """Which of a pool's devices work."""

    def __init__(
        self, devices: Sequence[Device], loads: DeviceLoads, withdraw: Callable[[torch.device], None] | None = None
    ) -> None:
        """
        Args:
            withdraw: told, once, of each device that broke, so that no memory is moved there.
        """
        self._devices = devices
        self._loads = loads
        self._withdraw = withdraw

    def examine(self, task_id: int, error: BaseException) -> None:
        """Take those devices out of service that do not work any more, now that a task has failed with *error*.

        The error alone does not tell: some backends raise it for a mistake of the program's, and it may be of another
        device than the task's own. So each device that the pool has used is asked for a tiny kernel.
        """
        for position, device in enumerate(self._devices):
            if not device.is_accelerator or not self._loads.was_used(position):
                continue
            if self._loads.out_of_service(position) is not None:
                continue
            report = _report_of(device)
            if report is None:
                continue
            since = time.strftime("%Y-%m-%d %H:%M:%S")
            reason = f"{device.torch_device} since {since}, when task {task_id} failed with {_text(error)}"
            if self._loads.take_out(position, reason):
                if self._withdraw is not None:
                    self._withdraw(device.torch_device)
                _log.error("device out of service: %s. A kernel of one number fails too: %s", reason, _text(report))


def _report_of(device: Device) -> Exception | None:
    """Return what *device* reports of a tiny kernel and of its result's way to the host; None if it works."""
    try:
        torch.zeros(1, device=device.torch_device).item()
    except torch.AcceleratorError as error:
        return error.with_traceback(None)
    except Exception as error:  # noqa: BLE001 out of memory, say: the device answers, and the worker must go on
        _log.debug("%s answers with %r", device.torch_device, error)
    return None


def _text(error: BaseException) -> str:
    """Return the first line of *error*: CUDA's advice follows on others."""
    try:
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    except Exception:  # noqa: BLE001 an error of the user's need not be printable
        return type(error).__name__
