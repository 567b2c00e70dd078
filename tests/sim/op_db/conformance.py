"""For a pytest file: run the operator database in a process of its own, and judge the records by the table.

The runner forks, so it cannot live in pytest's process, which has threads. The child is a fresh interpreter that
builds the simulator when it is not built.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from .results import Outcome, Result, counts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NEVER_EXCUSED = (Outcome.WRONG_VALUE, Outcome.CRASHED, Outcome.TIMED_OUT, Outcome.HARNESS)


def run_op_db(
    device: str, mode: str, *, only: Sequence[str] = (), limit_s: float = 120.0, total_s: float = 900.0
) -> list[Result]:
    """Run the operator database under a mode; return a record an operator.

    Raises:
        RuntimeError: the runner ended without its records, with what it printed.
        subprocess.TimeoutExpired: it ran past ``total_s``; it and its children have been ended.

    """
    here = Path(__file__).resolve()
    package = __package__ or ""
    root = here.parents[len(package.split("."))]  # the folder the package is found in, under pytest or by hand
    repository = here.parents[3]
    search = [str(root), str(repository), os.environ.get("PYTHONPATH", "")]
    with tempfile.TemporaryDirectory() as folder:
        records = Path(folder, "records.jsonl")
        command = [sys.executable, "-m", package, "--device", device, "--mode", mode, "--limit", str(limit_s)]
        command += ["--records", str(records), *(f"--only={name}" for name in only)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, search))}
        process = subprocess.Popen(
            command,
            env=environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            printed, _ = process.communicate(timeout=total_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the group is this process and its children
            process.wait()
        if not records.exists():
            raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}, no records:\n{printed[-8000:]}")
        return [Result.from_json(line) for line in records.read_text().splitlines()]


def complaints(results: Sequence[Result], expected: Mapping[str, str]) -> list[str]:
    """Return what is wrong with a run: nothing, if every failure is listed and every listed one fails."""
    found = []
    by_name = {result.name: result for result in results}
    for result in results:
        if result.outcome in NEVER_EXCUSED:
            found.append(f"{result.name}: {result.outcome.value}, never excused: {result.text} {result.output[-600:]}")
        elif result.outcome is Outcome.FAILED and result.name not in expected:
            found.append(f"{result.name}: failed, not listed in expected_failures.py: {result.text}")
    for name, reason in expected.items():
        if name not in by_name:
            found.append(f"{name}: listed in expected_failures.py, but there is no such operator")
        elif by_name[name].outcome in (Outcome.PASSED, Outcome.NOT_APPLICABLE):
            found.append(f"{name}: {by_name[name].outcome.value}, so delete it from expected_failures.py")
        if not reason.strip():
            found.append(f"{name}: listed in expected_failures.py without a reason")
    return found


def figures(results: Sequence[Result]) -> str:
    """Return one line for a report."""
    slowest = max(results, key=lambda r: r.seconds)
    return (
        f"{len(results)} operators: {counts(list(results))}, {sum(r.samples for r in results)} samples compared; "
        f"slowest {slowest.name} {slowest.seconds:.1f} s"
    )
