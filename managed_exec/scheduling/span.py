"""A task in the traces of ``torch.profiler``, and as an NVTX range.

torch has one flag for "some profiler is on": its own, or ``emit_nvtx``. That is all a task without one costs. The flag
is the process's, but what is recorded is mostly the thread's own: a profiler that does not ask for all threads has
nothing of a worker but its device's kernels. NVTX ranges go to whatever tool has attached, from any thread.
"""

from __future__ import annotations

import torch
from torch.autograd import profiler


class TaskSpan:
    """The time of one run of a task, in the thread that runs it, its device work included."""

    def __init__(self, name: str, device: torch.device) -> None:
        """Begin, while a profiler is on; *name* is what is seen."""
        # NVTX is torch's own module on CUDA alone (and ROCm, which calls itself so). ``emit_nvtx`` makes ranges of its
        # own in the thread alone that entered it, so a worker has no two of them.
        self._nvtx = device.type == "cuda"
        name = name.encode("utf-8", "replace").decode()  # torch takes no other, and a name can be any text
        self._record = profiler.record_function(name)
        self._record.__enter__()  # type: ignore[no-untyped-call]
        if self._nvtx:
            torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """End it; the profiler may have been switched off meanwhile."""
        if self._nvtx:
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]
        self._record.__exit__(None, None, None)
