"""Which cards and MIG instances CUDA shows to a process, foretold from ``CUDA_VISIBLE_DEVICES``.

Covers the rules of the CUDA programming guide and of the MIG user guide, over a list of cards that is given. Where CUDA
itself can be asked, its answer counts: numbers follow ``CUDA_DEVICE_ORDER``, which is known to CUDA alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

# CUDA reads a number as C's strtoul does, so "1gpu" is 1. A sign is allowed; a negative number names nothing.
_NUMBER = re.compile(r"\+?([0-9]+)")
_OLD_INSTANCE = re.compile(
    r"MIG-(GPU-[^/]+)/([0-9]+)/([0-9]+)"
)  # by card, GPU instance, compute instance; up to driver 460


class Instance(NamedTuple):
    """A MIG instance: a slice of a card that CUDA shows as a device of its own."""

    uuid: str
    gpu_instance: int
    compute_instance: int


class Card(NamedTuple):
    """A card as NVML lists it."""

    number: int  # NVML's
    uuid: str | None  # None: NVML does not say, as of a lost card
    name: str | None = None
    is_mig: bool = False  # in MIG mode, where CUDA shows its instances, never the card
    instances: tuple[Instance, ...] = ()
    problem: str | None = None  # what NVML did not say of it, and why


class Visibility(NamedTuple):
    """What CUDA shows, in its order, and what there is to say of the rest."""

    uuids: tuple[str, ...]
    value: str | None  # of CUDA_VISIBLE_DEVICES; None: not set
    named: tuple[str, ...] = ()  # what the value stands for, shown or not
    ended_by: str | None = None  # the entry that names nothing, which ends the list

    def why_hidden(self, uuid: str) -> str | None:
        """Return why CUDA does not show *uuid*; None if it does, as far as can be known."""
        if uuid in self.uuids:
            return None
        setting = f"CUDA_VISIBLE_DEVICES={self.value!r}"
        if self.value is not None and len(set(self.named)) < len(self.named):
            return f"{setting} names a device twice, for which CUDA shows none"
        if uuid in self.named:
            return "CUDA shows a process one MIG instance, and nothing beside it"
        if self.value is None:
            return None
        ended = f"; its entry {self.ended_by!r} names no device and ends the list" if self.ended_by else ""
        return f"hidden by {setting}{ended}"


def visibility(cards: Sequence[Card], value: str | None) -> Visibility:
    """Return what CUDA shows of *cards* under *value* of ``CUDA_VISIBLE_DEVICES``; None: it is not set.

    Entries are numbers, ``GPU-`` and ``MIG-`` UUIDs or unambiguous beginnings of them, and the older
    ``MIG-<GPU UUID>/<GPU instance>/<compute instance>``. The list ends at the first that names nothing. A device named
    twice leaves none. If a MIG instance is among the devices, the first of these is the only one.
    """
    ended_by = None
    if value is None:
        named = [uuid for card in cards for uuid in _shown(card)]
    else:
        named = []
        for entry in map(str.strip, value.split(",")):
            matches = list(_matches(cards, entry))
            if len(matches) != 1:
                ended_by = entry
                break
            named.extend(matches)
    first_instance = [uuid for uuid in named if uuid.startswith("MIG-")][:1]
    uuids = [] if len(set(named)) < len(named) else first_instance or named
    return Visibility(tuple(uuids), value, tuple(named), ended_by)


def _shown(card: Card) -> tuple[str, ...]:
    """Return what CUDA makes of a card: itself, in MIG mode all its instances, of which it takes the first."""
    if card.is_mig:
        return tuple(instance.uuid for instance in card.instances)
    return () if card.uuid is None else (card.uuid,)


def _matches(cards: Sequence[Card], entry: str) -> Iterator[str]:
    """Yield what one entry may stand for: it is valid if that is one."""
    if number := _NUMBER.match(entry):
        for card in cards:
            if card.number == int(number[1]):
                yield from _shown(card)[:1]
    elif old := _OLD_INSTANCE.fullmatch(entry):
        place = int(old[2]), int(old[3])
        for card in cards:
            if card.uuid is not None and card.uuid.startswith(old[1]):
                yield from (i.uuid for i in card.instances if (i.gpu_instance, i.compute_instance) == place)
    elif entry.startswith("MIG-"):
        yield from (i.uuid for card in cards for i in card.instances if i.uuid.startswith(entry))
    elif entry.startswith("GPU-"):
        for card in cards:
            if card.uuid is not None and card.uuid.startswith(entry):
                yield from _shown(card)[:1]
