"""All records of the process, by storage, and the lock that guards them."""

from __future__ import annotations

import threading
import weakref

import torch

from managed_exec.memory import owner as ownership
from managed_exec.memory.owner import Owner
from managed_exec.memory.record import Record, Residency


class RecordTable:
    """The records of all managed storages.

    ``lock`` guards the fields of all records. ``changed`` is notified whenever a record leaves a state that others wait
    for (LEAVING, RETURNING), a kernel ends while somebody waits for that, or a device's turn ends.
    """

    def __init__(self, min_bytes: int) -> None:
        self._min_bytes = min_bytes
        # Reentrant: the collector may run a destructor that uses a managed tensor while this thread has the lock.
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.waiting = 0  # threads that wait for kernels to end; guarded by the lock, as the next three
        self.in_flight = 0  # kernels whose memory may have no record yet
        self.landed = 0  # kernels that have ended
        self._clock = 0
        # By the storage's address; entries go with their record. Changed without the lock by the record's death alone.
        self._records: dict[int, weakref.ref[Record]] = {}

    def record_of(self, storage: torch.UntypedStorage, owner: Owner | None) -> Record | None:
        """Return the record of *storage*, a new one if it has none; None if it is too small to be managed."""
        address = storage._cdata
        record = self._find(address)
        if record is not None:
            return record
        n_bytes = storage.nbytes()
        if n_bytes < self._min_bytes or n_bytes == 0:
            return None
        with self.lock:
            record = self._find(address)
            if record is None:
                record = Record(storage, n_bytes, owner or ownership.thread.owner)
                record.last_use = self.tick()
                self._records[address] = weakref.ref(record, self._forgetter(address))
        return record

    def take_off(self) -> None:
        """Count a kernel that is in flight: it may have memory that has no record yet."""
        with self.lock:
            self.in_flight += 1

    def land(self) -> None:
        """Count a kernel that has ended: what it made has a record, or is gone."""
        with self.lock:
            self.in_flight -= 1
            self.landed += 1
            if self.waiting:
                self.changed.notify_all()

    def tick(self) -> int:
        """Advance the clock of uses and return its reading. The lock is held."""
        self._clock += 1
        return self._clock

    def live(self) -> list[Record]:
        """Return all records. The lock is held."""
        return [record for reference in list(self._records.values()) if (record := reference()) is not None]

    def movable(self) -> list[Record]:
        """Return the resident records that could be spilled now, least recently used first."""
        with self.lock:
            found = [r for r in self.live() if r.residency is Residency.RESIDENT and r.obstacle() is None]
        return sorted(found, key=lambda record: record.last_use)

    def _find(self, address: int) -> Record | None:
        reference = self._records.get(address)
        return None if reference is None else reference()

    def _forgetter(self, address: int) -> _Forgetter:
        return _Forgetter(self._records, address)


class _Forgetter:
    """Remove a dead record's entry. The collector may call it anywhere, so it takes no lock."""

    __slots__ = ("_address", "_records")

    def __init__(self, records: dict[int, weakref.ref[Record]], address: int) -> None:
        self._records = records
        self._address = address

    def __call__(self, dead: weakref.ref[Record]) -> None:
        # The storage is freed after its record, so the address is not another storage's yet; but the same storage may
        # have got a new record.
        if self._records.get(self._address) is dead:
            del self._records[self._address]
