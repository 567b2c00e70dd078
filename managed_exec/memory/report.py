"""What an out-of-memory error says: who holds what on a device, why it cannot move, and what to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import torch

from managed_exec.memory.limits import Limits
from managed_exec.memory.policy import MemoryPolicy
from managed_exec.memory.record import ON_DEVICE, Record, Residency
from managed_exec.memory.table import RecordTable
from managed_exec.sizes import format_bytes

_TIERS_FULL = "movable, but no tier takes it"
_PINNED = "pinned"
_OPERAND = "an operand of the kernel"


def no_room_text(
    table: RecordTable,
    limits: Limits,
    policy: MemoryPolicy,
    device: torch.device,
    wanted_bytes: int,
    reason: str,
    operands: Sequence[Record] = (),
    unplaced: Collection[Record] = (),
) -> str:
    """Say why there is no room for *wanted_bytes* on *device*.

    Args:
        reason: the last word of whoever gave up.
        operands: of the kernel, which are not moved for it.
        unplaced: what could be moved, and no tier took.
    """
    held: Counter[tuple[str, str]] = Counter()
    with table.lock:
        for record in table.live():
            if record.device == device and record.residency in ON_DEVICE:
                name = "no task" if record.owner is None else record.owner.name
                obstacle = table.obstacle(record)
                if obstacle is None and record in operands:
                    obstacle = _OPERAND
                elif obstacle is None:
                    obstacle = _TIERS_FULL if record in unplaced else "movable"
                held[name, obstacle] += record.n_bytes
            elif record.residency is Residency.PEER and record.copy.bytes.device == device:
                held[f"spilled from {record.device}", _TIERS_FULL] += record.n_bytes
    memory = limits.memory(device)
    managed_bytes = sum(held.values())
    unmanaged_bytes = max(0, memory.allocated_bytes - managed_bytes)
    lines = [
        f"no room for {format_bytes(wanted_bytes)} on {device}: {reason}.",
        f"  {device} has {format_bytes(memory.total_bytes)}, {format_bytes(memory.free_bytes)} of it free; "
        f"{format_bytes(memory.allocated_bytes)} are allocated, {format_bytes(managed_bytes)} of that managed.",
    ]
    lines += [f"  {name}: {format_bytes(n_bytes)}, {why}" for (name, why), n_bytes in sorted(held.items())]
    if unmanaged_bytes:
        lines.append(
            f"  not managed (plain tensors, and storages below min_bytes={policy.smallest_bytes}): "
            f"{format_bytes(unmanaged_bytes)}"
        )
    lines.append(f"  What helps: {_advice(policy, wanted_bytes, memory.total_bytes, unmanaged_bytes, held)}.")
    return "\n".join(lines)


def _advice(
    policy: MemoryPolicy, wanted_bytes: int, total_bytes: int, unmanaged_bytes: int, held: Counter[tuple[str, str]]
) -> str:
    operand_bytes = sum(n_bytes for (_, why), n_bytes in held.items() if why == _OPERAND)
    if wanted_bytes + operand_bytes > total_bytes:
        return "a smaller batch or problem, or a device with more memory"
    reasons = {why for _, why in held}
    advice = []
    if not policy.spill:
        advice.append("tiers to spill to: MemoryPolicy(spill=('peer', 'host', 'disk')), the default")
    elif _TIERS_FULL in reasons:
        advice.append(f"a larger host_limit or disk_limit, or one more tier than spill={policy.spill!r}")
    if _PINNED in reasons:
        advice.append("unpin()")
    if unmanaged_bytes > total_bytes // 4:
        advice.append("a smaller min_bytes in MemoryPolicy, or plain tensors dropped sooner")
    advice.append(
        "fewer tasks at once on the device (tasks_per_device, gpu_task(memory=...), or "
        "MemoryPolicy(admission='learned')), or smaller ones"
    )
    return "; ".join(advice)
