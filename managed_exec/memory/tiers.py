"""The places a storage can go: another device's memory, main memory, disk.

Each stores the bytes of one storage as a copy of its own, gives them back, and drops them. A tier that cannot take a
copy raises ``TierFullError`` and holds nothing of it.

Locks: each tier's own guards its budget; a leaf. No copy runs under it.
"""

from __future__ import annotations

import fcntl
import itertools
import logging
import os
import shutil
import tempfile
import threading
import weakref
from pathlib import Path
from typing import Protocol

import torch

from managed_exec.errors import TierFullError
from managed_exec.memory.limits import Limits
from managed_exec.memory.record import Residency
from managed_exec.sizes import format_bytes

_log = logging.getLogger(__name__)

_PREFIX = "managed_exec-spill-"
_LOCK_NAME = "in-use"
_FREE_SHARE_OF_PEER = 0.25  # what a peer keeps free of its memory when it takes a copy


class Copy:
    """Bytes in a tier: a one-dimensional byte tensor, and what it costs there."""

    __slots__ = ("bytes", "charged_bytes", "path")

    def __init__(self, bytes_: torch.Tensor, charged_bytes: int, path: Path | None = None) -> None:
        self.bytes = bytes_
        self.charged_bytes = charged_bytes
        self.path = path


class Tier(Protocol):
    residency: Residency

    def allocate(self, n_bytes: int, home: torch.device) -> Copy:
        """Return room for *n_bytes* of a storage of the device *home*."""

    def release(self, copy: Copy) -> None:
        """Drop *copy*. Called once, from any thread, also by the garbage collector."""

    @property
    def used_bytes(self) -> int: ...


class _Budget:
    """Bytes in use out of a limit."""

    def __init__(self, name: str, limit_bytes: int | None) -> None:
        self._name = name
        self._limit_bytes = limit_bytes
        # Guards used_bytes. Reentrant: a release may come from the collector while the same thread takes.
        self._lock = threading.RLock()
        self.used_bytes = 0

    def take(self, n_bytes: int) -> None:
        with self._lock:
            if self._limit_bytes is not None and self.used_bytes + n_bytes > self._limit_bytes:
                raise TierFullError(
                    f"the {self._name} tier has {format_bytes(self._limit_bytes - self.used_bytes)} left of "
                    f"{format_bytes(self._limit_bytes)}, asked for {format_bytes(n_bytes)}"
                )
            self.used_bytes += n_bytes

    def give_back(self, n_bytes: int) -> None:
        with self._lock:
            self.used_bytes -= n_bytes


class PeerTier:
    """The memory of other devices, as long as much of it stays free for their own tasks."""

    residency = Residency.PEER

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._budget = _Budget("peer", None)

    def allocate(self, n_bytes: int, home: torch.device) -> Copy:
        free = {peer: self._limits.memory(peer) for peer in self._limits.peers(home)}
        for peer in sorted(free, key=lambda peer: -free[peer].free_bytes):
            if free[peer].free_bytes - n_bytes < free[peer].total_bytes * _FREE_SHARE_OF_PEER:
                continue
            try:
                copy = Copy(torch.empty(n_bytes, dtype=torch.uint8, device=peer), n_bytes)
            except (torch.OutOfMemoryError, torch.AcceleratorError):
                continue
            self._budget.take(n_bytes)
            return copy
        raise TierFullError(f"no other device has {format_bytes(n_bytes)} to spare")

    def release(self, copy: Copy) -> None:
        self._budget.give_back(copy.charged_bytes)

    @property
    def used_bytes(self) -> int:
        return self._budget.used_bytes


class HostTier:
    """Main memory, pinned where the copy comes from an accelerator."""

    residency = Residency.HOST

    def __init__(self, limit_bytes: int | None) -> None:
        self._budget = _Budget("host", limit_bytes)

    def allocate(self, n_bytes: int, home: torch.device) -> Copy:
        pinned = home.type != "cpu"  # so that the device copies to it asynchronously
        # torch's pinned allocator rounds up to a power of two, and that is what is taken.
        charged = 1 << (n_bytes - 1).bit_length() if pinned else n_bytes
        self._budget.take(charged)
        try:
            return Copy(torch.empty(n_bytes, dtype=torch.uint8, device="cpu", pin_memory=pinned), charged)
        except RuntimeError as error:  # main memory itself is used up
            self._budget.give_back(charged)
            raise TierFullError(f"main memory has no {format_bytes(charged)} left") from error

    def release(self, copy: Copy) -> None:
        self._budget.give_back(copy.charged_bytes)

    @property
    def used_bytes(self) -> int:
        return self._budget.used_bytes


class DiskTier:
    """Memory-mapped files in a private directory.

    The directory is made on first use and removed when the tier goes, at exit included. Its lock file is held while
    the process lives; a directory whose lock is free belonged to a process that died, and is removed by the next tier
    that starts beside it.
    """

    residency = Residency.DISK

    def __init__(self, directory: str | Path | None, limit_bytes: int | None) -> None:
        self._parent = Path(directory or tempfile.gettempdir())
        self._budget = _Budget("disk", limit_bytes)
        # Guards the two below. Reentrant, like the budget's: the collector may run code that spills.
        self._lock = threading.RLock()
        self._directory: Path | None = None
        self._pid = os.getpid()  # of the process that made the directory
        self._names = itertools.count(1)
        self._has_warned = False

    def allocate(self, n_bytes: int, home: torch.device) -> Copy:
        self._budget.take(n_bytes)
        path = None
        try:
            path = self._new_path()
            with open(path, "xb") as file:
                # Reserved now: a mapping of a sparse file would end the process with a signal on a full disk.
                os.posix_fallocate(file.fileno(), 0, n_bytes)
            storage = torch.UntypedStorage.from_file(str(path), shared=True, nbytes=n_bytes)
        except (OSError, RuntimeError) as error:
            if path is not None:
                path.unlink(missing_ok=True)
            self._budget.give_back(n_bytes)
            text = f"cannot write {format_bytes(n_bytes)} below {self._parent}: {error}"
            if not self._has_warned:  # once, for there may be thousands
                self._has_warned = True
                _log.warning("%s; what would go there stays where it is", text)
            raise TierFullError(text) from error
        assert isinstance(storage, torch.UntypedStorage)
        return Copy(torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage), n_bytes, path)

    def release(self, copy: Copy) -> None:
        assert copy.path is not None
        copy.path.unlink(missing_ok=True)
        self._budget.give_back(copy.charged_bytes)

    @property
    def used_bytes(self) -> int:
        return self._budget.used_bytes

    def _new_path(self) -> Path:
        with self._lock:
            if self._directory is None or self._pid != os.getpid():  # a forked child has a directory of its own
                self._parent.mkdir(parents=True, exist_ok=True)
                remove_abandoned(self._parent)
                directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=self._parent))
                lock_file = open(directory / _LOCK_NAME, "wb")  # noqa: SIM115 held as long as the tier lives
                fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                weakref.finalize(self, _remove_directory, directory, lock_file, os.getpid())
                self._directory, self._pid = directory, os.getpid()
            return self._directory / f"{next(self._names)}"


def _remove_directory(directory: Path, lock_file: object, pid: int) -> None:
    if os.getpid() == pid:  # a forked child must not take away its parent's files
        shutil.rmtree(directory, ignore_errors=True)


def remove_abandoned(parent: Path) -> None:
    """Remove the spill directories below *parent* whose process has died."""
    for directory in parent.glob(f"{_PREFIX}*"):
        try:
            with open(directory / _LOCK_NAME, "rb") as lock_file:
                fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory, ignore_errors=True)
        except OSError:
            continue  # in use, being made, or not ours to touch
