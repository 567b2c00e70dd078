"""What is found out of a task before it starts, for admission and placement, and learned from it when it has run.

Two guesses, for pools with accelerators: where the tensors are that the task was given, and what it will need, by the
footprints of earlier tasks of its function. By default both guide the placement and hold nothing back, for tasks may
wait for each other; with ``MemoryPolicy(admission="learned")`` the second is as good as a hint of the user's.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch

from managed_exec.devices import Device
from managed_exec.options import ANY, Need
from managed_exec.scheduling.footprints import Footprints, function_name
from managed_exec.scheduling.loads import DeviceLoads
from managed_exec.task import Task
from managed_exec.tensors.arguments import argument_bytes, may_have_tensors

_log = logging.getLogger(__name__)


class Appraiser:
    """Appraises the tasks of one pool. Takes the locks of the loads and the footprints, one after the other."""

    def __init__(
        self,
        devices: Sequence[Device],
        loads: DeviceLoads,
        footprints: Footprints,
        measures: bool,
        holds_back: bool,
    ) -> None:
        self._positions = {device.torch_device: i for i, device in enumerate(devices)}
        self._loads = loads
        self._footprints = footprints
        self._measures = measures  # whether the memory of tasks is managed, and so counted
        self.holds_back = holds_back and measures  # tasks, by what was learned
        self._chooses = len(devices) > 1

    def knows(self, name: str) -> bool:
        """Return whether a function of that name, unknown so far, has shown its footprint, or no longer has to."""
        return name in self._footprints or not self._footprints.enabled

    def appraise(self, task: Task) -> None:
        """Set what *task*, which does not run yet, needs, by what is known now. Never fails: these are guesses."""
        need = task.need
        guesses = (self.holds_back or not self._footprints.is_empty) and self._footprints.enabled
        if not (guesses or need.unknown or may_have_tensors(task.fn, task.args, task.kwargs)) or need.alone:
            return
        try:
            task.need = self._appraised(task, need, guesses and need.n_bytes == 0)
        except Exception as error:  # noqa: BLE001 guesses guide, they never fail; objects of the user's are looked at
            _log.debug("cannot appraise task %d: %r", task.id, error)
            if need.unknown:  # what can be known of it is known, so it must not be held for that any more
                task.need = need._replace(unknown=None)

    def _appraised(self, task: Task, need: Need, guesses: bool) -> Need:
        places = argument_bytes(task.fn, task.args, task.kwargs)
        unknown: str | None = None
        n_bytes = need.n_bytes
        expected = 0
        if guesses:
            name = function_name(task.fn)
            estimate = self._footprints.estimate(name, sum(places.values()))
            if estimate is None:
                unknown = name if self.holds_back else None
            else:
                # A guess is never refused: at most it is for all of the largest device.
                expected = min(estimate, self._loads.largest_bytes(need))
                n_bytes = expected if self.holds_back else 0
        local = self._local(places)
        if not (n_bytes or expected or local or unknown) and need.allowed is None:
            return ANY
        return need._replace(n_bytes=n_bytes, unknown=unknown, expected_bytes=expected, local_bytes=local)

    def _local(self, places: Mapping[torch.device, int]) -> Mapping[int, int]:
        """Return the bytes of *places* on the pool's devices, by position."""
        local = {self._positions[place]: n for place, n in places.items() if n and place in self._positions}
        return MappingProxyType(local) if local and self._chooses else ANY.local_bytes

    def learn(self, task: Task, peak_bytes: int, *, failed: bool, out_of_memory: bool) -> None:
        """Note what *task* has needed, before it lets go of its arguments. Never fails.

        Args:
            failed: then it may have ended early, and is only counted if it needed more than was expected.
            out_of_memory: then it needs more than it had; twice as much is expected from now on.
        """
        footprints = self._footprints
        if (
            not (self._measures and footprints.enabled) or task.fn is None
        ):  # it was given up, and has let go of its call
            return
        try:
            name = function_name(task.fn)
            n_bytes = sum(argument_bytes(task.fn, task.args, task.kwargs).values())
            estimate = footprints.estimate(name, n_bytes)
            if out_of_memory:
                largest = self._loads.largest_bytes(ANY)
                peak_bytes = min(2 * max(peak_bytes, estimate or 0), largest) or largest
            if not failed or estimate is None or peak_bytes > estimate:
                footprints.note(name, n_bytes, peak_bytes)
        except Exception as error:  # noqa: BLE001 as above; the task itself is done and keeps its result
            _log.debug("cannot learn from task %d: %r", task.id, error)
