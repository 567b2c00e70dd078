"""The order of kernels of different streams on one storage.

Tasks run in streams of their own, and a tensor may pass from one to another while both run. As each managed operand
goes by before its kernel, the kernel's stream is made to wait for the one that wrote last, and a writer for the readers
too: then a program that is right in one stream is right in many.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from managed_exec.devices import current_stream
from managed_exec.memory.record import Record
from managed_exec.memory.transfer import whole


def order_streams(records: Sequence[Record], written: Sequence[Record]) -> None:
    """Make the current streams wait for what other streams do with *records*, which are marked in use."""
    for record in records:
        if record.in_streams:
            _order(record, current_stream(record.device), record in written)


def _order(record: Record, stream: torch.Stream, writes: bool) -> None:
    if record.writer is None:
        record.writer = stream
    elif record.writer != stream and (writes or stream not in record.readers):
        stream.wait_stream(record.writer)
        # Or the allocator, which knows the storage as the first stream's, would give it away while this one reads.
        whole(record.storage).record_stream(stream)
    if writes:
        for reader in record.readers - {stream}:
            stream.wait_stream(reader)
        record.writer, record.readers = stream, frozenset()
    elif record.writer != stream:
        record.readers |= {stream}
