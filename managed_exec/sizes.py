"""Amounts of memory as people write them: ``12_000_000``, ``"12GiB"``, ``"500 MB"``.

Covers parsing and printing. Fractions are the caller's matter: what they are a fraction of is not known here.
"""

from __future__ import annotations

import re
from decimal import Decimal

_FACTORS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(size: int | str, *, name: str = "size") -> int:
    """Return *size* in bytes.

    Args:
        size: a number of bytes, or text with a unit of powers of 1000 (``"2GB"``) or 1024 (``"2GiB"``), in any case.
        name: what the value is for, named in the error.

    Raises:
        TypeError: *size* is neither an ``int`` nor a ``str``.
        ValueError: the text cannot be read, or the amount is not positive.
    """
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise TypeError(f"{name}: expected bytes as an int or text like '12GiB', got {size!r}")
    if isinstance(size, int):
        n_bytes = size
    else:
        match = _SIZE.fullmatch(size)
        if match is None or match[2].upper() not in _FACTORS:
            raise ValueError(
                f"{name}: cannot read {size!r}; write a number and one of B, KB, MB, GB, TB, KiB, MiB, GiB, TiB"
            )
        n_bytes = int(Decimal(match[1]) * _FACTORS[match[2].upper()])
    if n_bytes <= 0:
        raise ValueError(f"{name}: expected a positive amount, got {size!r}")
    return n_bytes


def format_bytes(n_bytes: int) -> str:
    """Return *n_bytes* with the largest binary unit that leaves at least one whole, such as ``"1.5 GiB"``."""
    amount = float(n_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(round(amount, 1)) < 1024:  # as printed: 1024.0 KiB is 1.0 MiB
            return f"{amount:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"
