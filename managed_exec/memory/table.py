"""All records of the process, by storage, and the lock that guards them."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from managed_exec.future import TaskFuture
from managed_exec.memory import owner as ownership
from managed_exec.memory.owner import Owner
from managed_exec.memory.record import MOVING, RESIDENT, Record


class RecordTable:
    """The records of all managed storages.

    ``lock`` guards the fields of all records. ``changed`` is notified whenever a record leaves a state that others wait
    for (LEAVING, RETURNING), a kernel ends while somebody waits for that, or a device's turn ends.
    """

    def __init__(self) -> None:
        self.min_bytes = 0  # smaller storages get no record
        # Reentrant: the collector may run a destructor that uses a managed tensor while this thread has the lock.
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.waiting = 0  # threads that wait for kernels to end; guarded by the lock
        # Kernels that have run. Counted without the lock: of two that end at once one may go uncounted, which does
        # not matter to whoever looks whether any has.
        self.landed = 0
        # Tasks that run now. Each adds and removes its own, in single steps, so no lock is taken.
        self.running: set[Owner] = set()
        self.tick = itertools.count(1).__next__  # advances the clock of uses and returns its reading
        self._flights: weakref.WeakSet[Flights] = weakref.WeakSet()  # one a thread; guarded by the lock
        self._thread = _Thread(self.lock, self._flights)
        # By the storage's address; entries go with their record. Changed in single steps, without the lock.
        self._records: dict[int, weakref.ref[Record]] = {}
        self._forget = _forgetter(self._records)

    def record_of(self, storage: torch.UntypedStorage, owner: Owner | None) -> Record | None:
        """Return the record of *storage*, a new one if it has none; None if it is too small to be managed."""
        address = storage._cdata
        known = self._records.get(address)
        if known is not None and (record := known()) is not None:
            return record
        n_bytes = storage.nbytes()
        if n_bytes < self.min_bytes or n_bytes == 0:
            return None
        maker = ownership.thread.owner
        record = Record(storage, n_bytes, owner or maker)
        record.last_use = self.tick()
        # Counted for the task that runs here, also where a result belongs to the task that made its operand.
        gone = None if maker is None or not record.in_streams else maker.note_made(n_bytes)
        reference = weakref.ref(record, partial(self._forget, address, gone, n_bytes))
        # One step, so of two threads that come with the same storage one finds the other's.
        while (entry := self._records.setdefault(address, reference)) is not reference:
            found = entry()
            if found is not None:
                if gone is not None:
                    gone.append(n_bytes)
                return found
            self._forget(address, None, 0, entry)
        return record

    def has_record(self, storage: torch.UntypedStorage) -> bool:
        """Return whether *storage* has a record."""
        known = self._records.get(storage._cdata)
        return known is not None and known() is not None

    # -- kernels in flight ------------------------------------------------------------------------------------------

    def take_off(self, records: Sequence[Record]) -> None:
        """Note that a kernel of the calling thread uses *records* and may have memory that has no record yet.

        Takes no lock, for it is on the way of every kernel. Whoever frees a storage sets its state first and looks at
        the kernels in flight then; a kernel is noted first and looks at the states then. So one sees the other.

        Raises:
            TaskCancelledError, TaskTimeoutError: the thread's task is to stop, and did not know; nothing is noted.
        """
        flights = self._thread.flights
        if flights.future is not None and flights.future.stop is not None:
            flights.future.check_stop()
        flights.records.append(records)

    def land(self, *, has_run: bool = True) -> None:
        """Note that the calling thread's last kernel has ended: what it made has a record, or is gone.

        Args:
            has_run: False of one that found no room. It will be tried again, so nobody must hope for anything from its
                end: several such would keep each other's hope up for ever.
        """
        self._thread.flights.records.pop()
        if has_run:
            self.landed += 1
        if self.waiting:
            with self.lock:
                self.changed.notify_all()

    @property
    def flights(self) -> Flights:
        """The calling thread's kernels in flight."""
        return self._thread.flights

    def check_stop(self) -> None:
        """Stop a wait of the calling thread's task if the task is to stop. Who waits looks every now and then.

        Raises:
            TaskCancelledError, TaskTimeoutError: it is.
        """
        future = self._thread.flights.future
        if future is not None:
            future.check_stop()

    def in_use(self) -> set[Record]:
        """Return the records that kernels in flight use. The lock is held."""
        return _records_of(self._flights)

    def in_use_elsewhere(self) -> set[Record]:
        """Return the records that kernels of other threads in flight use. The lock is held."""
        mine = self._thread.flights
        return _records_of(flights for flights in self._flights if flights is not mine)

    def in_flight_elsewhere(self) -> bool:
        """Return whether any kernel of another thread is in flight. The lock is held."""
        mine = self._thread.flights
        return any(flights.records for flights in self._flights if flights is not mine)

    def is_making_elsewhere(self) -> bool:
        """Return whether a kernel of another thread is in flight that makes something of nothing. The lock is held."""
        mine = self._thread.flights
        return any(not records for flights in self._flights if flights is not mine for records in list(flights.records))

    def is_nested(self) -> bool:
        """Return whether the calling thread is in a kernel that uses records, whose end it must not wait for."""
        return any(self._thread.flights.records)

    def wait_settled(self, record: Record) -> None:
        """Wait until *record* is not on its way anywhere; whoever moves it says so. The lock is held.

        Raises:
            RuntimeError: the calling thread moves it, and has been interrupted by code that uses it.
        """
        while record.residency in MOVING:
            if record.moved_by == threading.get_ident():
                raise RuntimeError(
                    "a finalizer or signal handler used a managed tensor in the middle of its own move, in the thread "
                    "that makes it; have such code use no managed tensors, or plain copies of them"
                )
            self.changed.wait()

    def obstacle(self, record: Record, in_use: Collection[Record] | None = None) -> str | None:
        """Return why *record* cannot be moved now; None if it can. The lock is held.

        Args:
            in_use: what ``in_use`` has returned, for who asks of many records.
        """
        if record in (self.in_use() if in_use is None else in_use):
            return "in use by a kernel"
        return record.obstacle()

    def live(self) -> list[Record]:
        """Return all records. The lock is held."""
        return list(self.each())

    def each(self) -> Iterator[Record]:
        """Yield the records that there are now, one at a time: none is kept alive for long. Needs no lock."""
        for reference in list(self._records.values()):
            record = reference()
            if record is not None:
                yield record

    def movable(self) -> list[Record]:
        """Return the resident records that could be spilled now, least recently used first."""
        with self.lock:
            busy = self.in_use()
            found = [r for r in self.live() if r.residency is RESIDENT and self.obstacle(r, busy) is None]
        return sorted(found, key=lambda record: record.last_use)


class Flights:
    """The kernels of one thread that are in flight, each with its records; several where one runs inside another."""

    __slots__ = ("__weakref__", "future", "records")

    def __init__(self) -> None:
        # Of the task that the thread runs: here it is at hand before every kernel, those of a backward pass included.
        self.future: TaskFuture[Any] | None = None
        self.records: list[Sequence[Record]] = []  # changed by its thread alone, in single steps


def _records_of(all_flights: Iterable[Flights]) -> set[Record]:
    """Return the records that kernels in flight use. Their threads go on meanwhile, so the lists are copied."""
    return {record for flights in all_flights for records in list(flights.records) for record in list(records)}


class _Thread(threading.local):
    """The calling thread's kernels in flight."""

    def __init__(self, lock: threading.RLock, all_flights: weakref.WeakSet[Flights]) -> None:
        self.flights = Flights()
        with lock:
            all_flights.add(self.flights)


def _forgetter(
    records: dict[int, weakref.ref[Record]],
) -> Callable[[int, deque[int] | None, int, weakref.ref[Record]], None]:
    """Return what removes a dead record's entry. The collector may call it anywhere, so it takes no lock."""

    def forget(address: int, gone: deque[int] | None, n_bytes: int, dead: weakref.ref[Record]) -> None:
        if gone is not None:
            gone.append(n_bytes)
        # The storage is freed after its record, so the address is not another storage's yet; but the same storage may
        # have got a new record.
        if records.get(address) is dead:
            del records[address]

    return forget
