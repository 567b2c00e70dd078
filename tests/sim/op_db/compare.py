"""Compare what an operator gave on the device with what it gave on the CPU."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from .operands import leaves

# Entries whose result holds memory nobody wrote; only their meta data means something.
UNINITIALISED = {
    "empty": "all of the result",
    "empty_like": "all of the result",
    "empty_permuted": "all of the result",
    "empty_strided": "all of the result",
    "new_empty": "all of the result",
    "new_empty_strided": "all of the result",
    "resize_": "what lies beyond the old size",
    "resize_as_": "what lies beyond the old size",
}


class Tolerance(NamedTuple):
    """How far a float32 value may be from the CPU's, and why; elsewhere ``torch.testing``'s default holds."""

    relative: float
    absolute: float
    reason: str


TOLERANCE = {
    "nn.functional.scaled_dot_product_attention": Tolerance(
        1e-4, 5e-5, "the CPU has a fused kernel that adds in another order; other devices run the composite"
    ),
}


class WrongValue(Exception):
    """The device gave another result than the CPU."""


def compare(actual: Any, expected: Any, *, what: str, values: bool, tolerance: Tolerance | None = None) -> None:
    """Raise ``WrongValue`` unless the two nested results agree; ``values=False`` compares only meta data.

    ``actual`` has been fetched to the CPU. Strides are not compared: they follow from the kernel that was chosen.
    """
    mine, theirs = leaves(actual), leaves(expected)
    if len(mine) != len(theirs):
        raise WrongValue(f"{what}: {len(mine)} values, the CPU gives {len(theirs)}")
    for index, (a, e) in enumerate(zip(mine, theirs, strict=True)):
        where = what if len(mine) == 1 else f"{what} {index}"
        if isinstance(e, torch.Tensor):
            _compare_tensors(a, e, where, values=values, tolerance=tolerance)
        elif type(a) is not type(e):
            raise WrongValue(f"{where}: {type(a).__name__}, the CPU gives {type(e).__name__}")
        elif values and isinstance(e, (bool, int, float, complex, str, torch.dtype)):
            both_nan = isinstance(e, float) and math.isnan(a) and math.isnan(e)
            if a != e and not both_nan and not (isinstance(e, float) and math.isclose(a, e, rel_tol=1e-5)):
                raise WrongValue(f"{where}: {a!r}, the CPU gives {e!r}")


def _compare_tensors(a: Any, e: torch.Tensor, where: str, *, values: bool, tolerance: Tolerance | None) -> None:
    if not isinstance(a, torch.Tensor):
        raise WrongValue(f"{where}: {type(a).__name__}, the CPU gives a tensor")
    for field in ("dtype", "shape", "layout"):
        if getattr(a, field) != getattr(e, field):
            raise WrongValue(f"{where}: {field} {getattr(a, field)}, the CPU gives {getattr(e, field)}")
    if values:
        try:
            rtol, atol = (tolerance.relative, tolerance.absolute) if tolerance else (None, None)
            torch.testing.assert_close(a, e, rtol=rtol, atol=atol, equal_nan=True, check_stride=False)
        except AssertionError as error:
            raise WrongValue(f"{where}: {error}") from None
