"""Making room on a device for a kernel that found none.

The kernel has let go of its operands. Its thread takes the device's turn (see ``pressure``), spills the coldest movable
storages, and runs the kernel again; when there is nothing left to spill it waits for kernels in flight, then, for at
most ``wait_s``, for what other running tasks hold on to and cannot be moved; then it raises.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch

from managed_exec.devices import AcceleratorDevice, CpuDevice, DeviceMemory
from managed_exec.errors import DeviceMemoryError
from managed_exec.memory import owner as ownership
from managed_exec.memory.mover import Mover
from managed_exec.memory.owner import Owner
from managed_exec.memory.policy import MemoryPolicy
from managed_exec.memory.pressure import Turns
from managed_exec.memory.record import Record, Residency
from managed_exec.memory.table import RecordTable
from managed_exec.sizes import format_bytes

T = TypeVar("T")
_TRIED = re.compile(r"[Tt]ried to allocate ([\d.]+) ?(bytes|[KMG]iB)")
_GUESSED_BYTES = 2**20  # where the text of an error does not say what was asked for
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_YOUNGEST = 2**62  # the age of what no task asked for
_IN_COPY = (Residency.LEAVING, Residency.RETURNING)
_ON_DEVICE = (Residency.RESIDENT, Residency.LEAVING, Residency.RETURNING)
# Reruns in a row without anything spilled, while the device says that it has room. A kernel with several outputs can
# fail at each of them in turn.
_MAX_VAIN_RERUNS = 32
# How long to wait for a reference to a storage that may be going at this very moment, in a task that has just ended.
_GRACE_S = 0.5
# A task drops its tensors without a word, so a wait for that looks again this often.
_LOOK_AGAIN_S = 0.02


class NoRoom(NamedTuple):
    """What a kernel returns that has not run, because there was no room.

    A value and not an exception: an exception would keep the frames, and so the tensors, of the attempt that failed.
    """

    device: torch.device
    needed_bytes: int  # what could not be allocated

    @staticmethod
    def of(error: torch.OutOfMemoryError, device: torch.device) -> NoRoom:
        """Read *error*, which an allocation on *device* has raised."""
        found = _TRIED.search(str(error))
        if found is None:
            return NoRoom(device, _GUESSED_BYTES)
        # The text has two decimals, so the true number may be half of the last one more.
        return NoRoom(device, int((float(found[1]) + (0.005 if "." in found[1] else 0)) * _UNITS[found[2]]))


class Relief:
    """Makes room on all devices of the process."""

    def __init__(self, table: RecordTable, mover: Mover, policy: MemoryPolicy) -> None:
        self._table = table
        self._mover = mover
        self._policy = policy
        self._turns: dict[torch.device, Turns] = {}  # guarded by the table's lock, as the next
        self.reruns = 0

    def rerun(self, call: Callable[[], T | NoRoom], no_room: NoRoom, keep: Sequence[Record] = ()) -> T:
        """Make room and run *call*, again until it succeeds.

        Args:
            call: returns ``NoRoom``, having changed nothing, as long as it finds no room.
            no_room: what it has just returned.
            keep: what must not be spilled for it: its operands.

        Raises:
            DeviceMemoryError: there is no room and none can be made; the text lists who holds what.
        """
        task = ownership.thread.owner
        if task is None and keep:
            task = keep[0].owner
        age = _YOUNGEST if task is None else task.age
        while True:
            # One turn at a time: two threads that each held one and wanted the other's would wait for ever.
            with self._turns_of(no_room.device).turn(age):
                outcome = self._rerun_on(no_room.device, call, no_room.needed_bytes, keep, task)
            if not isinstance(outcome, NoRoom):
                return outcome
            no_room = outcome

    def _rerun_on(
        self,
        device: torch.device,
        call: Callable[[], T | NoRoom],
        needed_bytes: int,
        keep: Sequence[Record],
        task: Owner | None,
    ) -> T | NoRoom:
        """Make room on *device* until *call* succeeds or finds no room on another one. The turn is held."""
        wanted_bytes = needed_bytes
        vain = 0  # reruns in a row before which there was nothing to spill
        while True:
            spilled = self._make_room(device, wanted_bytes, needed_bytes, keep, task, vain)
            vain = 0 if spilled else vain + 1
            with self._table.lock:
                self.reruns += 1
            outcome = call()
            if not isinstance(outcome, NoRoom) or outcome.device != device:
                return outcome
            # Freed, but not enough, or in pieces, or taken by others: more than before.
            needed_bytes = outcome.needed_bytes
            wanted_bytes = max(wanted_bytes * 2, needed_bytes)

    def _turns_of(self, device: torch.device) -> Turns:
        with self._table.lock:
            if device not in self._turns:
                self._turns[device] = Turns(self._table.changed)
            return self._turns[device]

    def _make_room(
        self,
        device: torch.device,
        wanted_bytes: int,
        needed_bytes: int,
        keep: Sequence[Record],
        task: Owner | None,
        vain: int,
    ) -> bool:
        """Free *wanted_bytes* on *device*, or as many as can be; wait where that helps. The turn is held.

        Returns:
            Whether anything was spilled. If not, another try is worth it all the same.

        Raises:
            DeviceMemoryError: another try is not worth it.
        """
        if needed_bytes > device_memory(device).total_bytes:
            raise DeviceMemoryError(self._report(device, needed_bytes, "that is more than the device has"))
        if self._spill_coldest(device, wanted_bytes, keep, task):
            return True
        if vain == 0:
            # What the allocator keeps for reuse may be in the wrong pieces.
            torch.accelerator.memory.empty_cache()
            return False
        if self._wait_for_others(device, keep, task):
            self._spill_coldest(device, wanted_bytes, keep, task)
            return True  # if another was faster, there is something else now
        if vain < _MAX_VAIN_RERUNS and device_memory(device).free_bytes >= needed_bytes:
            return False  # there is room, by the device's own account; whoever took it for a moment may be done
        reason = "beside the kernel's own operands nothing that is there can be moved"
        raise DeviceMemoryError(self._report(device, needed_bytes, reason, keep))

    def _spill_coldest(
        self, device: torch.device, wanted_bytes: int, keep: Sequence[Record], task: Owner | None
    ) -> bool:
        """Spill from *device* until *wanted_bytes* are freed; return whether anything was.

        What finished tasks left goes first, then what other tasks have, then the task's own; each by its last use.
        """
        with self._table.lock:
            candidates = [
                (_rank(record, task), record.last_use, i, record)
                for i, record in enumerate(self._table.live())
                if record.device == device
                and record.residency is Residency.RESIDENT
                and record not in keep
                and record.obstacle() is None
            ]
        freed = 0
        for *_, record in sorted(candidates):
            if self._mover.spill(record, self._policy.spill):
                freed += record.n_bytes
                if freed >= wanted_bytes:
                    break
        return freed > 0

    def _wait_for_others(self, device: torch.device, keep: Sequence[Record], task: Owner | None) -> bool:
        """Wait until something of another kernel or task may have become movable; return whether it has.

        Kernels in flight are waited for as long as they take. What another running task holds on to, and cannot be
        moved, is waited for at most ``wait_s``: that task may be waiting for this one.
        """
        grace = time.monotonic() + min(_GRACE_S, self._policy.wait_s)
        deadline = time.monotonic() + self._policy.wait_s
        with self._table.lock:
            landed = self._table.landed
            while True:
                others = [r for r in self._table.live() if r.device == device and r not in keep]
                others = [r for r in others if r.residency in _ON_DEVICE]
                if any(r.residency is Residency.RESIDENT and r.obstacle() is None for r in others):
                    return True
                in_flight = any(r.users or r.residency in _IN_COPY for r in others)
                held = any(r.owner is not None and r.owner is not task and not r.owner.finished for r in others)
                unregistered = self._table.in_flight > 0  # this thread has none: its kernel has found no room
                if not in_flight and not unregistered and landed != self._table.landed:
                    return True  # what was in flight is down, and what it made may have gone already
                # Neither pinned nor exported: what shares its memory is likely on its way out of some frame.
                fading = any(not r.pins and r.immovable is None for r in others)
                now = time.monotonic()
                if not in_flight and not ((held or unregistered) and now < deadline) and not (fading and now < grace):
                    return False
                self._table.waiting += 1
                try:
                    self._table.changed.wait(_LOOK_AGAIN_S)
                finally:
                    self._table.waiting -= 1

    def _report(self, device: torch.device, wanted_bytes: int, reason: str, operands: Sequence[Record] = ()) -> str:
        """Say who holds what on *device*."""
        held: dict[tuple[str, str], int] = {}
        with self._table.lock:
            for record in self._table.live():
                if record.device == device and record.residency in _ON_DEVICE:
                    name = "no task" if record.owner is None else record.owner.name
                    obstacle = "an operand of the kernel" if record in operands else record.obstacle()
                    key = name, obstacle or "movable"
                    held[key] = held.get(key, 0) + record.n_bytes
        memory = device_memory(device)
        lines = [
            f"no room for {format_bytes(wanted_bytes)} on {device}: {reason}.",
            f"  {device} has {format_bytes(memory.total_bytes)}, {format_bytes(memory.free_bytes)} of it free; "
            f"{format_bytes(memory.allocated_bytes)} are allocated, {format_bytes(sum(held.values()))} managed:",
        ]
        lines += [f"  {name}: {format_bytes(n_bytes)}, {why}" for (name, why), n_bytes in sorted(held.items())]
        return "\n".join(lines)


def _rank(record: Record, task: Owner | None) -> int:
    if record.owner is None or record.owner.finished:
        return 0
    return 2 if record.owner is task else 1


def device_memory(device: torch.device) -> DeviceMemory:
    """Read the memory of *device*."""
    return (AcceleratorDevice(device) if device.type != "cpu" else CpuDevice()).memory()
