"""One process in which tasks run, as its pool sees it.

Who wakes a thread that waits for a call: the manager thread of the lane's ``ProcessPoolExecutor``, which waits for a
reply and for the end of the process. Replies are a few kilobytes, so none is ever half written.

A lane is used by one thread at a time; others may tell its task to stop, or end it.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import connection
from typing import Any

import torch

from managed_exec.errors import RemoteError
from managed_exec.future import Stop
from managed_exec.scheduling import lane_process
from managed_exec.scheduling.lane_process import Failure, Reply
from managed_exec.tensors.parcel import Parcel, unpack

_log = logging.getLogger(__name__)

END_GRACE_S = 10.0  # for a process that is told to end: a thread that its tasks left may keep it from that
_EXIT_CODE_WAIT_S = 1.0


class RemoteTraceback(Exception):  # noqa: N818  as in the standard library: shown as a cause, never raised
    """The traceback of an exception in the process in which it was raised."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class RemoteOutOfMemory(RemoteTraceback, torch.OutOfMemoryError):
    """As its base, of an exception that was raised from, or is, an out-of-memory error."""


class LaneLostError(Exception):
    """The process of a lane has ended before it replied to a call."""


class LaneEndedError(LaneLostError):
    """The process of a lane had ended before it was sent the call."""


class Lane:
    """One process, made by the first call."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_condemned = False  # whether its process is about to be killed, and so takes no more calls
        spawn = multiprocessing.get_context("spawn")
        self._channel, theirs = socket.socketpair()
        told, self._stops = spawn.Pipe(duplex=False)
        self._stops_lock = threading.Lock()  # so that one tells at a time, and not while the pipe is closed; a leaf
        try:
            self._processes = ProcessPoolExecutor(1, spawn, initializer=lane_process.begin, initargs=(theirs, told))
            self._processes.submit(int)  # a call that does nothing, to have the process started
        except BaseException:
            self._channel.close()
            self._stops.close()
            raise
        finally:
            theirs.close()
            told.close()
        internals: Any = self._processes
        (self._process,) = internals._processes.values()
        self._manager: threading.Thread = internals._executor_manager_thread  # waits for replies, and for the end

    @property
    def pid(self) -> int | None:
        pid: int | None = self._process.pid
        return pid

    @property
    def is_alive(self) -> bool:
        return not self.is_condemned and not connection.wait([self._process.sentinel], 0)

    def call(self, function: Callable[[bytes], bytes], parcel: Parcel) -> Reply:
        """Have *function* called with what is in *parcel*, and return its reply. Waits as long as that takes.

        Raises:
            LaneLostError: the process has ended.
        """
        try:
            lane_process.send_descriptors(self._channel, parcel.descriptors)
            future = self._processes.submit(function, parcel.message)
        except (BrokenProcessPool, BrokenPipeError, ConnectionResetError):
            raise LaneEndedError from None
        try:
            message = future.result()
        except BrokenProcessPool:
            raise LaneLostError from None
        reply: Reply = unpack(message, partial(lane_process.receive_descriptors, self._channel))
        return reply

    def stop(self, task_id: int, stop: Stop) -> None:
        """Tell the process that the task with that number is to stop, if it runs it, or will."""
        with self._stops_lock:
            if not self._stops.closed:
                try:
                    self._stops.send((task_id, stop))
                except OSError as error:
                    _log.debug("task %d cannot be told to stop: %s", task_id, error)  # its process has ended

    def kill(self) -> None:
        """End the process at once, whatever it does."""
        self._process.kill()

    def close(self) -> None:
        """Tell the process to end."""
        with self._stops_lock:
            self._stops.close()
        self._channel.close()
        self._processes.shutdown(wait=False)

    def join(self, deadline: float = math.inf) -> None:
        """Wait until the process, told to end, has ended; kill it at *deadline*, on the monotonic clock."""
        grace_s = min(max(0.0, deadline - time.monotonic()), END_GRACE_S)
        self._manager.join(grace_s)
        if self._manager.is_alive():
            self._process.kill()
            self._manager.join()

    @property
    def was_killed(self) -> bool:
        """Whether a signal has ended the process, once ``ending`` has returned."""
        return (self._process.exitcode or 0) < 0

    def ending(self) -> str:
        """Return how the process has ended; wait until that is known."""
        self.close()
        self.join()
        # Whichever thread of this process asks first gets the exit code from the system, and notes it a moment later.
        deadline = time.monotonic() + _EXIT_CODE_WAIT_S
        while self._process.exitcode is None and time.monotonic() < deadline:
            time.sleep(0.001)
        code = self._process.exitcode
        if code is None:
            return "ended"
        if code >= 0:
            return f"ended with exit code {code}"
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        hint = "; the system does that when main memory runs out" if name == "SIGKILL" else ""
        return f"was ended by {name} (exit code {code}{hint})"


def raised_in(failure: Failure) -> BaseException:
    """Return what was raised in the lane, with its traceback there as the cause."""
    error: object = None
    if failure.pickled is not None:
        try:
            error = unpack(failure.pickled, lambda count: [])
        except Exception as unread:  # noqa: BLE001 whatever unpickling runs may raise anything
            _log.debug("an exception cannot be unpickled here: %r", unread)
    if not isinstance(error, BaseException):
        error = RemoteError(f"{failure.text} (this stands for the exception, which cannot be pickled)")
    cause = RemoteOutOfMemory if failure.is_out_of_memory else RemoteTraceback
    base: Any = BaseException
    base.__cause__.__set__(error, cause(failure.traceback))  # also where its class lets nothing be set
    return error
