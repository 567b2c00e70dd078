"""What is known of an operator before it is called."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

# Operators that write to an argument and whose schema does not say so. They are older than the rule, and stay as they
# are for the sake of saved models that name them.
_UNDECLARED_WRITES = {
    "aten::native_batch_norm": ("running_mean", "running_var"),
    "aten::cudnn_batch_norm": ("running_mean", "running_var"),
    "aten::miopen_batch_norm": ("running_mean", "running_var"),
}

# Operators whose schema declares a write that is none. This one tells the allocator something; torch counts no new
# version for it, and a result that its graph has saved must be able to go backward after it.
_NO_WRITES = frozenset({"aten::record_stream"})


@functools.cache
def written_arguments(func: Any) -> frozenset[int | str]:
    """Return the positions and names of the arguments that the operator *func* writes to."""
    if func._schema.name in _NO_WRITES:
        return frozenset()
    undeclared = _UNDECLARED_WRITES.get(func._schema.name, ())
    written: set[int | str] = set()
    for position, argument in enumerate(func._schema.arguments):
        declared = argument.alias_info is not None and argument.alias_info.is_write
        if declared or argument.name in undeclared:
            written.add(argument.name)
            if not argument.kwarg_only:
                written.add(position)
    return frozenset(written)


# Operators of these are torch's own, and none of their kernels is a Python function.
_NAMESPACES_OF_TORCH = frozenset({"aten", "prim", "prims", "quantized", "c10d", "_c10d_functional"})


class Facts(NamedTuple):
    """What the dispatch level asks of an operator, in one look."""

    writes: bool  # whether it writes to any argument
    may_run_python: bool  # whether its kernel may be a Python function, which may use other tensors
    is_functional: bool  # neither


@functools.cache
def facts(func: Any) -> Facts:
    """Return the facts about the operator *func*."""
    writes, may_run_python = bool(written_arguments(func)), func.namespace not in _NAMESPACES_OF_TORCH
    return Facts(writes, may_run_python, not (writes or may_run_python))
