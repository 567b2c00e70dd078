"""What the user allows the memory manager to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from managed_exec.sizes import parse_bytes

TIERS = ("peer", "host", "disk")


@dataclass(frozen=True)
class MemoryPolicy:
    """Where managed tensors may go when a device has no room, and how long to wait for other tasks.

    Args:
        limit: of each device, what may be used: bytes, text such as ``"12GiB"``, or a share as a float, 0.8; None: all
            it has. A limit beyond what a device has is no limit there.
        spill: tiers in the order in which they are tried, from ``"peer"`` (the memory of another device of the pools,
            as long as a quarter of it stays free), ``"host"`` and ``"disk"``; empty: nothing is spilled.
        host_limit: bytes, or text such as ``"12GiB"``, that spilled tensors may take of main memory; None: no limit.
            Pinned memory counts as torch takes it, rounded up to a power of two.
        spill_dir: directory for the disk tier, made when it is needed and not there; None: the system's directory for
            temporary files.
        disk_limit: as *host_limit*, for the disk tier.
        min_bytes: smaller storages are never moved, and cost next to nothing; bytes, or text.
        wait_s: seconds to wait for memory that another running task holds and that cannot be moved.
        admission: which tasks are held back until a device has room for them: ``"hints"``, those that say what they
            need (``gpu_task(memory=...)``); ``"learned"``, all, the others by what earlier tasks of their functions
            have needed. Tasks that wait for each other must not be held back on a guess.

    Raises:
        ValueError: an unknown or repeated tier, another admission, a limit that cannot be read, a negative number.
    """

    limit: float | int | str | None = None
    spill: tuple[str, ...] = TIERS
    host_limit: int | str | None = None
    spill_dir: str | Path | None = None
    disk_limit: int | str | None = None
    min_bytes: int | str = 64 * 1024
    wait_s: float = 10.0
    admission: Literal["hints", "learned"] = "hints"

    def __post_init__(self) -> None:
        if not isinstance(self.spill, (tuple, list)):
            raise TypeError(
                f"spill: expected a tuple of tiers in their order, such as ('host', 'disk'), got {self.spill!r}"
            )
        unknown = [tier for tier in self.spill if tier not in TIERS]
        if unknown or len(set(self.spill)) != len(self.spill):
            raise ValueError(f"spill: expected some of {TIERS}, each at most once, got {self.spill!r}")
        object.__setattr__(self, "spill", tuple(self.spill))
        for name in ("host_limit", "disk_limit"):
            if getattr(self, name) == 0:
                raise ValueError(f"{name}: expected more than 0 bytes; for none leave {name[:4]!r} out of spill")
        # Read now, so that what cannot be read fails here.
        _ = self.limit_bytes(1), self.host_limit_bytes, self.disk_limit_bytes, self.smallest_bytes
        if self.spill_dir is not None and not isinstance(self.spill_dir, (str, Path)):
            raise TypeError(f"spill_dir: expected a path, got {self.spill_dir!r}")
        if self.spill_dir is not None and Path(self.spill_dir).exists() and not Path(self.spill_dir).is_dir():
            raise ValueError(f"spill_dir: expected a directory, or where to make one, got {str(self.spill_dir)!r}")
        if isinstance(self.wait_s, bool) or not isinstance(self.wait_s, (int, float)):
            raise TypeError(f"wait_s: expected seconds, got {self.wait_s!r}")
        if not self.wait_s >= 0:
            raise ValueError(f"wait_s: expected 0 or more seconds, got {self.wait_s}")
        if self.admission not in ("hints", "learned"):
            raise ValueError(f"admission: expected 'hints' or 'learned', got {self.admission!r}")

    def limit_bytes(self, total_bytes: int) -> int:
        """Return how many bytes may be used of a device that has *total_bytes*."""
        if self.limit is None:
            return total_bytes
        if isinstance(self.limit, float):
            if not 0 < self.limit <= 1:
                raise ValueError(f"limit: expected a share above 0 and up to 1.0, or bytes, got {self.limit!r}")
            return int(self.limit * total_bytes)
        return parse_bytes(self.limit, name="limit")

    @property
    def smallest_bytes(self) -> int:
        return 0 if self.min_bytes == 0 else parse_bytes(self.min_bytes, name="min_bytes")

    @property
    def host_limit_bytes(self) -> int | None:
        return None if self.host_limit is None else parse_bytes(self.host_limit, name="host_limit")

    @property
    def disk_limit_bytes(self) -> int | None:
        return None if self.disk_limit is None else parse_bytes(self.disk_limit, name="disk_limit")
