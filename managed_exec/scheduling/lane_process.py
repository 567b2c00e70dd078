"""What runs in the process of a lane: the calls that its pool sends, one at a time, on one device.

    begin, prepare, initialize, then run, run, run ...

Each but the first gets the message of a parcel and returns that of another; the descriptors that belong to a message
travel over the lane's channel, a socket, before it. A call returns a reply whatever its task does, so that only the end
of the process is the end of the lane.
"""

from __future__ import annotations

import array
import os
import signal
import socket
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from multiprocessing import connection, parent_process
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, TypeVar

import torch

from managed_exec import sim
from managed_exec.context import DeviceContext
from managed_exec.devices import CpuDevice, Device, resolve_devices
from managed_exec.errors import NotSendableError
from managed_exec.future import Stop
from managed_exec.inheritance import SubmitterModes
from managed_exec.managed_context import ManagedContext
from managed_exec.memory.manager import configure
from managed_exec.memory.policy import MemoryPolicy
from managed_exec.scheduling.run import drop_frames, error_chain, is_out_of_memory, run_bound
from managed_exec.sim.simulator import Configuration
from managed_exec.task import Task
from managed_exec.tensors.parcel import pack, unpack

T = TypeVar("T")
_MAX_AT_ONCE = 100  # descriptors in one message of a socket; Linux takes up to 253


class ProcessSettings(NamedTuple):
    """What belongs to a process as a whole and changes what PyTorch computes, or how fast."""

    dtype: torch.dtype
    n_threads: int
    matmul_precision: str
    deterministic: bool
    only_warns: bool

    @staticmethod
    def capture() -> ProcessSettings:
        return ProcessSettings(
            torch.get_default_dtype(),
            torch.get_num_threads(),
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )

    def apply(self) -> None:
        torch.set_default_dtype(self.dtype)
        torch.set_num_threads(self.n_threads)
        torch.set_float32_matmul_precision(self.matmul_precision)
        torch.use_deterministic_algorithms(self.deterministic, warn_only=self.only_warns)


class Setup(NamedTuple):
    """What the process of a lane has to be."""

    device: str
    simulator: Configuration | None
    policy: MemoryPolicy | None  # None: nothing is managed
    settings: ProcessSettings
    seed: int  # of torch's generators


class Call(NamedTuple):
    """One run of a task."""

    task_id: int
    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    inherits: bool  # whether the next hold, those of a fresh thread if there are none
    modes: SubmitterModes | None
    shares_device: bool  # with other lanes, for which freed memory is given back to the device


class Failure(NamedTuple):
    """What was raised, in a form that always arrives."""

    text: str
    traceback: str
    pickled: bytes | None  # the exception; None if it cannot be pickled
    is_out_of_memory: bool
    is_poisoned: bool  # whether the process must not be used any more


class Reply(NamedTuple):
    value: Any
    failure: Failure | None


def send_descriptors(channel: socket.socket, descriptors: Sequence[int]) -> None:
    """Send *descriptors*; never waits, for the other end takes them all before there are more."""
    for i in range(0, len(descriptors), _MAX_AT_ONCE):
        batch = array.array("i", descriptors[i : i + _MAX_AT_ONCE])
        # Not socket.send_fds, which ignores its flags, as recv_fds does.
        channel.sendmsg([b"d"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, batch)], socket.MSG_DONTWAIT)


def receive_descriptors(channel: socket.socket, count: int) -> list[int]:
    """Return that many descriptors, which were sent already.

    Raises:
        OSError: they were not, or this process may have no more.
    """
    flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
    received: list[int] = []
    try:
        while len(received) < count:
            n_expected = min(count - len(received), _MAX_AT_ONCE)
            batch = array.array("i")
            _, ancillary, _, _ = channel.recvmsg(1, socket.CMSG_LEN(n_expected * batch.itemsize), flags)
            for _, _, content in ancillary:
                batch.frombytes(content[: len(content) - len(content) % batch.itemsize])
            received += batch
            if len(batch) != n_expected:
                raise OSError(f"expected {n_expected} more file descriptors, got {len(batch)}; see `ulimit -n`")
    except BaseException:
        for descriptor in received:
            os.close(descriptor)
        raise
    return received


class _Lane:
    """The process's part of its lane."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._device: Device = CpuDevice()
        self._make_context: Callable[[], DeviceContext] = partial(DeviceContext, (self._device,))
        self._context: DeviceContext | None = None  # made for the first task, so after the user's initializer
        self.is_poisoned = False  # whether the device has refused to end the last task
        # Each is set by one thread, which then looks at the other: so a task is told that is to stop as it starts.
        self._task: Task | None = None  # that runs
        self._told: tuple[int, Stop] | None = None  # the number of a task, and why it is to stop

    def prepare(self, setup: Setup) -> None:
        """Bind the process to its device."""
        setup.settings.apply()
        if setup.simulator is not None:
            sim.enable(**setup.simulator._asdict())
        (self._device,) = devices = resolve_devices([setup.device])
        if self._device.is_accelerator:
            torch.accelerator.set_device_index(self._device.torch_device.index)
        torch.manual_seed(setup.seed)
        if self._device.is_accelerator and setup.policy is not None:
            manager = configure(setup.policy, [self._device.torch_device])
            self._make_context = partial(ManagedContext, devices, manager)
        else:
            self._make_context = partial(DeviceContext, devices)

    def run(self, call: Call) -> Any:
        """Run a task; return its result, or raise what it or its device raised."""
        if self._context is None:
            self._context = self._make_context()
        context = copy_context() if call.inherits else None
        task = Task(call.task_id, call.fn, call.args, call.kwargs, context, call.modes, None)
        task.future.set_running_or_notify_cancel()
        self._task = task
        self._pass_on()
        result, error, report = run_bound(task, self._context, 0)
        self._task = None
        self.is_poisoned = isinstance(report, torch.AcceleratorError)
        try:
            if error is not None:
                raise error
            return result
        finally:
            del error, report, result, task, call, context  # the traceback of the error refers to this frame

    def stop(self, task_id: int, stop: Stop) -> None:
        """Be told, in a thread of its own, that a task is to stop, which runs, or will, or has."""
        self._told = task_id, stop
        self._pass_on()

    def _pass_on(self) -> None:
        task, told = self._task, self._told
        if task is not None and told is not None and told[0] == task.id:
            task.future.request_stop(told[1])

    def answer(self, message: bytes, act: Callable[[Any], Any]) -> bytes:
        """Return the message of the reply to the call in *message*."""
        try:
            call = unpack(message, lambda count: receive_descriptors(self._channel, count))
        except BaseException as error:  # noqa: BLE001 whatever unpickling runs may raise anything
            return self._reply(None, _transit_failure("what was sent cannot be read in the process it is for", error))
        task = call if isinstance(call, Call) else None
        value: Any = None
        failure: Failure | None = None
        try:
            value = act(call)
        except BaseException as error:  # noqa: BLE001 a task may raise anything; all of it belongs to its future
            failure = _failure(error)
            if self.is_poisoned:
                failure = failure._replace(is_poisoned=True)
        del call
        try:
            reply = self._reply(value, failure)
        except BaseException as error:  # noqa: BLE001 as above, of pickling
            what = "the result" if task is None else f"the result of {task.name}"
            reply = self._reply(None, _transit_failure(f"{what} cannot be sent back from its process", error))
        del value
        if task is not None and task.shares_device:
            with suppress(torch.AcceleratorError):  # of a broken device the next task is told
                self._device.empty_cache()
        return reply

    def _reply(self, value: Any, failure: Failure | None) -> bytes:
        parcel = pack(Reply(value, failure))
        try:
            send_descriptors(self._channel, parcel.descriptors)
            return parcel.message
        finally:
            parcel.close()


class _Process:
    """The lane that this process is of, if it is of one."""

    lane: _Lane | None = None


def _lane() -> _Lane:
    if _Process.lane is None:
        raise RuntimeError("this is not the process of a lane")
    return _Process.lane


def begin(channel: socket.socket, stops: Connection) -> None:
    """Be the first call in the process of a lane.

    Args:
        channel: its end of the lane's.
        stops: from where it is told that a task is to stop.
    """
    _Process.lane = _Lane(channel)  # first: the thread may have something to pass on at once
    threading.Thread(target=_listen, args=(stops,), name="managed_exec_parent", daemon=True).start()
    # Ctrl-C goes to all processes of a terminal. As in a thread, a task goes on while its program decides what to do.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def prepare(message: bytes) -> bytes:
    """Have the process be what the ``Setup`` in *message* says."""
    lane = _lane()
    return lane.answer(message, lane.prepare)


def initialize(message: bytes) -> bytes:
    """Call the user's initializer."""
    return _lane().answer(message, _call_initializer)


def run(message: bytes) -> bytes:
    """Run the task of the ``Call`` in *message*."""
    lane = _lane()
    return lane.answer(message, lane.run)


def _call_initializer(call: tuple[Callable[..., object], tuple[Any, ...]]) -> None:
    initializer, initargs = call
    initializer(*initargs)


def _listen(stops: Connection) -> None:
    """Pass on what is told by *stops*, and end this process when the pool's ends, however that happens.

    Nothing else would end it when the pool's is killed: it has both ends of the pipe on which it waits for calls.
    """
    parent = parent_process()
    assert parent is not None, "the process of a lane is started by its pool's"
    sources: list[Any] = [parent.sentinel, stops]
    while parent.sentinel not in connection.wait(sources):
        try:
            told = stops.recv()
        except (EOFError, OSError):
            sources.remove(stops)  # the pool has closed its end, and the process is about to end
        else:
            _lane().stop(*told)
    os._exit(1)


def _text(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip()


def _failure(error: BaseException) -> Failure:
    """Return what can be sent of *error*; an out-of-memory error holds no memory afterwards."""
    text, trace = _text(error), "".join(traceback.format_exception(error))
    out_of_memory = is_out_of_memory(error)
    if out_of_memory:
        drop_frames(error)
    pickled: bytes | None = None
    try:
        pickled = pack(error, in_message=True).message
        unpack(pickled, lambda count: [])  # many exceptions can be pickled and not unpickled
    except Exception:  # noqa: BLE001 whatever pickling runs may raise anything; what arrives then is the text
        pickled = None
    # After such an error CUDA refuses everything else that the process asks of it.
    is_poisoned = any(isinstance(link, torch.AcceleratorError) for link in error_chain(error))
    return Failure(text, trace, pickled, out_of_memory, is_poisoned)


def _transit_failure(what: str, error: BaseException) -> Failure:
    """Return a failure of the way between two processes."""
    failure = NotSendableError(f"{what}: {_text(error)}")
    failure.__cause__ = error
    # Some descriptors may have been left in the channel.
    return _failure(failure)._replace(is_poisoned=isinstance(error, (OSError, torch.AcceleratorError)))
