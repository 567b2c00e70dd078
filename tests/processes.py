"""What the tests of processes share: waiting across processes, and the check that nothing of them is left."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from conftest import eventually, left_threads

WAIT_S = 90  # starting a process imports torch, on a machine that may be busy
_POLL_S = 0.01


def wait_for(path: Path) -> bool:
    """Be a task that waits until *path* is there, made by whoever lets it go on."""
    deadline = time.monotonic() + WAIT_S
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return path.exists()


def lane_pids() -> list[int]:
    return [child.pid for child in multiprocessing.active_children() if child.pid is not None]


def shared_memory() -> set[str]:
    """Return the segments, semaphores among them, that this process and not another program has made."""
    names = f"sem.mp{os.getpid()}-", f"torch_{os.getpid()}_"
    return {name for name in os.listdir("/dev/shm") if name.startswith(names)}


@contextmanager
def nothing_left_by_processes() -> Iterator[None]:
    """Check that the block leaves no process, thread, file descriptor or segment of shared memory."""
    gc.collect()
    # What multiprocessing begins the names of its semaphores with.
    multiprocessing.current_process()._config["semprefix"] = f"/mp{os.getpid()}"  # type: ignore[attr-defined]
    threads, processes, segments = set(threading.enumerate()), set(lane_pids()), shared_memory()
    # The standard library keeps one process to clean up after this one, and a pipe to it.
    multiprocessing.resource_tracker.ensure_running()  # type: ignore[attr-defined]
    descriptors = len(os.listdir("/proc/self/fd"))
    yield
    assert eventually(lambda: not _left(threads)), f"threads left: {_left(threads)}"
    assert set(lane_pids()) <= processes, "processes left"
    assert eventually(lambda: shared_memory() <= segments), f"left: {shared_memory() - segments}"
    left = len(os.listdir("/proc/self/fd")) - descriptors
    assert eventually(lambda: len(os.listdir("/proc/self/fd")) <= descriptors), f"{left} file descriptors left"


def _left(threads: set[threading.Thread]) -> list[threading.Thread]:
    """Return the threads that came after *threads*, but for pytest's own, which watches the time of the test."""
    return [thread for thread in left_threads(threads) if not isinstance(thread, threading.Timer)]
