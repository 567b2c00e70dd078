"""Making room on a device for a kernel that found none.

The kernel has let go of its operands. Its thread takes the device's turn (see ``pressure``), spills the coldest movable
storages, and runs the kernel again; when there is nothing left to spill it waits for kernels in flight, then has the
call made on another device if one has room, then waits, for at most ``wait_s``, for what other running tasks hold on to
and cannot be moved; then it raises.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, TypeVar

import torch

from managed_exec.errors import DeviceMemoryError
from managed_exec.events import CallMigrated, Hooks
from managed_exec.memory import owner as ownership
from managed_exec.memory.limits import Limits
from managed_exec.memory.mover import TIERS_FULL, Mover
from managed_exec.memory.owner import Owner
from managed_exec.memory.policy import MemoryPolicy
from managed_exec.memory.pressure import Patience, Turns
from managed_exec.memory.record import MOVING, ON_DEVICE, RESIDENT, Record, Residency
from managed_exec.memory.report import no_room_text
from managed_exec.memory.table import RecordTable

T = TypeVar("T")
_TRIED = re.compile(r"[Tt]ried to allocate ([\d.]+) ?(bytes|[KMG]iB)")
_GUESSED_BYTES = 2**20  # where the text of an error does not say what was asked for
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_TOO_LARGE = "that is more than the device has"
_IN_VAIN = "others bring back what is moved away for it"
_YOUNGEST = 2**62  # the age of what no task asked for
# Reruns in a row without anything spilled, while the device says that it has room. A kernel with several outputs can
# fail at each of them in turn.
_MAX_VAIN_RERUNS = 64
# How long to wait for a reference to a storage that may be going at this very moment, in a task that has just ended.
_GRACE_S = 0.5
# A task drops its tensors without a word, so a wait for that looks again this often.
_LOOK_AGAIN_S = 0.02


class NoRoom(NamedTuple):
    """What a kernel returns that has not run, because there was no room.

    A value and not an exception: an exception would keep the frames, and so the tensors, of the attempt that failed.
    """

    device: torch.device
    needed_bytes: int  # what could not be allocated; at most, where the error's text is rounded
    least_bytes: int = 0  # what that is at least, besides the operands

    @property
    def enough_bytes(self) -> int:
        """What has to be free for another try to be worth it."""
        return self.least_bytes or self.needed_bytes

    @staticmethod
    def of(error: torch.OutOfMemoryError, device: torch.device) -> NoRoom:
        """Read *error*, which an allocation on *device* has raised."""
        found = _TRIED.search(str(error))
        if found is None:
            return NoRoom(device, _GUESSED_BYTES)
        # The text has two decimals, so the true number may be half of the last one more, or less.
        value, rounded, unit = float(found[1]), 0.005 if "." in found[1] else 0.0, _UNITS[found[2]]
        return NoRoom(device, int((value + rounded) * unit), int((value - rounded) * unit))


class ElsewhereError(DeviceMemoryError):
    """A kernel cannot have room on its device now, and could on ``target``: make the call there.

    Only calls above autograd can be; so this is raised where somebody up there takes it.
    """

    def __init__(self, text: str, target: torch.device) -> None:
        super().__init__(text)
        self.target = target


class _Request(NamedTuple):
    """Who needs how much room where."""

    no_room: NoRoom  # what its kernel has returned
    wanted_bytes: int  # to be spilled for it
    operands: Sequence[Record]  # of the kernel; not spilled for it
    task: Owner | None
    may_leave: bool  # whether the call can be made on another device

    @property
    def device(self) -> torch.device:
        return self.no_room.device

    @property
    def needed_bytes(self) -> int:
        return self.no_room.needed_bytes


class Relief:
    """Makes room on all devices of the process."""

    def __init__(self, table: RecordTable, mover: Mover, policy: MemoryPolicy, limits: Limits, hooks: Hooks) -> None:
        self._table = table
        self._hooks = hooks
        self._mover = mover
        self._policy = policy
        self._limits = limits
        self._turns: dict[torch.device, Turns] = {}  # guarded by the table's lock, as the next two
        self.reruns = 0
        self.migrated = 0

    def rerun(
        self,
        call: Callable[[], T | NoRoom],
        no_room: NoRoom,
        operands: Sequence[Record] = (),
        may_leave: bool = True,
    ) -> T:
        """Make room and run *call*, again until it succeeds.

        Args:
            call: returns ``NoRoom``, having changed nothing, as long as it finds no room.
            no_room: what it has just returned.
            operands: what must not be spilled for it.
            may_leave: whether the call can be made on another device, if nobody has said that it stays.

        Raises:
            DeviceMemoryError: there is no room and none can be made; the text lists who holds what.
            ElsewhereError: there is room on another device, and the call may be made there.
            TaskCancelledError, TaskTimeoutError: the task is to stop; it waits no longer.
        """
        task = ownership.thread.owner
        if task is None and operands:
            task = operands[0].owner
        if self._table.is_nested() and not self._turns_of(no_room.device).is_mine:
            return self._rerun_nested(call, no_room, operands, task)
        age = _YOUNGEST if task is None else task.age
        may_leave = may_leave and not (ownership.thread.stays or any(record.pins for record in operands))
        while True:
            request = _Request(no_room, no_room.needed_bytes, operands, task, may_leave)
            # One turn at a time: two threads that each held one and wanted the other's would wait for ever.
            with self._turns_of(no_room.device).turn(age):
                outcome = self._rerun_on(call, request)
            if not isinstance(outcome, NoRoom):
                return outcome
            no_room = outcome

    def _rerun_nested(
        self, call: Callable[[], T | NoRoom], no_room: NoRoom, operands: Sequence[Record], task: Owner | None
    ) -> T:
        """Do what can be done for a kernel inside another: neither the turn nor anybody else is waited for.

        Whoever has the turn may be waiting for the outer kernel. That lets go of its operands when this one raises.
        """
        request = _Request(no_room, no_room.needed_bytes, operands, task, False)
        while self._spill_coldest(request, set()):
            outcome = call()
            if not isinstance(outcome, NoRoom):
                return outcome
            no_room = outcome
            request = request._replace(
                no_room=no_room, wanted_bytes=max(request.wanted_bytes * 2, no_room.needed_bytes)
            )
        raise torch.OutOfMemoryError(
            f"no room on {no_room.device} in a kernel. Tried to allocate {no_room.needed_bytes} bytes"
        )

    def note_migration(self, target: torch.device) -> None:
        """Count a call of the calling thread that is about to be made on *target*, and tell its task."""
        owner = ownership.thread.owner
        with self._table.lock:
            self.migrated += 1
            if owner is not None:
                owner.migrated += 1
        if owner is not None and owner.on_migration is not None:
            owner.on_migration(target)
        if self._hooks.hooks:
            self._hooks.emit(CallMigrated(None if owner is None else owner.name, target, time.perf_counter()))

    def _rerun_on(self, call: Callable[[], T | NoRoom], request: _Request) -> T | NoRoom:
        """Make room on a device until *call* succeeds or finds no room on another one. The turn is held."""
        vain = 0  # reruns in a row before which there was nothing to spill
        patience = Patience(self._policy.wait_s, _GRACE_S, request.needed_bytes)
        while True:
            vain = 0 if self._make_room(request, vain, patience) else vain + 1
            with self._table.lock:
                self.reruns += 1
            outcome = call()
            if not isinstance(outcome, NoRoom) or outcome.device != request.device:
                return outcome
            # Freed, but not enough, or in pieces, or taken by others: more than before.
            request = request._replace(
                no_room=outcome, wanted_bytes=max(request.wanted_bytes * 2, outcome.needed_bytes)
            )

    def _turns_of(self, device: torch.device) -> Turns:
        with self._table.lock:
            if device not in self._turns:
                self._turns[device] = Turns(self._table.changed, self._table.check_stop)
            return self._turns[device]

    def _make_room(self, request: _Request, vain: int, patience: Patience) -> bool:
        """Free what is wanted, or as much as can be; wait where that helps. The turn is held.

        Returns:
            Whether anything was spilled, or let go of by others. If not, another try is worth it all the same.

        Raises:
            DeviceMemoryError: another try is not worth it.
        """
        never = self._why_never(request)
        if never is not None:
            self._send_elsewhere(request, never)
            raise DeviceMemoryError(self._no_room(request, never))
        unplaced: set[Record] = set()
        if self._spill_coldest(request, unplaced):
            patience.renew()
            if self._may_go_on(request, patience):
                return True
            self._send_elsewhere(request, _IN_VAIN)
            raise DeviceMemoryError(self._no_room(request, _IN_VAIN))
        if vain == 0:
            # What the allocator keeps for reuse may be in the wrong pieces.
            torch.accelerator.memory.empty_cache()
            return False
        if vain < _MAX_VAIN_RERUNS // 2 and self._has_room(request):
            return False  # by the device's own account; whoever took it for a moment may be done
        reason = "beside the kernel's own operands nothing that is there can be moved"
        if unplaced:
            reason = "no tier has room for what could be moved"
        hope = self._wait_for_others(request, unplaced, patience, for_tasks=False)
        if not hope:
            self._send_elsewhere(request, reason)
            hope = self._wait_for_others(request, unplaced, patience, for_tasks=True)
        if hope and self._may_go_on(request, patience):
            self._spill_coldest(request, unplaced)
            return True  # if another was faster, there is something else now
        if vain < _MAX_VAIN_RERUNS and self._has_room(request):
            return False  # somebody has let go of it meanwhile
        if request.needed_bytes > self._limits.total_bytes(request.device):
            reason = _TOO_LARGE  # it might have been just as large, by the text's rounded number
        raise DeviceMemoryError(self._no_room(request, reason, unplaced))

    def _why_never(self, request: _Request) -> str | None:
        """Return why the device will never have room for a request, whatever others do; None if it may."""
        total_bytes = self._limits.total_bytes(request.device)
        if request.no_room.enough_bytes > total_bytes:
            return _TOO_LARGE
        operands = [record for record in request.operands if record.device == request.device]
        # What is not resident may be what could not be allocated.
        least_bytes = request.no_room.least_bytes + sum(r.n_bytes for r in operands if r.residency is RESIDENT)
        if max(least_bytes, sum(record.n_bytes for record in operands)) > total_bytes:
            return "with the kernel's operands that is more than the device has"
        return None

    def _may_go_on(self, request: _Request, patience: Patience) -> bool:
        return patience.may_go_on(self._limits.memory(request.device).free_bytes)

    def _has_room(self, request: _Request) -> bool:
        return self._limits.memory(request.device).free_bytes >= request.no_room.enough_bytes

    def _send_elsewhere(self, request: _Request, reason: str) -> None:
        """Raise if another device has room for the call, or can make it, and the call may leave."""
        if not request.may_leave:
            return
        needed_bytes = request.needed_bytes + sum(record.n_bytes for record in request.operands)
        room = {peer: self._limits.memory(peer).free_bytes for peer in self._limits.peers(request.device)}
        if self._policy.spill and max(room.values(), default=0) < needed_bytes:  # no device has it free
            with self._table.lock:
                busy = self._table.in_use()
                for record in self._table.live():
                    is_there = record.device in room and record.residency is RESIDENT
                    if is_there and self._table.obstacle(record, busy) is None:
                        room[record.device] += record.n_bytes
        target = max(room, key=lambda device: room[device], default=request.device)
        if target != request.device and room[target] >= needed_bytes:
            raise ElsewhereError(self._no_room(request, reason), target)

    def _spill_coldest(self, request: _Request, unplaced: set[Record]) -> bool:
        """Spill from the device until what is wanted is freed; return whether anything was.

        What no tier took is added to *unplaced*. What was spilled to this device from others goes first, then what
        finished tasks left, then what other tasks have, then the task's own; each by its last use.
        """
        candidates = []
        with self._table.lock:
            busy = self._table.in_use()
            for i, record in enumerate(self._table.live()):
                if record.residency is Residency.PEER and record.copy.bytes.device == request.device:
                    candidates.append((0, record.last_use, i, record))
                elif (
                    record.device == request.device
                    and record.residency is RESIDENT
                    and record not in request.operands
                    and self._table.obstacle(record, busy) is None
                ):
                    candidates.append((_rank(record, request.task), record.last_use, i, record))
        freed = 0
        names = self._policy.spill
        for rank, _, _, record in sorted(candidates):
            if rank == 0:
                obstacle = None if self._mover.sink(record, names) else TIERS_FULL
            else:
                obstacle = self._mover.spill(record, names)
            if obstacle == TIERS_FULL:
                unplaced.add(record)
            elif obstacle is None:
                freed += record.n_bytes
                if freed >= request.wanted_bytes:
                    break
        return freed > 0

    def _wait_for_others(
        self, request: _Request, unplaced: Collection[Record], patience: Patience, *, for_tasks: bool
    ) -> bool:
        """Wait until something of another kernel or task may have become movable, or is gone; return whether it has.

        What is *unplaced* does not count: it was movable already.

        Kernels in flight are waited for as long as they take.

        Args:
            for_tasks: whether to wait, at most ``wait_s``, for what other running tasks hold on to and cannot be moved
                (they may be waiting for this one), their plain tensors included; else for a moment, for references that
                are just going.
        """
        free_bytes = self._limits.memory(request.device).free_bytes
        with self._table.lock:
            landed = self._table.landed
            while True:
                self._table.check_stop()
                others = [r for r in self._table.live() if r.device == request.device and r not in request.operands]
                others = [r for r in others if r.residency in ON_DEVICE]
                movable = [r for r in others if r not in unplaced]
                busy = self._table.in_use()
                if any(r.residency is RESIDENT and self._table.obstacle(r, busy) is None for r in movable):
                    return True
                waited_for = self._table.in_use_elsewhere()
                in_flight = any(r in waited_for or r.residency in MOVING for r in others)
                unregistered = self._table.in_flight_elsewhere()
                is_awaited = any(r in waited_for and not r.pins and r.immovable is None for r in movable)
                if is_awaited or self._table.is_making_elsewhere():
                    patience.note_flight()
                memory = self._limits.memory(request.device)
                is_early = time.monotonic() < patience.deadline(memory.free_bytes, for_tasks=for_tasks)
                if is_early and not in_flight and not unregistered and landed != self._table.landed:
                    return True  # what was in flight is down, and what it made may have gone already
                if for_tasks:
                    hope = self._others_hold(request, others)
                else:  # what is neither pinned nor exported shares its memory with something in some frame
                    hope = any(not r.pins and r.immovable is None for r in movable)
                if memory.free_bytes > free_bytes and memory.free_bytes >= request.no_room.enough_bytes:
                    return True
                if not in_flight and not ((hope or unregistered) and is_early):
                    return False
                self._table.waiting += 1
                try:
                    self._table.changed.wait(_LOOK_AGAIN_S)
                finally:
                    self._table.waiting -= 1

    def _others_hold(self, request: _Request, others: Collection[Record]) -> bool:
        """Return whether running tasks other than the request's may hold memory of its device. The lock is held.

        Args:
            others: the records on the device but for the operands.
        """
        if any(r.owner is not request.task and r.owner is not None and not r.owner.finished for r in others):
            return True
        # Nobody is told whose the plain tensors are.
        running = [owner for owner in list(self._table.running) if owner is not request.task]
        if not any(owner.device == request.device for owner in running):
            return False
        on_device = [r for r in self._table.live() if r.device == request.device and r.residency in ON_DEVICE]
        managed_bytes = sum(record.n_bytes for record in on_device)
        return self._limits.memory(request.device).allocated_bytes > managed_bytes

    def _no_room(self, request: _Request, reason: str, unplaced: Collection[Record] = ()) -> str:
        """Say why there is no room; see ``report``."""
        return no_room_text(
            self._table,
            self._limits,
            self._policy,
            request.device,
            request.needed_bytes,
            reason,
            request.operands,
            unplaced,
        )


def _rank(record: Record, task: Owner | None) -> int:
    if record.owner is None or record.owner.finished:
        return 1
    return 3 if record.owner is task else 2
