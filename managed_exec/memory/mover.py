"""The two moves of a storage: to a tier and back. Guard, move the data, set the state last.

    RESIDENT --spill--> LEAVING --> HOST or DISK --unspill--> RETURNING --> RESIDENT
                           \\--> RESIDENT (no tier took it)        \\--> back (no room)

R. A storage's memory is freed only here, in state LEAVING, after its obstacle was looked for under the lock both before
   and after the copy. Kernels mark what they use under the same lock and never start on LEAVING.
L. The storage is emptied only after its copy is complete, and the copy dropped only after the storage is filled again.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Sequence

import torch

from managed_exec.errors import TierFullError
from managed_exec.memory.policy import MemoryPolicy
from managed_exec.memory.record import Record, Residency
from managed_exec.memory.table import RecordTable
from managed_exec.memory.tiers import Copy, DiskTier, HostTier, Tier
from managed_exec.memory.transfer import (
    CopyStreams,
    allocate_storage,
    copy_in,
    copy_out,
    free_storage,
)

_log = logging.getLogger(__name__)


class Mover:
    """Moves records between their devices and the tiers."""

    def __init__(self, table: RecordTable, policy: MemoryPolicy) -> None:
        self._table = table
        self.tiers: dict[str, Tier] = {
            "host": HostTier(policy.host_limit_bytes),
            "disk": DiskTier(policy.spill_dir, policy.disk_limit_bytes),
        }
        self._copy_streams = CopyStreams()
        # Guarded by the table's lock: bytes and moves by tier, out of the device and back.
        self.spilled_bytes: Counter[str] = Counter()
        self.spilled_count: Counter[str] = Counter()
        self.unspilled_bytes: Counter[str] = Counter()
        self.unspilled_count: Counter[str] = Counter()

    def spill(self, record: Record, names: Sequence[str]) -> bool:
        """Move a resident *record* to the first of the named tiers that takes it; return whether one did."""
        with self._table.lock:
            if record.residency is not Residency.RESIDENT or record.obstacle() is not None:
                return False
            record.residency = Residency.LEAVING
        copied: tuple[str, Tier, Copy] | None = None
        try:
            copied = self._copied(record, names)
        finally:
            with self._table.lock:
                # Somebody may have made a plain alias, pinned it or exported its memory while the copy was made.
                moved = copied is not None and record.obstacle() is None
                record.residency = Residency.RESIDENT  # until the memory is freed
                if copied is not None and moved:
                    name, tier, copy = copied
                    free_storage(record)
                    record.copy = copy
                    record.release_copy = weakref.finalize(record, tier.release, copy)
                    record.release_copy.atexit = False
                    record.readers, record.writer = set(), None
                    record.residency = tier.residency
                    self.spilled_bytes[name] += record.n_bytes
                    self.spilled_count[name] += 1
                self._table.changed.notify_all()
        if copied is not None and not moved:
            copied[1].release(copied[2])
        return moved

    def _copied(self, record: Record, names: Sequence[str]) -> tuple[str, Tier, Copy] | None:
        """Copy the bytes of a LEAVING *record* to the first of the named tiers that takes them."""
        for name in names:
            if name == "host" and not record.in_streams:
                continue  # it is there
            tier = self.tiers[name]
            try:
                copy = tier.allocate(record.n_bytes, pinned=name == "host")
            except TierFullError as error:
                _log.debug("%s", error)
                continue
            try:
                copy_out(record, copy, self._copy_streams)
            except BaseException:
                tier.release(copy)
                raise
            return name, tier, copy
        return None

    def begin_return(self, record: Record) -> Residency:
        """Take a spilled *record* for this thread to bring back; return where it is. The lock is held."""
        back_to, record.residency = record.residency, Residency.RETURNING
        return back_to

    def finish_return(self, record: Record, back_to: Residency) -> None:
        """Fill the storage of a RETURNING *record* and mark it used by one kernel.

        Raises:
            torch.OutOfMemoryError: the device has no room. The record is where it was.
        """
        filled = False
        release = None
        try:
            allocate_storage(record)
            copy_in(record, record.copy)
            filled = True
        finally:
            with self._table.lock:
                if filled:
                    record.copy = None
                    release, record.release_copy = record.release_copy, None
                    record.users += 1
                    # The bytes are there; but the memory is this stream's, to the allocator, and others must say so.
                    record.writer = torch.accelerator.current_stream(record.device) if record.in_streams else None
                    record.residency = Residency.RESIDENT
                    self.unspilled_bytes[back_to.value] += record.n_bytes
                    self.unspilled_count[back_to.value] += 1
                else:
                    free_storage(record)  # it may have its memory already, and not its bytes
                    record.residency = back_to
                self._table.changed.notify_all()
        if release is not None:
            release()
