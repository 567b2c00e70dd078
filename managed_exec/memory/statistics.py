"""What the memory manager has done so far."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class MemoryStatistics:
    """A snapshot. Bytes are sizes of storages, as moved; counts are moves.

    Attributes:
        spilled_bytes: by tier, all moves ever.
        spilled_count: likewise.
        unspilled_bytes: by the tier that they came back from.
        unspilled_count: likewise.
        tier_bytes: now in each tier, as counted against its limit.
        managed_bytes: now resident, by device.
        pinned_bytes: of these.
        away_bytes: now in each tier, by the device they left.
        reruns: kernels run again because the device had no room at first.
        migrated: calls made on another device because their own had no room.
        task_bytes: by task, of those that run or have left tensors: bytes moved, by ``"spilled host"`` and so on.
    """

    spilled_bytes: dict[str, int] = field(default_factory=dict)
    spilled_count: dict[str, int] = field(default_factory=dict)
    unspilled_bytes: dict[str, int] = field(default_factory=dict)
    unspilled_count: dict[str, int] = field(default_factory=dict)
    tier_bytes: dict[str, int] = field(default_factory=dict)
    managed_bytes: dict[str, int] = field(default_factory=dict)
    pinned_bytes: dict[str, int] = field(default_factory=dict)
    away_bytes: dict[str, dict[str, int]] = field(default_factory=dict)
    reruns: int = 0
    migrated: int = 0
    task_bytes: dict[str, dict[str, int]] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{'':12}{'spilled':>22}{'unspilled':>22}{'now there':>16}"]
        for tier in sorted({*self.spilled_bytes, *self.unspilled_bytes, *self.tier_bytes}):
            lines.append(
                f"{tier:12}"
                f"{self.spilled_bytes.get(tier, 0):>14,} ({self.spilled_count.get(tier, 0):>5})"
                f"{self.unspilled_bytes.get(tier, 0):>14,} ({self.unspilled_count.get(tier, 0):>5})"
                f"{self.tier_bytes.get(tier, 0):>16,}"
            )
        for device, n_bytes in sorted(self.managed_bytes.items()):
            lines.append(f"{device:12}{n_bytes:>60,}")
        lines.append(f"kernels run again for want of room: {self.reruns}, on another device: {self.migrated}")
        for task, moved in self.task_bytes.items():
            if moved:
                lines.append(f"{task}: {', '.join(f'{what} {n_bytes:,}' for what, n_bytes in sorted(moved.items()))}")
        return "\n".join(lines)
