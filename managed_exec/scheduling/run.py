"""One run of a task on a device, in the calling thread; and what to do with what it raises."""

from __future__ import annotations

import logging
import traceback
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import torch
from torch.autograd import profiler

from managed_exec.context import DeviceContext
from managed_exec.scheduling.span import TaskSpan
from managed_exec.task import Task
from managed_exec.tensors.backward import drop_failed_passes
from managed_exec.tensors.backward import thread as passes

# Of any exception, whatever its class has made of these names.
_base: Any = BaseException
_cause_of, _context_of, _trace_of = (
    _base.__dict__[f"__{name}__"].__get__ for name in ("cause", "context", "traceback")
)

_log = logging.getLogger("concurrent.futures")  # where the standard pool reports what befalls a worker


def run_bound(
    task: Task, context: DeviceContext, position: int
) -> tuple[Any, BaseException | None, BaseException | None]:
    """Run *task* on the device at *position*; return its result, or what it raised, and what its device has raised."""
    result: Any = None
    error: BaseException | None = None
    report: BaseException | None = None
    span: TaskSpan | None = None
    # The call is written out here, for each frame between this one and the task's would keep its arguments alive as
    # long as the error of a failed task lives.
    try:
        if profiler._is_profiler_enabled:
            span = TaskSpan(task.name, context.device_at(position))
        context.future = task.future
        context.enter(position, task.id, task.streams)
        modes = task.modes or context.fresh_modes
        if task.context is None:  # nothing is inherited
            result = task.fn(*task.args, **task.kwargs)
        elif modes is None:
            result = task.context.run(task.fn, *task.args, **task.kwargs)
        else:
            with modes.applied():
                result = task.context.run(task.fn, *task.args, **task.kwargs)
    except BaseException as raised:  # noqa: BLE001 a task may raise anything; all of it belongs to its future
        error = raised
    try:
        context.leave()
        if context.shares_results:
            context.share(result, task.streams)
    except BaseException as raised:  # noqa: BLE001 likewise; containers in a result run code of the user's
        result = None
        report = raised
        if error is None:
            error = raised
        else:
            # The task's own error comes first; what its device had to say besides is most often the same.
            _log.warning("task %d failed, and then its device reported: %r", task.id, raised)
    if span is not None:
        span.end()
    # On the CPU there is no device memory that they could keep. A task may have caught what they raised.
    if context.shares_results and (error is not None or passes.has_failed_pass):
        drop_failed_passes()
    try:
        return result, error, report
    finally:
        del error, report, result, task


def error_chain(error: BaseException) -> list[BaseException]:
    """Return *error* and all that it was raised from or beside."""
    chain: list[BaseException] = []
    pending: list[BaseException | None] = [error]
    while pending:
        current = pending.pop()
        if current is not None and not any(current is link for link in chain):
            chain.append(current)
            pending += [_cause_of(current), _context_of(current)]
    return chain


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether *error* is an out-of-memory error, or was raised from one."""
    return any(isinstance(link, torch.OutOfMemoryError) for link in error_chain(error))


def is_device_error(error: BaseException) -> bool:
    """Return whether *error* is one that a broken device raises, or was raised from one."""
    return any(isinstance(link, torch.AcceleratorError) for link in error_chain(error))


def drop_frames(error: BaseException) -> None:
    """Let go of every frame that *error*, and what it was raised from, came through. The traceback stays readable.

    An exception keeps the frames, and so the tensors, of the task that raised it for as long as its future lives; for
    an out-of-memory error that is the very memory that is missing, and of a task that was stopped nobody wants it. To
    clear the frames is not enough: each keeps its function, and a closure's function what it closes over. So frames of
    the same names and lines take their places.
    """
    try:
        for link in error_chain(error):
            trace = _trace_of(link)
            traceback.clear_frames(trace)
            BaseException.with_traceback(link, _bare(trace))  # sets it also where the class lets nothing be set
    finally:
        del error, link, trace  # a frame that takes another's place refers to those that made it


class _Raised(Exception):  # noqa: N818 never seen
    """What makes a frame."""


class _Place(NamedTuple):
    """Where a frame of a traceback is."""

    filename: str
    name: str
    line: int
    module: dict[str, Any]  # what linecache finds the source by, where it is not in a file


def _bare(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback that reads as *trace* and refers to nothing of it."""
    places = _places(trace)
    del trace
    bare: TracebackType | None = None
    for place in reversed(places):
        bare = TracebackType(bare, _frame(place), -1, place.line)
    return bare


def _places(trace: TracebackType | None) -> list[_Place]:
    places = []
    while trace is not None:
        code, module = trace.tb_frame.f_code, trace.tb_frame.f_globals
        named = {"__name__": module.get("__name__"), "__loader__": module.get("__loader__")}
        places.append(_Place(code.co_filename, code.co_name, trace.tb_lineno or 1, named))
        trace = trace.tb_next
    return places


def _frame(place: _Place) -> FrameType:
    """Return the frame of a call that has ended, of that name and place."""
    code = compile("raise error", place.filename, "exec").replace(co_name=place.name, co_firstlineno=place.line)
    raised = _Raised()
    with suppress(_Raised):
        exec(code, {**place.module, "error": raised})
    trace = raised.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    assert trace is not None, "the code raises"
    return trace.tb_frame
