"""What binds a worker thread to a device while it runs a task.

One ``DeviceContext`` a worker thread, used for one task after another. Between ``enter`` and ``leave``:

- ``"cuda"`` without an index, and ``.cuda()``, mean the task's device, whatever its kind;
- the thread's current device and current stream are the task's;
- ``current_task()`` answers.

After ``leave`` the thread is as it was before ``enter``, whatever the task did: current device and stream, grad and
inference mode, autocast, the stacks of function and dispatch modes, the default device. And the device work that the
task queued is done, so that its errors are the task's.

Nothing here is shared between threads, so nothing is locked.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._C import (
    _get_function_stack_at,
    _is_any_autocast_enabled,
    _is_multithreading_enabled,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
    _pop_torch_dispatch_stack,
    _pop_torch_function_stack,
    _push_on_torch_function_stack,
    _set_multithreading_enabled,
)
from torch.overrides import TorchFunctionMode

from managed_exec.devices import Device
from managed_exec.devices import current as current_devices
from managed_exec.future import TaskFuture
from managed_exec.inheritance import FRESH_MODES, SubmitterStreams
from managed_exec.memory.owner import Owner
from managed_exec.tensors.backward import BACKWARD_CALLS, run_backward
from managed_exec.tensors.managed import ManagedTensor
from managed_exec.tensors.results import iter_tensors, record_stream

_log = logging.getLogger(__name__)

# The two methods that take a device by position. Every other overridable call takes it by keyword, which is seen
# without a list.
_TO = torch.Tensor.to
_CUDA = torch.Tensor.cuda


class _Thread(threading.local):
    """The context whose task the calling thread runs. Set by ``enter`` and unset by ``leave``."""

    context: DeviceContext | None = None


_thread = _Thread()


def current_context() -> DeviceContext | None:
    """Return the context of the task that the calling thread runs; None outside a task."""
    return _thread.context


class DeviceContext(TorchFunctionMode):
    """Bind the calling thread to one of *devices* for the length of a task.

    Made in the worker thread itself, before its first task: what the thread looks like then is what ``leave`` brings
    back (an initializer may have changed it for good, as it may in any thread pool).
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        super().__init__()
        self._devices = devices
        # A backward pass otherwise runs the kernels of all tasks of a device on one thread of autograd's own, where
        # neither the mode nor the stream of the task is current, and where one task's wait stops all others.
        _set_multithreading_enabled(False)
        self._baseline = _ThreadState(devices)
        # What a task that inherits a fresh thread's modes has to be given: nothing, unless an initializer changed ours.
        self.fresh_modes = None if self._baseline.is_fresh else FRESH_MODES
        self.shares_results = bool(self._baseline.streams)  # whether results need ``share``
        # By position: the device, and whether the mode is needed there.
        self._bindings = [(device.torch_device, self._needs_mode(device.torch_device)) for device in devices]
        # Books the running task of a future on another device; returns whether that took it. Set by the worker.
        self.move_booking: Callable[[TaskFuture[Any], int], bool] = lambda future, to_position: False
        self._streams: dict[int, torch.Stream | None] = {}  # by position; made once, for each has its own workspaces
        # Valid between enter and leave.
        self.position = 0  # of the device among the pool's
        self.device = torch.device("cpu")
        self.stream: torch.Stream | None = None
        self.task_id = -1
        self.last_owner: Owner | None = None  # the last task, to the memory manager; None where nothing is managed
        self.future: TaskFuture[Any] | None = None  # the task's, with the flag that tells it to stop; set by the worker
        self._pushed = False  # whether this mode is on the thread's stack

    def device_at(self, position: int) -> torch.device:
        """Return the device that ``enter`` will bind to."""
        return self._bindings[position][0]

    def enter(self, position: int, task_id: int, submitter: SubmitterStreams | None) -> None:
        """Make the device at *position* this thread's, after what *submitter* had queued."""
        self.position = position
        self.device, pushed = self._bindings[position]
        self.task_id = task_id
        if self.shares_results:
            self._enter_stream(position, submitter)
        if pushed:
            _push_on_torch_function_stack(self)
            self._pushed = True
        _thread.context = self
        current_devices.thread.device = self.device

    def _enter_stream(self, position: int, submitter: SubmitterStreams | None) -> None:
        """Make this thread's stream on the device, and with it the device, current."""
        if position not in self._streams:
            self._streams[position] = self._devices[position].new_stream()
        stream = self._streams[position]
        if stream is not None:
            torch.accelerator.set_stream(stream)
            self.stream = stream
            if submitter is not None:
                for event in submitter.pending:
                    stream.wait_event(event)

    def leave(self) -> None:
        """Wait for the task's device work, then bring the thread back to what it was before ``enter``.

        Raises:
            Exception: what the device reports of the task's work. The thread is back to its old state all the same.
        """
        _thread.context = None
        current_devices.thread.device = None
        self.future = None
        current = self._baseline.current_streams() if self.shares_results else ()
        try:
            if self.stream is not None:
                self._synchronize(self.stream, current)
        finally:
            self.stream = None
            pushed, self._pushed = self._pushed, False
            self._baseline.restore(self if pushed else None, current)

    def _synchronize(self, stream: torch.Stream, current_streams: Sequence[torch.Stream]) -> None:
        """Wait for the task's *stream*, and for those that are current on the pool's other devices.

        The task may have used these by their index. There it shares the default stream with whoever else does, so this
        can wait for more than the task's own work, never for less; and an error there may be anyone's.
        """
        if not stream.query():  # to wait for nothing costs more: it lets other threads have the interpreter
            stream.synchronize()
        for current in current_streams:
            try:
                if current != stream and not current.query():
                    current.synchronize()
            except torch.AcceleratorError as error:
                # Tasks bound to that device get this error, and whoever reads a result there.
                _log.debug("task %d: %s reports %r", self.task_id, current.device, error)

    def share(self, result: object, submitter: SubmitterStreams | None) -> None:
        """Keep the result's blocks from being handed out again while the streams that will read them still do.

        These are the ones this thread and the submitter had current on the devices: most often the default streams.
        """
        for tensor in iter_tensors(result):
            if isinstance(tensor, ManagedTensor) and tensor.is_registered:
                continue  # its next kernel sees to the order, wherever it runs; until then it may be anywhere
            if tensor.device in self._baseline.streams:
                readers = {self._baseline.streams[tensor.device]}
                if submitter is not None:
                    readers.update(stream for stream in submitter.streams if stream.device == tensor.device)
                for stream in readers:
                    record_stream(tensor, stream)

    def _needs_mode(self, device: torch.device) -> bool:
        """Return whether tasks on *device* need this mode. CUDA itself reads a bare "cuda" as the current device."""
        return device.type != "cuda"

    # -- the mode: "cuda" means the task's device -------------------------------------------------------------------

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # On the way of every torch call of a task, so the common case is decided by three cheap tests.
        if _len_torch_function_stack():
            return self._call_below_default_device(func, args, kwargs)
        if func in BACKWARD_CALLS:
            return run_backward(func, args, kwargs or {}, self._on)
        if func is _TO or func is _CUDA:
            return self._call_to(func, args, kwargs)
        if not kwargs:
            return func(*args)
        device = kwargs.get("device")
        if device is not None:
            target = self._resolve(device)
            if target is not device:
                kwargs = {**kwargs, "device": target}
        return func(*args, **kwargs)

    @staticmethod
    def _resolve(device: Any) -> Any:
        """Return what *device* means in the task: its own for a bare ``"cuda"``, the one of that index otherwise."""
        if isinstance(device, str):
            return current_devices.resolve_cuda(device) if device.startswith("cuda") else device
        is_cuda = isinstance(device, torch.device) and device.type == "cuda"
        return current_devices.resolve_cuda(device) if is_cuda else device

    def _call_to(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> Any:
        """Call ``Tensor.to`` or ``Tensor.cuda`` with its device resolved."""
        kwargs = dict(kwargs or {})
        tensor, *rest = args
        if func is _CUDA:
            wanted = rest.pop(0) if rest else kwargs.pop("device", None)
            if rest:
                kwargs["non_blocking"] = rest.pop(0)
            wanted = torch.device("cuda") if wanted is None else wanted
            wanted = torch.device("cuda", wanted) if isinstance(wanted, int) else wanted
        elif rest and isinstance(rest[0], (str, torch.device)):
            wanted = rest.pop(0)
        else:
            wanted = kwargs.get("device")
        target = self._resolve(wanted)
        if target is wanted and func is _TO:
            return func(*args, **kwargs)
        if func is _CUDA and isinstance(target, torch.device) and target.type == "cuda":
            return func(*args, **{**kwargs, "device": target} if len(args) == 1 else kwargs)
        # to(device, dtype, non_blocking, copy): what is left of the positional arguments follows by name.
        kwargs.update(zip(("dtype", "non_blocking", "copy"), rest, strict=False), device=target)
        if target.type == "cpu" and tensor.device.type == "cpu":
            # On a GPU the result never shares memory with a tensor of the host, and programs write to it in place.
            kwargs["copy"] = True
        return _TO(tensor, **kwargs)

    @contextmanager
    def _on(self) -> Iterator[None]:
        """Have the mode on in the block, in a call that it handles and is therefore off for."""
        _push_on_torch_function_stack(self)
        try:
            yield
        finally:
            _pop_all_function_modes()  # what the call found here was nothing, and torch puts this mode back itself

    def _call_below_default_device(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any] | None
    ) -> Any:
        """Call *func* with this mode moved under ``torch.set_default_device`` and ``with torch.device(...)``.

        These put their own mode at the bottom of the stack, so that the ``"cuda"`` they add would come after this
        mode has looked. Their exit insists on being at the bottom, so the order is changed for this call alone.
        """
        below = _pop_all_function_modes()
        _push_on_torch_function_stack(self)
        for mode in below:
            _push_on_torch_function_stack(mode)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            _pop_all_function_modes()
            for mode in below:
                _push_on_torch_function_stack(mode)


def _pop_all_function_modes() -> list[Any]:
    """Empty the thread's stack of function modes; return them, bottom first."""
    return [_pop_torch_function_stack() for _ in range(_len_torch_function_stack())][::-1]


class _ThreadState:
    """Everything a task could change of its thread, as it was when this was made, and the way back to it."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self._grad_enabled = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self.is_fresh = self._grad_enabled and not self._inference
        self._function_modes = [_get_function_stack_at(i) for i in range(_len_torch_function_stack())]
        self._dispatch_modes = _len_torch_dispatch_stack()
        self._default_device = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
        self._accelerators = [device for device in devices if device.is_accelerator]
        self._inference_guards: list[torch.inference_mode] = []  # never exited: leaving one would undo the next
        self.streams: dict[torch.device, torch.Stream] = {}
        if self._accelerators:
            self._device_index = torch.accelerator.current_device_index()
            for device in self._accelerators:
                stream = device.current_stream()
                if stream is not None:
                    self.streams[device.torch_device] = stream

    def current_streams(self) -> list[torch.Stream]:
        """Return the calling thread's current streams on the accelerators, in the order of ``streams``."""
        return [stream for device in self._accelerators if (stream := device.current_stream()) is not None]

    def restore(self, mode: DeviceContext | None, current_streams: Sequence[torch.Stream]) -> None:
        """Bring the calling thread back; *mode* is what ``enter`` pushed."""
        while _len_torch_dispatch_stack() > self._dispatch_modes:
            _pop_torch_dispatch_stack(None)
        above = _len_torch_function_stack() - len(self._function_modes)
        if not (above == 0 if mode is None else above == 1 and _pop_torch_function_stack() is mode):
            _pop_all_function_modes()
            for function_mode in self._function_modes:
                _push_on_torch_function_stack(function_mode)
            torch._GLOBAL_DEVICE_CONTEXT.device_context = self._default_device
        if torch.is_inference_mode_enabled() is not self._inference:
            guard = torch.inference_mode(self._inference)
            guard.__enter__()
            self._inference_guards.append(guard)
        if torch.is_grad_enabled() is not self._grad_enabled:
            torch._C._set_grad_enabled(self._grad_enabled)
        if _is_multithreading_enabled():
            _set_multithreading_enabled(False)
        if _is_any_autocast_enabled():
            self._leave_autocast()
        if self._accelerators:
            for current, stream in zip(current_streams, self.streams.values(), strict=True):
                if current != stream:
                    torch.accelerator.set_stream(stream)
            torch.accelerator.set_device_index(self._device_index)

    def _leave_autocast(self) -> None:
        for kind in {"cpu", "cuda", *(device.torch_device.type for device in self._accelerators)}:
            torch.set_autocast_enabled(kind, False)
        # The depth can only be read by changing it.
        for _ in range(torch.autocast_increment_nesting()):
            torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()
