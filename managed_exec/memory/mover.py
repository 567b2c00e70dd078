"""The moves of a storage: to a tier, to a lower one, and back. Guard, move the data, set the state last.

    RESIDENT --spill--> LEAVING --> PEER, HOST or DISK --unspill--> RETURNING --> RESIDENT
                           \\--> RESIDENT (no tier took it)              \\--> back (no room)
    PEER --sink--> SINKING --> HOST or DISK
                      \\--> PEER (no tier took it)

R. A storage's memory is freed only here, in state LEAVING, after its obstacle was looked for under the lock both before
   and after the copy. Kernels mark what they use and only then look at the state, and never start on LEAVING.
L. The storage is emptied only after its copy is complete, and a copy dropped only after the storage is filled again or
   the next copy is complete.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import torch

from managed_exec.devices import current_stream
from managed_exec.errors import TensorLostError, TierFullError
from managed_exec.events import Hooks, TensorMoved
from managed_exec.memory.limits import Limits
from managed_exec.memory.policy import MemoryPolicy
from managed_exec.memory.record import RESIDENT, Record, Residency
from managed_exec.memory.table import RecordTable
from managed_exec.memory.tiers import Copy, DiskTier, HostTier, PeerTier, Tier
from managed_exec.memory.transfer import (
    CopyStreams,
    allocate_storage,
    copy_in,
    copy_out,
    free_storage,
    whole,
)
from managed_exec.memory.unseen import unseen
from managed_exec.sizes import format_bytes

_log = logging.getLogger(__name__)

NOT_RESIDENT = "not on its device"
TIERS_FULL = "no tier has room"


class Mover:
    """Moves records between their devices and the tiers."""

    def __init__(self, table: RecordTable, policy: MemoryPolicy, limits: Limits, hooks: Hooks) -> None:
        self._table = table
        self._hooks = hooks
        self.tiers: dict[str, Tier] = {
            "peer": PeerTier(limits),
            "host": HostTier(policy.host_limit_bytes),
            "disk": DiskTier(policy.spill_dir, policy.disk_limit_bytes),
        }
        self._copy_streams = CopyStreams()
        # Guarded by the table's lock: bytes and moves by tier, out of the device and back.
        self.spilled_bytes: Counter[str] = Counter()
        self.spilled_count: Counter[str] = Counter()
        self.unspilled_bytes: Counter[str] = Counter()
        self.unspilled_count: Counter[str] = Counter()

    def spill(self, record: Record, names: Sequence[str]) -> str | None:
        """Move a resident *record* to the first of the named tiers that takes it.

        Returns:
            None if one did; else what was in the way, ``NOT_RESIDENT`` and ``TIERS_FULL`` among it.
        """
        with self._table.lock:
            if record.residency is not RESIDENT:
                return NOT_RESIDENT
            record.moved_by = threading.get_ident()
            record.residency = Residency.LEAVING  # before the kernels are looked at, see ``RecordTable.take_off``
            obstacle = self._table.obstacle(record)
            if obstacle is not None:
                self._settle(record, RESIDENT)
                return obstacle
        copied: tuple[str, Copy] | None = None
        moved = False
        started_s = time.perf_counter()
        try:
            after = (record.writer, *record.readers)
            with unseen():
                copied = self._copied(record, whole(record.storage), after, names)
            with self._table.lock:
                # Somebody may have made a plain alias, pinned it or exported its memory while the copy was made.
                obstacle = TIERS_FULL if copied is None else self._table.obstacle(record)
                if copied is not None and obstacle is None:
                    free_storage(record)
                    record.writer, record.readers = None, frozenset()
                    self._keep(record, *copied)
                    moved = True
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # or they share the storage for as long as the error lives
            raise
        finally:
            if not moved:
                with self._table.lock:
                    self._settle(record, RESIDENT)
                if copied is not None:
                    self.tiers[copied[0]].release(copied[1])
        if moved and copied is not None:
            self._tell("spilled", record, copied[0], started_s)
        return obstacle

    def sink(self, record: Record, names: Sequence[str]) -> bool:
        """Move a *record* on a peer to the first of the named tiers that takes it; return whether one did."""
        with self._table.lock:
            if record.residency is not Residency.PEER:
                return False
            record.moved_by = threading.get_ident()
            record.residency = Residency.SINKING
        copied: tuple[str, Copy] | None = None
        released: Callable[[], object] | None = None
        started_s = time.perf_counter()
        try:
            with unseen():
                copied = self._copied(record, record.copy.bytes, (), [name for name in names if name != "peer"])
        finally:
            with self._table.lock:
                if copied is None:
                    self._settle(record, Residency.PEER)
                else:
                    released = record.release_copy
                    self._keep(record, *copied)
        if released is not None:
            released()
        if copied is not None:
            self._tell("spilled", record, copied[0], started_s)
        return copied is not None

    def _tell(self, what: Literal["spilled", "unspilled"], record: Record, tier: str, started_s: float) -> None:
        if self._hooks.hooks:
            task = None if record.owner is None else record.owner.name
            self._hooks.emit(
                TensorMoved(what, record.device, tier, record.n_bytes, task, started_s, time.perf_counter())
            )

    def _settle(self, record: Record, residency: Residency) -> None:
        """Set the state of *record*, whose move is over. The lock is held."""
        record.residency = residency
        self._table.changed.notify_all()

    def _keep(self, record: Record, name: str, copy: Copy) -> None:
        """Make *copy* in the named tier the place of the record's bytes. The lock is held."""
        record.copy = copy
        record.release_copy = weakref.finalize(record, self.tiers[name].release, copy)
        record.release_copy.atexit = False
        self.spilled_bytes[name] += record.n_bytes
        self.spilled_count[name] += 1
        if record.owner is not None:
            record.owner.moved_bytes[f"spilled {name}"] += record.n_bytes
        self._settle(record, self.tiers[name].residency)

    def _copied(
        self, record: Record, source: torch.Tensor, after: Iterable[torch.Stream | None], names: Sequence[str]
    ) -> tuple[str, Copy] | None:
        """Copy *source*, the bytes of *record*, to the first of the named tiers that takes them."""
        for name in names:
            if name != "disk" and not record.in_streams:
                continue  # it is in main memory
            tier = self.tiers[name]
            try:
                copy = tier.allocate(record.n_bytes, record.device)
            except TierFullError as error:
                _log.debug("%s", error)
                continue
            try:
                copy_out(source, after, copy, self._copy_streams)
            except BaseException:
                tier.release(copy)
                raise
            return name, copy
        return None

    def finish_return(self, record: Record, back_to: Residency, marked: list[Record]) -> None:
        """Fill the storage of a RETURNING *record*; then it is resident, and in *marked*, a kernel's operands.

        Raises:
            torch.OutOfMemoryError: the device has no room. The record is where it was.
            TensorLostError: the copy was on a device that broke.
        """
        filled = False
        release = None
        started_s = time.perf_counter()
        try:
            with unseen():
                _fill(record, back_to)
            filled = True
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)
            raise
        finally:
            with self._table.lock:
                if filled:
                    record.copy = None
                    release, record.release_copy = record.release_copy, None
                    # The bytes are there; but the memory is this stream's, to the allocator, and others must say so.
                    record.writer = current_stream(record.device) if record.in_streams else None
                    self.unspilled_bytes[back_to.value] += record.n_bytes
                    self.unspilled_count[back_to.value] += 1
                    if record.owner is not None:
                        record.owner.moved_bytes[f"unspilled {back_to.value}"] += record.n_bytes
                    marked.append(record)
                self._settle(record, RESIDENT if filled else back_to)
        if release is not None:
            release()
        self._tell("unspilled", record, back_to.value, started_s)


def _fill(record: Record, back_to: Residency) -> None:
    """Give the storage of *record* its memory and its bytes again, or leave it empty."""
    allocate_storage(record)
    try:
        copy_in(record, record.copy)
    except BaseException as error:
        free_storage(record)
        if isinstance(error, torch.AcceleratorError) and back_to is Residency.PEER and not _can_be_read(record.copy):
            raise TensorLostError(
                f"{format_bytes(record.n_bytes)} of {record.device} were on {record.copy.bytes.device}, which broke; "
                "there is no other copy. Compute the tensor anew, from values on the CPU"
            ) from error
        raise


def _can_be_read(copy: Copy) -> bool:
    try:
        copy.bytes[:1].cpu()
    except torch.AcceleratorError:
        return False
    return True
