"""Backward passes: calls in which autograd runs code of the user's (hooks, custom functions, recomputed checkpoints).

torch switches function modes and subclasses off while they handle a call. For these calls they must be on again inside,
and the calls must never be made a second time: part of the gradients would be added twice.

Autograd's engine gives every node the thread state that it finds when it starts. The last thing that happens before, in
Python, is that it asks ``retain_graph`` for its value; that is where ``run_backward`` switches things on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeAlias

import torch

ContextMaker: TypeAlias = Callable[[], AbstractContextManager[object]]

BACKWARD_CALLS: frozenset[Any] = frozenset({torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad})


class _Thread(threading.local):
    """Of the calling thread."""

    has_failed_pass = False  # since ``drop_failed_passes``


thread = _Thread()


class _RetainGraph:
    """The value of ``retain_graph``, which enters a context when it is asked for."""

    def __init__(self, value: Any, make_context: ContextMaker, stack: ExitStack) -> None:
        self._value = value
        self._make_context = make_context
        self._stack = stack

    def __index__(self) -> int:
        self._stack.enter_context(self._make_context())
        return int(self._value.__index__())


def run_backward(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    make_context: ContextMaker,
) -> Any:
    """Call *func*, one of ``BACKWARD_CALLS``, in a context of *make_context* while the engine runs."""
    retain_graph = kwargs.get("retain_graph")
    if retain_graph is None:
        retain_graph = kwargs.get("create_graph", False)
    with ExitStack() as stack:
        try:
            return func(*args, **{**kwargs, "retain_graph": _RetainGraph(retain_graph, make_context, stack)})
        except BaseException:
            thread.has_failed_pass = True
            raise


def drop_failed_passes() -> None:
    """Let go of what backward passes that failed in the calling thread have left in autograd's queue.

    The nodes that were still to run, and with them the tensors they have saved, stay there until the thread's next
    pass; this is one.
    """
    thread.has_failed_pass = False
    with torch.inference_mode(False), torch.enable_grad():
        torch.ones((), device="cpu", requires_grad=True).backward()  # type: ignore[no-untyped-call]  # torch's is not annotated
