"""Run programs, each in a fork of a process that has imported torch: as a user would start it, without the seconds of
the import.

    python program_server.py        a line of JSON for each program in, a line with its exit status out

A line says what to run, and for how long at most, where its output goes, and what of the environment is other than
here. A program is forked off, so it finds nothing that one before it has left; it ends as every process does. This
process has one thread only, or a fork would find locks that nobody gives back.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import sys
import time
from typing import Any

# What the programs are spared: torch, what it imports when it is first used (by an optimizer, say), and this package.
# None of these starts a thread.
import torch._dynamo
import torch.utils.cpp_extension  # noqa: F401

import managed_exec  # noqa: F401

TIMED_OUT = 124


def serve() -> str | None:
    """Start what is asked for. Return, in a program's own process, its path; here None, once nothing more is asked."""
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            become(job)
            return str(job["script"])
        print(status_of(child, job["timeout_s"]), flush=True)
    return None


def become(job: dict[str, Any]) -> None:
    """Make this process the one that the job describes, and leader of a group of its own."""
    os.setsid()
    os.chdir(job["folder"])
    os.environ.update(job["environ"])
    for descriptor, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, job["stdout"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
        (2, job["stderr"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
    ):
        opened = os.open(path, flags, 0o600)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115  the old one has lines of other programs


def status_of(child: int, timeout_s: float) -> int:
    """Wait for a program; end it, with all that it has started, when its time is over."""
    deadline = time.monotonic() + timeout_s
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return TIMED_OUT
        time.sleep(0.005)


if __name__ == "__main__":
    gc.freeze()  # or each program would look through all of this at its end, and copy the pages
    script = serve()
    if script is not None:
        sys.argv = [script]
        sys.path[0] = os.path.dirname(script)
        runpy.run_path(script, run_name="__main__")
