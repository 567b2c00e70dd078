"""Run programs, each in a fork of a process that has imported torch: as a user would start it, without the seconds of
the import.

    python program_server.py        a line of JSON for each program in, a line with its exit status out

A line says what to run, and for how long at most, where its output goes, and what of the environment is other than
here. A program is forked off, so it finds nothing that one before it has left. At its end its threads are waited for
and its exit handlers called, as ever; but its modules are not taken apart, which for torch takes longer than most
programs. This process has one thread only, or a fork would find locks that nobody gives back.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import signal
import sys
import threading
import time
import traceback
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


def run(script: str) -> int:
    """Run a program to its end, and return its exit status."""
    sys.argv = [script]
    sys.path[0] = os.path.dirname(script)
    status = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except BaseException:  # whatever it is, a SystemExit too: no program shown leaves that way
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]  # these two are how the interpreter ends, in this order
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return status


if __name__ == "__main__":
    script = serve()
    if script is not None:
        os._exit(run(script))
