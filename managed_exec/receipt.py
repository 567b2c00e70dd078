"""What became of a task: ``future.receipt()``.

While a task runs its worker notes plain facts; the record is made of them when somebody asks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import torch

NOTHING_MOVED: Mapping[str, int] = MappingProxyType({})


class RunFacts(NamedTuple):
    """What a worker notes of the last run of a task. One is made for each task, so it costs little."""

    device: torch.device | None  # where it ended; None if it never ran
    reason: str
    submitted_s: float
    started_s: float | None  # the last time
    ended_s: float
    retries: int
    expected_bytes: int
    peak_bytes: int | None
    moved_bytes: Mapping[str, int]  # by the names of ``Owner``
    migrated: int
    error: type[BaseException] | None


@dataclass(frozen=True)
class Receipt:
    """What became of a task.

    Args:
        device: where it ran, or went on, last; None if it never ran.
        reason: why it ran there.
        waited_s: seconds from ``submit`` to its last start, or to its end if it never started; None: it was cancelled,
            and nobody looked when.
        ran_s: seconds of its last run, its device work included, and the start of a process that was started for it.
        expected_bytes: of the device: what it had said it needs, else what earlier tasks of its function had needed;
            0: nothing was known.
        peak_bytes: most bytes of managed device memory that it had at once, wherever they were; None: not counted, on
            the CPU, with ``memory=False`` and in processes.
        spilled_bytes: what of its memory was moved away while it ran, by tier.
        unspilled_bytes: and came back.
        migrated_calls: calls of it that were made on another device, because its own had no room.
        retries: how often it was run again.
        error: the class of what it raised, or of why it was not run; None: it has a result.
    """

    device: torch.device | None
    reason: str
    waited_s: float | None
    ran_s: float
    expected_bytes: int = 0
    peak_bytes: int | None = None
    spilled_bytes: Mapping[str, int] = field(default_factory=dict)
    unspilled_bytes: Mapping[str, int] = field(default_factory=dict)
    migrated_calls: int = 0
    retries: int = 0
    error: type[BaseException] | None = None

    @staticmethod
    def of(facts: RunFacts) -> Receipt:
        """Make the record of a task that came to a worker, and is done."""
        started_s = facts.ended_s if facts.started_s is None else facts.started_s
        return Receipt(
            facts.device,
            facts.reason,
            started_s - facts.submitted_s,
            facts.ended_s - started_s,
            facts.expected_bytes,
            facts.peak_bytes,
            _by_tier(facts.moved_bytes, "spilled "),
            _by_tier(facts.moved_bytes, "unspilled "),
            facts.migrated,
            facts.retries,
            facts.error,
        )


def _by_tier(moved_bytes: Mapping[str, int], prefix: str) -> dict[str, int]:
    return {name.removeprefix(prefix): n for name, n in moved_bytes.items() if name.startswith(prefix)}
