"""The tensors inside a task's result.

Covers the containers a result is made of in practice: sequences, sets, mappings, dataclasses, named tuples,
``torch.return_types`` (tuples, all of them) and modules. Does not look into other objects.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch


def iter_tensors(result: object) -> Iterator[torch.Tensor]:
    """Yield every tensor of *result*, each object once, cycles included."""
    return iter_leaves(result, ())


def iter_leaves(result: object, kinds: tuple[type, ...]) -> Iterator[Any]:
    """Yield every tensor of *result*, and every other object in it that is one of *kinds* and no container."""
    seen: set[int] = set()
    pending = [result]
    while pending:
        value = pending.pop()
        if isinstance(value, torch.Tensor):
            if id(value) not in seen:
                seen.add(id(value))
                yield value
                if value.is_leaf and value.grad is not None:
                    pending.append(value.grad)
            continue
        if isinstance(value, (str, int, float, complex)) or value is None or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, (list, tuple, set, frozenset, deque)):
            pending.extend(value)
        elif isinstance(value, Mapping):
            pending.extend(value.values())
        elif isinstance(value, torch.nn.Module):
            pending.extend(chain(value.parameters(), value.buffers()))
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            # A field without a value (a slot never assigned) is nothing that could hold a tensor.
            pending.extend(getattr(value, field.name, None) for field in dataclasses.fields(value))
        elif isinstance(value, kinds):
            yield value


def record_stream(tensor: torch.Tensor, stream: torch.Stream) -> None:
    """Tell the allocator that work in *stream* uses *tensor*, whatever its layout.

    Without this a block that was allocated in one stream and is read in another is handed out again, once freed, while
    the other stream still reads it.
    """
    if tensor.layout == torch.strided:
        tensor.record_stream(stream)
    elif tensor.layout == torch.sparse_coo:
        record_stream(tensor._indices(), stream)
        record_stream(tensor._values(), stream)
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        for part in (tensor.crow_indices(), tensor.col_indices(), tensor.values()):
            record_stream(part, stream)
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        for part in (tensor.ccol_indices(), tensor.row_indices(), tensor.values()):
            record_stream(part, stream)
