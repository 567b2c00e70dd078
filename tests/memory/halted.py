"""Copies that stop half-way, and threads to wait for them in."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from managed_exec import sim
from managed_exec.memory.manager import manager
from managed_exec.memory.transfer import CopyStreams

T = TypeVar("T")


def start(fn: Callable[..., T], *args: object) -> Future[T]:
    """Call *fn* in a thread of its own, which a hang does not keep the process alive for."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(fn(*args))
        except BaseException as error:
            future.set_exception(error.with_traceback(None))  # its frames hold tensors

    threading.Thread(target=run, daemon=True).start()
    return future


def out_stream(index: int = 0) -> torch.Stream:
    """Return the stream in which the manager copies from a device. Nothing public leads to it."""
    return manager()._mover._copy_streams.get(torch.device("sim", index), "out")


def renew_copy_streams() -> None:
    """Have the manager make new streams: those of a device are 32, handed out in turn, so old ones may be a task's."""
    manager()._mover._copy_streams = CopyStreams()


@contextmanager
def stopped(stream: torch.Stream) -> Iterator[None]:
    """Stop all copies in *stream*, those that block their caller too: they wait for one that is queued before them."""
    queued = torch.zeros(8, device=stream.device)
    source = torch.zeros(8).pin_memory()
    with sim.hold_stream(stream):
        with stream:
            queued.copy_(source, non_blocking=True)
        yield
