"""The cards of the machine and what every process has of them, read again and again: ``python -m managed_exec top``.

Reads NVML alone: no CUDA, so no memory of a card is taken, and all cards are seen, whatever ``CUDA_VISIBLE_DEVICES``
says. On a terminal rich draws a table in place, where it is installed; elsewhere each reading is a few plain lines.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple, TextIO

from managed_exec.devices import nvml
from managed_exec.devices.nvml import Process, Reading
from managed_exec.devices.visibility import Card
from managed_exec.sizes import format_bytes
from managed_exec.telemetry.display import Page, busy_text, open_display, table, used_text


class Row(NamedTuple):
    """One card or MIG instance at one time."""

    device: str
    name: str
    reading: Reading

    @property
    def memory(self) -> str:
        if self.reading.memory is None:
            return "-"
        free, total = self.reading.memory
        return used_text(total - free, total)

    @property
    def busy(self) -> str:
        return busy_text(self.reading.utilization)

    @property
    def details(self) -> list[str]:
        """The processes, largest first, and what could not be read."""
        processes = sorted(self.reading.processes or (), key=lambda process: -(process.used_bytes or 0))
        return [*map(_described, processes), *self.reading.problems]


class Snapshot(NamedTuple):
    """All cards at one time; or none, and why."""

    rows: tuple[Row, ...]
    problem: str | None


def snapshot() -> Snapshot:
    """Read all cards and MIG instances now."""
    try:
        cards = nvml.cards()
    except nvml.NvmlError as error:
        return Snapshot((), f"NVML cannot be read: {error}")
    rows = tuple(row for card in cards for row in _rows(card))
    return Snapshot(rows, None if rows else "NVML lists no card")


def run(out: TextIO, err: TextIO, *, once: bool, interval_s: float) -> int:
    """Show what there is on *out*, once or every *interval_s* seconds until Ctrl-C; return the exit status.

    That is 1, with the reason on *err*, where there is nothing to show at first. Later on the reason is shown in place
    of the cards: they may come back.
    """
    try:
        seen = snapshot()
        if not seen.rows:
            err.write(f"{seen.problem}\n")
            return 1
        display = open_display(out)
        try:
            display.show(_page(seen))
            while not once:
                time.sleep(interval_s)
                display.show(_page(snapshot()))
        finally:
            display.close()
    except KeyboardInterrupt:
        pass  # how the user ends it
    return 0


def plain(seen: Snapshot) -> str:
    """Return a snapshot as lines of text."""
    lines = [time.strftime("%H:%M:%S")]
    for row in seen.rows:
        lines.append(f"{row.device}  {row.name}  {row.memory}  busy {row.busy}")
        lines += [f"    {detail}" for detail in row.details]
    if seen.problem is not None:
        lines.append(seen.problem)
    return "\n".join(lines) + "\n"


def _rows(card: Card) -> Iterator[Row]:
    device, name = f"NVIDIA {card.number}", card.name or "-"
    if card.uuid is None:
        yield Row(device, name, Reading(None, None, None, (str(card.problem),)))
        return
    reading = nvml.reading(card.uuid)
    if card.problem is not None:
        reading = reading._replace(problems=(*reading.problems, card.problem))
    if card.instances:
        reading = reading._replace(processes=None)  # they are its instances'
    yield Row(device, name, reading)
    for instance in card.instances:
        place = f"{device} MIG {instance.gpu_instance}/{instance.compute_instance}"
        yield Row(place, name, nvml.reading(instance.uuid))


def _described(process: Process) -> str:
    # A process may call itself anything: nothing of that may reach a terminal as a command.
    name = "".join(letter if letter.isprintable() else "?" for letter in process.name or "-")
    used = "-" if process.used_bytes is None else format_bytes(process.used_bytes)
    return f"{process.pid}  {name}  {used}"


def _page(seen: Snapshot) -> Page:
    return Page(plain(seen), lambda: _table(seen))


def _table(seen: Snapshot) -> object:
    headings = ("device", "name", "memory", "busy", "processes: pid, name, memory")
    rows = [(row.device, row.name, row.memory, row.busy, "\n".join(row.details)) for row in seen.rows]
    return table(time.strftime("%H:%M:%S"), headings, rows, seen.problem)
