"""Run operators, each in a child process forked from this one, two at a time.

    run_all -> fork -> child: mode.run for every sample -> one JSON line through a pipe -> Result
                    -> no line: the signal, or the time limit -> Result

The parent has imported torch and enabled the device, and must have one thread only: a forked child has none of the
others, but finds their locks as they were. It never runs a kernel itself.
"""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import gc
import os
import selectors
import signal
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any

import torch

from .compare import WrongValue
from .entries import samples
from .modes import SkipSample
from .results import Outcome, Result

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .modes import Mode

TEXT_LIMIT_CHARACTERS = 2000
OUTPUT_LIMIT_BYTES = 8000


@dataclass
class _Child:
    name: str
    pid: int
    output: IO[bytes]  # what the child prints, standard error included
    deadline: float  # on the monotonic clock
    started: float
    answer: bytearray = field(default_factory=bytearray)

    def seconds(self) -> float:
        return time.monotonic() - self.started

    def printed(self) -> str:
        """Return the end of what it printed, and close the file."""
        with self.output:
            size = self.output.seek(0, os.SEEK_END)
            self.output.seek(max(0, size - OUTPUT_LIMIT_BYTES))
            text = self.output.read().decode(errors="replace").strip()
            return text.partition("\nExtension modules:")[0]  # faulthandler's list of all that is imported


def run_all(
    operators: Iterable[Any],
    mode: Mode,
    *,
    jobs: int = 2,
    limit_s: float = 30.0,
    on_result: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """Run the operators under a mode that has been prepared; return a record each, in the order they ended."""
    threads = os.listdir("/proc/self/task") if sys.platform == "linux" else [""]
    if len(threads) != 1:
        raise RuntimeError(
            f"the parent has {len(threads)} threads, expected 1: children are forked from it. "
            f"Did {type(mode).__name__}.prepare or enabling the device start one?"
        )
    gc.collect()
    gc.freeze()  # the collector of a child must not touch, and so copy, every page of the parent
    results: list[Result] = []

    def done(result: Result) -> None:
        results.append(result)
        on_result(result)

    waiting = collections.deque(operators)
    with selectors.DefaultSelector() as running:
        while waiting or running.get_map():
            while waiting and len(running.get_map()) < jobs:
                op = waiting.popleft()
                if mode.applies(op):
                    fd, child = _start(op, mode, limit_s)
                    running.register(fd, selectors.EVENT_READ, child)
                else:
                    done(Result(op.full_name, Outcome.NOT_APPLICABLE))
            children = [key.data for key in running.get_map().values()]
            if not children:
                continue
            until = min(child.deadline for child in children) - time.monotonic()
            for key, _ in running.select(max(0.0, until)):
                chunk = os.read(key.fd, 1 << 16)
                key.data.answer += chunk
                if not chunk:
                    running.unregister(key.fd)
                    os.close(key.fd)
                    done(_collect(key.data))
            for key in list(running.get_map().values()):
                if key.data.deadline <= time.monotonic():
                    running.unregister(key.fd)
                    os.close(key.fd)
                    done(_kill(key.data, limit_s))
    return results


def _start(op: Any, mode: Mode, limit_s: float) -> tuple[int, _Child]:
    """Fork a child; return the end of the pipe its answer comes through."""
    read, write = os.pipe()
    output = tempfile.TemporaryFile()  # noqa: SIM115  closed when the child has been reaped
    sys.stdout.flush()
    sys.stderr.flush()
    now = time.monotonic()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            os.close(read)
            answer = _run_samples(op, mode).to_json().encode() + b"\n"
            sys.stdout.flush()
            with os.fdopen(write, "wb") as pipe:
                pipe.write(answer)
            status = 0
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(status)
    os.close(write)
    return read, _Child(op.full_name, pid, output, deadline=now + limit_s, started=now)


def _collect(child: _Child) -> Result:
    """Reap a child that closed its pipe."""
    _, status = os.waitpid(child.pid, 0)
    printed = child.printed()
    code = os.waitstatus_to_exitcode(status)
    if child.answer.endswith(b"\n") and code == 0:
        result = Result.from_json(child.answer.decode())
        shown = "" if result.outcome is Outcome.PASSED else printed
        return Result(**{**vars(result), "seconds": child.seconds(), "output": shown})
    text = f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit status {code}, no answer"
    return Result(child.name, Outcome.CRASHED, text, seconds=child.seconds(), output=printed)


def _kill(child: _Child, limit_s: float) -> Result:
    """End a child that ran past its limit, after it has printed where it was."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(child.pid, signal.SIGUSR1)
        time.sleep(0.2)  # for faulthandler to write the stack; a child that hangs in a system call writes none
        os.kill(child.pid, signal.SIGKILL)
    os.waitpid(child.pid, 0)
    text = f"ran past {limit_s:g} s"
    return Result(child.name, Outcome.TIMED_OUT, text, seconds=child.seconds(), output=child.printed())


def _run_samples(op: Any, mode: Mode) -> Result:
    """Run every sample of an operator; ends at the first that does not pass. Called in the child."""
    faulthandler.enable(all_threads=False)  # the one that crashed; the autograd engine has many that are idle
    faulthandler.register(signal.SIGUSR1)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    compared = skipped = 0
    why_skipped = ""

    def result(outcome: Outcome, text: str = "") -> Result:
        return Result(op.full_name, outcome, text[:TEXT_LIMIT_CHARACTERS], samples=compared, skipped=skipped)

    try:
        todo = samples(op, requires_grad=mode.requires_grad)
    except Exception as error:
        return result(Outcome.HARNESS, f"making samples: {type(error).__name__}: {error}")
    for number, sample in enumerate(todo):
        # Stays in the output of a crash, to say which sample it was.
        os.truncate(1, 0)
        os.lseek(1, 0, os.SEEK_SET)
        print(f"sample {number} of {len(todo)}: {sample.summary()[:500]}", flush=True)
        try:
            mode.run(op, sample)
            compared += 1
        except SkipSample as skip:
            skipped += 1
            why_skipped = str(skip)
        except WrongValue as error:
            return result(Outcome.WRONG_VALUE, f"sample {number}: {error}")
        except Exception as error:
            traceback.print_exc()
            sys.stderr.flush()
            return result(Outcome.FAILED, f"sample {number}: {type(error).__name__}: {error}")
    if not compared:
        return result(Outcome.HARNESS, f"none of {len(todo)} samples ran on the CPU. {why_skipped}")
    return result(Outcome.PASSED)
