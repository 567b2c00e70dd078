"""The thread that reads the memory and utilisation of a pool's devices, away from the way of any task.

Reads a few times a second while tasks run, and sleeps while none do: polling would keep an idle GPU awake.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from queue import Empty, SimpleQueue

from managed_exec.devices import Device
from managed_exec.scheduling.loads import DeviceLoads

_log = logging.getLogger(__name__)

PERIOD_S = 0.25


class DeviceSampler:
    """Keep *loads* informed of what is free on *devices*, until told to stop."""

    def __init__(self, devices: Sequence[Device], loads: DeviceLoads, thread_name: str) -> None:
        self._devices = devices
        self._loads = loads
        # True wakes the sampler because a task has started, None ends it. Whoever drops the pool puts the None.
        self.wake: SimpleQueue[bool | None] = SimpleQueue()
        # Whether it waits without a time limit. Set before it looks a last time for tasks, and read after a task was
        # booked: so a task that comes while it falls asleep is seen by one of the two.
        self._asleep = False
        self.thread = threading.Thread(target=self._run, name=thread_name)
        loads.on_busy = self._on_busy

    def end(self, *, wait: bool) -> None:
        """Have the thread end soon; with *wait*, wait until it has."""
        self.wake.put(None)
        if wait:
            self.thread.join()

    def _on_busy(self) -> None:
        # Short tasks one after another each find the pool idle: only the first may cost a change of threads.
        if self._asleep:
            self._asleep = False
            self.wake.put(True)

    def _run(self) -> None:
        seen = -1  # bookings when the last sample was taken
        while True:
            placed, running = self._loads.placed, self._loads.running
            self._sample_all()
            # One period without a task, and this sample came after the last of them.
            self._asleep = placed == seen and not running
            if self._asleep and self._loads.placed != placed:
                self._asleep = False
            seen = placed
            try:
                if self.wake.get(timeout=None if self._asleep else PERIOD_S) is None:
                    self._loads.on_busy = None  # or the two would keep each other alive until the collector comes
                    return
            except Empty:
                pass  # the period is over

    def _sample_all(self) -> None:
        for position, device in enumerate(self._devices):
            # Elsewhere a reading would create a context, hundreds of megabytes, on a device no task may ever get.
            if device.read_leaves_no_trace or self._loads.was_used(position):
                self._sample(position)

    def _sample(self, position: int) -> None:
        device = self._devices[position]
        try:
            self._loads.record_sample(position, device.memory(), device.utilization())
        except Exception as error:  # noqa: BLE001 telemetry guides, it never fails
            # A broken device. The tasks on it have the error; placement goes on with the old figures.
            _log.debug("cannot read %r: %s", device, error)
