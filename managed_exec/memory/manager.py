"""The memory manager: has kernels' operands resident, and makes room when a device has none.

P. A kernel that finds no room lets go of its operands, takes the device's turn, and gathers them again while room is
   made for it; the oldest task's turn comes first. So of kernels whose operands fit each gets done in the end.

Locks, outermost first: a device's turn; the table's lock; tiers' budgets. None but the turn is held while anything is
copied or a kernel runs.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

import torch

from managed_exec.devices import current_stream
from managed_exec.errors import DeviceMemoryError, NotMovableError, TierFullError
from managed_exec.events import Hooks
from managed_exec.memory.limits import Limits
from managed_exec.memory.mover import NOT_RESIDENT, TIERS_FULL, Mover
from managed_exec.memory.ordering import order_streams
from managed_exec.memory.owner import Owner
from managed_exec.memory.policy import MemoryPolicy
from managed_exec.memory.record import IN_A_TIER, RESIDENT, Record, Residency
from managed_exec.memory.relief import NoRoom, Relief
from managed_exec.memory.statistics import MemoryStatistics
from managed_exec.memory.table import RecordTable
from managed_exec.sizes import format_bytes

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Kernel(Protocol[T_co]):
    """What the manager needs of a kernel. It changes nothing when it raises out-of-memory, so it can be run again."""

    records: Sequence[Record]  # of its operands, each once

    def __call__(self) -> T_co:
        """Run; what it has made has its records when this returns."""

    def written(self) -> list[Record]:
        """Return those of the records that the kernel writes to."""

    def may_leave(self) -> bool:
        """Return whether the call that the kernel is part of can be made on another device."""

    def device(self) -> torch.device:
        """Return where the kernel allocates."""


class _Touch:
    """A kernel that does nothing, to have a record resident."""

    def __init__(self, record: Record) -> None:
        self.records: Sequence[Record] = (record,)

    def __call__(self) -> None:
        return None

    def written(self) -> list[Record]:
        return []

    def may_leave(self) -> bool:
        return False

    def device(self) -> torch.device:
        return self.records[0].device


class _Export(_Touch):
    """A kernel that notes why its record, which is resident and in use now, is never moved again.

    Noted before, the record of memory that could not be brought back would be stuck for nothing.
    """

    def __init__(self, record: Record, reason: str, lock: AbstractContextManager[object]) -> None:
        super().__init__(record)
        self._reason = reason
        self._lock = lock

    def __call__(self) -> None:
        with self._lock:
            self.records[0].immovable = self.records[0].immovable or self._reason


def _in_order(kernel: Kernel[T]) -> T:
    """Run *kernel*, whose operands are marked and resident, after what other streams do with them."""
    for record in kernel.records:
        if record.in_streams:  # the first may be on the CPU and others not, as in a copy
            order_streams(kernel.records, kernel.written())
            break
    return kernel()


class MemoryManager:
    """Manages the storages of one process."""

    def __init__(self, policy: MemoryPolicy) -> None:
        self.table = RecordTable()
        self.limits = Limits()
        self.holders: weakref.WeakSet[object] = weakref.WeakSet()  # open pools that insist on the policy
        self.hooks = Hooks()  # are told of every move, of whatever task
        self._take_policy(policy)

    def _take_policy(self, policy: MemoryPolicy) -> None:
        self.policy = policy
        self.table.min_bytes = policy.smallest_bytes
        self.limits.policy = policy
        self._mover = Mover(self.table, policy, self.limits, self.hooks)
        self.relief = Relief(self.table, self._mover, policy, self.limits, self.hooks)

    def change_policy(self, policy: MemoryPolicy) -> None:
        """Go on with *policy*, and with statistics from the beginning.

        Raises:
            ValueError: an open pool has another policy, or tensors are spilled under another.
        """
        if self.holders:
            raise ValueError(
                f"memory: the process has one memory manager, and an open pool has it under {self.policy}; shut that "
                "pool down first, or give every pool the same policy"
            )
        if self._spilled():
            gc.collect()  # those in dead cycles do not count
        with self.table.lock:
            spilled = self._spilled()
            if spilled:
                raise ValueError(
                    f"memory: the process has one memory manager, and tensors ({spilled} now) are spilled under "
                    f"{self.policy}; drop or unspill them first, or give every pool the same policy"
                )
            self.limits.lift()
            self._take_policy(policy)

    def _spilled(self) -> int:
        with self.table.lock:
            return sum(record.residency is not RESIDENT for record in self.table.live())

    # -- kernels ----------------------------------------------------------------------------------------------------

    def run(self, kernel: Kernel[T]) -> T:
        """Run *kernel* with all its operands resident; make room if there is none.

        Raises:
            DeviceMemoryError: there is no room and none can be made; the text lists who holds what.
            ElsewhereError: there is none, but on another device; the call can be made there.
        """
        outcome = self._run_once(kernel)
        if isinstance(outcome, NoRoom):
            return self.relief.rerun(
                lambda: self._run_once(kernel), outcome, kernel.records, may_leave=kernel.may_leave()
            )
        return outcome

    def are_ready(self, records: Sequence[Record]) -> bool:
        """Return whether *records*, which a kernel in flight reads, are resident; have its stream wait for writers."""
        table = self.table
        for record in records:
            if record.residency is not RESIDENT:
                return False
            record.last_use = table.tick()
            if record.in_streams and record.writer != current_stream(record.device):
                order_streams((record,), ())
        return True

    def _run_once(self, kernel: Kernel[T]) -> T | NoRoom:
        table = self.table
        records = kernel.records
        table.take_off(records)
        has_run = True
        try:
            for record in records:
                if record.residency is not RESIDENT:
                    break
                record.last_use = table.tick()
            else:
                return _in_order(kernel)
        except DeviceMemoryError:
            raise
        except torch.OutOfMemoryError as error:
            has_run = False
            return NoRoom.of(error, kernel.device())
        finally:
            table.land(has_run=has_run)
        return self._run_with_returns(kernel)

    def _run_with_returns(self, kernel: Kernel[T]) -> T | NoRoom:
        """Run *kernel* once those of its operands that are not resident have been brought back."""
        marked: list[Record] = []  # grows under the lock, by one resident record after another
        self.table.take_off(marked)
        has_run = False
        try:
            for record in kernel.records:
                if not self._bring_back(record, marked):
                    return NoRoom(record.device, record.n_bytes)
            result = _in_order(kernel)
            has_run = True
            return result
        except DeviceMemoryError:
            raise
        except torch.OutOfMemoryError as error:
            return NoRoom.of(error, kernel.device())
        finally:
            self.table.land(has_run=has_run)

    def _bring_back(self, record: Record, marked: list[Record]) -> bool:
        """Have *record* resident and in *marked*; return False, and do neither, if there is no room for it."""
        with self.table.lock:
            self.table.wait_settled(record)
            record.last_use = self.table.tick()
            if record.residency is RESIDENT:
                marked.append(record)
                return True
            record.moved_by = threading.get_ident()
            back_to, record.residency = record.residency, Residency.RETURNING
        try:
            self._mover.finish_return(record, back_to, marked)
        except torch.OutOfMemoryError:
            return False
        return True

    def copy_elsewhere(self, record: Record, device: torch.device) -> torch.Tensor | None:
        """Return the bytes of a *record* that is spilled, for a copy to *device*; None if they are read in place.

        So a spilled tensor is read without bringing it back, also if its device broke or has no room.
        """
        if record.residency is RESIDENT or record.device == device:
            return None
        with self.table.lock:
            self.table.wait_settled(record)
            copy = record.copy
        if copy is None:
            return None
        found: torch.Tensor = copy.bytes
        if not found.is_cpu:
            # The record may come home and give the copy back while it is still read here.
            found.record_stream(current_stream(found.device))
        return found

    # -- what the user asks for -------------------------------------------------------------------------------------

    def spill(self, record: Record, tier: str | None = None) -> None:
        """Move *record* to *tier*, or to the first of the policy's that takes it.

        Raises:
            ValueError: no such tier.
            NotMovableError: the storage must not move now.
            TierFullError: no tier took it.
        """
        if tier is not None and tier not in self._mover.tiers:
            raise ValueError(f"tier: expected one of {', '.join(self._mover.tiers)}, got {tier!r}")
        names = self.policy.spill if tier is None else (tier,)
        obstacle: str | None = NOT_RESIDENT
        while obstacle == NOT_RESIDENT:  # or another thread has moved it since the look
            with self.table.lock:
                self.table.wait_settled(record)
                where = record.residency
            if where is not RESIDENT:
                if tier is None or where is self._mover.tiers[tier].residency:
                    return
                if where is Residency.PEER and self._mover.sink(record, names):
                    return
                self.unspill(record)  # the other tiers do not hand over to each other
            if record.device.type == "cpu" and "host" in names:
                return  # it is there
            obstacle = self._mover.spill(record, names)
        what = f"{format_bytes(record.n_bytes)} of {record.device}"
        if obstacle == TIERS_FULL:
            raise TierFullError(f"no tier has room for {what}, of {', '.join(names) or 'none'}")
        if obstacle is not None:
            raise NotMovableError(f"{what} cannot be moved: {obstacle}")

    def unspill(self, record: Record) -> None:
        """Bring *record* back to its device.

        Raises:
            DeviceMemoryError: there is no room and none can be made.
        """
        self.run(_Touch(record))

    def pin(self, record: Record) -> None:
        """Bring *record* back and keep it where it is until as many ``unpin``."""
        with self.table.lock:
            record.pins += 1
        try:
            self.unspill(record)
        except BaseException:
            self.unpin(record)
            raise

    def unpin(self, record: Record) -> None:
        """Undo one ``pin``.

        Raises:
            ValueError: there is none to undo.
        """
        with self.table.lock:
            if record.pins == 0:
                raise ValueError("unpin: the tensor is not pinned")
            record.pins -= 1

    def export(self, record: Record, reason: str) -> None:
        """Bring *record* back and never move it again, for *reason*."""
        self.run(_Export(record, reason, self.table.lock))

    def statistics(self) -> MemoryStatistics:
        """Return what was moved so far and what is where now; what moves meanwhile is in neither place."""
        # By device, whose name is made once. The lock is on the way of every kernel and there may be many records, so
        # it is not taken for them.
        managed: Counter[torch.device] = Counter()
        pinned: Counter[torch.device] = Counter()
        away: dict[torch.device, Counter[str]] = {}
        owners: set[Owner] = set()
        for record in self.table.each():
            if record.copy is None:
                managed[record.device] += record.n_bytes
                if record.pins:
                    pinned[record.device] += record.n_bytes
            elif (residency := record.residency) in IN_A_TIER:
                away.setdefault(record.device, Counter())[residency.value] += record.n_bytes
            if record.owner is not None:
                owners.add(record.owner)
        mover = self._mover
        with self.table.lock:
            return MemoryStatistics(
                dict(mover.spilled_bytes),
                dict(mover.spilled_count),
                dict(mover.unspilled_bytes),
                dict(mover.unspilled_count),
                self.tier_bytes(),
                {str(device): n_bytes for device, n_bytes in managed.items()},
                {str(device): n_bytes for device, n_bytes in pinned.items()},
                {str(device): dict(by_tier) for device, by_tier in away.items()},
                self.relief.reruns,
                self.relief.migrated,
                {owner.name: dict(owner.moved_bytes) for owner in sorted(owners, key=lambda owner: owner.age)},
            )

    def tier_bytes(self) -> dict[str, int]:
        """Return what is in each tier now, as counted against its limit."""
        return {name: tier.used_bytes for name, tier in self._mover.tiers.items()}


class _Process:
    """The process's one manager, made on first use."""

    lock = threading.Lock()  # guards making and replacing it
    manager: MemoryManager | None = None


def manager() -> MemoryManager:
    """Return the process's manager, made with the default policy if there is none yet."""
    found = _Process.manager
    if found is None:
        with _Process.lock:
            if _Process.manager is None:
                _Process.manager = MemoryManager(MemoryPolicy())
            found = _Process.manager
    return found


def configure(
    policy: MemoryPolicy | None, devices: Iterable[torch.device] = (), holder: object | None = None
) -> MemoryManager:
    """Return the process's manager, made with *policy* or changed to it, and allow it the accelerators *devices*.

    Args:
        policy: None for whatever the manager has, the default if there is none yet.
        devices: what other pools came with stays allowed.
        holder: an open pool that wants this policy to stay; held weakly, and let go of by ``holders.discard``.

    Raises:
        ValueError: an open pool has another policy, or tensors are spilled under another; or the policy has a limit and
            the allocator of a device keeps none.
    """
    with _Process.lock:
        keeper = _Process.manager
        if keeper is None:
            keeper = _Process.manager = MemoryManager(policy or MemoryPolicy())
        elif policy is not None and policy != keeper.policy:
            keeper.change_policy(policy)
        keeper.limits.add(list(devices))
        if holder is not None:
            keeper.holders.add(holder)
        return keeper
