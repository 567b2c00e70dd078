"""Operators that are known not to pass, and why; the only place where a failure is excused.

By mode, then by the entry's full name (with its variant). An entry that passes must not be listed, an operator that
gives a wrong value or ends its process must not be listed either: those are defects of the device.
"""

from __future__ import annotations

_NO_SPARSE_KERNELS = (
    "takes or returns a sparse tensor; the simulator has dense kernels only, and torch's sparse CPU kernels are not "
    "reached from the sparse keys of another device"
)

_EITHER = {
    "sparse.mm.reduce": _NO_SPARSE_KERNELS,
    "sparse.sampled_addmm": _NO_SPARSE_KERNELS,
    "to_sparse": _NO_SPARSE_KERNELS,
}

EXPECTED_FAILURES: dict[str, dict[str, str]] = {
    "forward": {**_EITHER},
    "backward": {**_EITHER},
}
