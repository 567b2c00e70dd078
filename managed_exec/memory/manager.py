"""The memory manager: has kernels' operands resident, and makes room when a device has none.

P. A kernel that finds no room lets go of its operands, takes the device's turn, and gathers them again while room is
   made for it; the oldest task's turn comes first. So of kernels whose operands fit each gets done in the end.

Locks, outermost first: a device's turn; the table's lock; tiers' budgets. None but the turn is held while anything is
copied or a kernel runs.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch

from managed_exec.errors import DeviceMemoryError, NotMovableError, TierFullError
from managed_exec.memory.mover import Mover
from managed_exec.memory.ordering import order_streams
from managed_exec.memory.owner import Owner
from managed_exec.memory.policy import MemoryPolicy
from managed_exec.memory.record import Record, Residency
from managed_exec.memory.relief import NoRoom, Relief
from managed_exec.memory.statistics import MemoryStatistics
from managed_exec.memory.table import RecordTable
from managed_exec.sizes import format_bytes

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Kernel(Protocol[T_co]):
    """What the manager needs of a kernel. It changes nothing when it raises out-of-memory, so it can be run again."""

    records: list[Record]  # of its operands, each once

    def __call__(self) -> T_co: ...

    def written(self) -> list[Record]:
        """Return those of the records that the kernel writes to."""

    def device(self) -> torch.device:
        """Return where the kernel allocates."""


class _Touch:
    """A kernel that does nothing, to have a record resident."""

    def __init__(self, record: Record) -> None:
        self.records = [record]

    def __call__(self) -> None:
        return None

    def written(self) -> list[Record]:
        return []

    def device(self) -> torch.device:
        return self.records[0].device


class MemoryManager:
    """Manages the storages of one process."""

    def __init__(self, policy: MemoryPolicy) -> None:
        self.policy = policy
        self.table = RecordTable(policy.min_bytes)
        self._mover = Mover(self.table, policy)
        self.relief = Relief(self.table, self._mover, policy)

    def record_of(self, storage: torch.UntypedStorage, owner: Owner | None) -> Record | None:
        """Return the record of *storage*, a new one if it has none; None if it is too small to be managed."""
        return self.table.record_of(storage, owner)

    # -- kernels ----------------------------------------------------------------------------------------------------

    def run(self, kernel: Kernel[T]) -> T:
        """Run *kernel* with all its operands resident; make room if there is none.

        The kernel is still in flight when this returns: ``table.land()`` is due once its results are registered.

        Raises:
            DeviceMemoryError: there is no room and none can be made; the text lists who holds what.
        """
        outcome = self._run_once(kernel)
        if isinstance(outcome, NoRoom):
            return self.relief.rerun(lambda: self._run_once(kernel), outcome, kernel.records)
        return outcome

    def _run_once(self, kernel: Kernel[T]) -> T | NoRoom:
        records = kernel.records
        marked: Sequence[Record] = ()
        landed = False
        self.table.take_off()
        try:
            if self._mark_if_resident(records):
                marked = records
            else:
                marked = []
                for record in records:
                    if not self._begin_use(record):
                        return NoRoom(record.device, record.n_bytes)
                    marked.append(record)
            if records and records[0].in_streams:
                order_streams(records, kernel.written())
            result = kernel()
            landed = True  # by the caller, once the results are registered
        except DeviceMemoryError:
            raise
        except torch.OutOfMemoryError as error:
            return NoRoom.of(error, kernel.device())
        finally:
            with self.table.lock:
                for record in marked:
                    record.users -= 1
                if not landed:
                    self.table.in_flight -= 1
                if self.table.waiting:
                    self.table.changed.notify_all()
        return result

    def _mark_if_resident(self, records: Sequence[Record]) -> bool:
        """Mark all *records* in use if all are resident, as nearly always; return whether they are."""
        with self.table.lock:
            for record in records:
                if record.residency is not Residency.RESIDENT:
                    return False
            now = self.table.tick()
            for record in records:
                record.users += 1
                record.last_use = now
        return True

    def _begin_use(self, record: Record) -> bool:
        """Mark *record* in use and make it resident; return False, and do neither, if there is no room for it."""
        with self.table.lock:
            while record.residency in (Residency.LEAVING, Residency.RETURNING):
                self.table.changed.wait()
            record.last_use = self.table.tick()
            if record.residency is Residency.RESIDENT:
                record.users += 1
                return True
            back_to = self._mover.begin_return(record)
        try:
            self._mover.finish_return(record, back_to)
        except torch.OutOfMemoryError:
            return False
        return True

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
        with self.table.lock:
            while record.residency in (Residency.LEAVING, Residency.RETURNING):
                self.table.changed.wait()
            where = record.residency
        if where is not Residency.RESIDENT:
            if tier is None or where is self._mover.tiers[tier].residency:
                return
            self.unspill(record)  # tiers do not hand over to each other
        if "host" in names and record.device.type == "cpu":
            return  # it is there
        if self._mover.spill(record, names):
            return
        with self.table.lock:
            obstacle = record.obstacle()
        what = f"{format_bytes(record.n_bytes)} of {record.device}"
        if obstacle is not None:
            raise NotMovableError(f"{what} cannot be moved: {obstacle}")
        raise TierFullError(f"no tier has room for {what}, of {', '.join(names) or 'none'}")

    def unspill(self, record: Record) -> None:
        """Bring *record* back to its device.

        Raises:
            DeviceMemoryError: there is no room and none can be made.
        """
        self.run(_Touch(record))
        self.table.land()

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
        with self.table.lock:
            record.immovable = record.immovable or reason
        self.unspill(record)

    def statistics(self) -> MemoryStatistics:
        """Return what was moved so far and what is where now."""
        managed: Counter[str] = Counter()
        mover = self._mover
        with self.table.lock:
            for record in self.table.live():
                if record.residency not in (Residency.HOST, Residency.DISK):
                    managed[str(record.device)] += record.n_bytes
            return MemoryStatistics(
                dict(mover.spilled_bytes),
                dict(mover.spilled_count),
                dict(mover.unspilled_bytes),
                dict(mover.unspilled_count),
                {name: tier.used_bytes for name, tier in mover.tiers.items()},
                dict(managed),
                self.relief.reruns,
            )


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


def configure(policy: MemoryPolicy) -> MemoryManager:
    """Return the process's manager, made or made anew with *policy*.

    Raises:
        ValueError: there is one with another policy, and it manages tensors that are alive.
    """
    with _Process.lock:
        old = _Process.manager
        if old is None or old.policy != policy:
            if old is not None:
                with old.table.lock:
                    alive = len(old.table.live())
                if alive:
                    raise ValueError(
                        f"memory: the process has one memory manager, and it manages {alive} tensors under "
                        f"{old.policy}; give every pool the same policy"
                    )
            _Process.manager = MemoryManager(policy)
        assert _Process.manager is not None
        return _Process.manager
