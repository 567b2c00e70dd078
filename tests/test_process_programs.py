"""Programs whose tasks run in processes: how they end, and what of ``__main__`` travels."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import eventually

pytestmark = pytest.mark.timeout(400)

PROGRAM = """
import multiprocessing, os, sys, time
from pathlib import Path
from managed_exec import GPUPoolExecutor

def task(path):
    time.sleep(0.05)
    Path(path).touch()
    return path

if __name__ == "__main__":
    pool = GPUPoolExecutor(1, workers="processes", devices="cpu")
    futures = [pool.submit(task, str(i)) for i in range(6)]
    futures[0].result()
    print(*[child.pid for child in multiprocessing.active_children()], flush=True)
    {ending}
"""


def run_program(text: str, folder: Path) -> tuple[int, str, str]:
    (folder / "program.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    return done.returncode, done.stdout, done.stderr


def has_ended(process_id: int) -> bool:
    """Return whether there is no such process, or nothing but its entry."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize(
    ("ending", "code", "finished"),
    [
        ("del pool, futures; raise ValueError('in main')", 1, True),
        ("os.kill(os.getpid(), 9)", -9, False),
    ],
)
def test_end_of_the_program(ending: str, code: int, finished: bool, tmp_path: Path) -> None:
    """As with threads, what is queued still runs, unless the program is killed; its processes end in any case."""
    found, printed, error = run_program(PROGRAM.format(ending=ending), tmp_path)
    assert (found, error.count("Traceback")) == (code, int(code == 1)), error
    (lane,) = map(int, printed.split())
    assert eventually(lambda: has_ended(lane))
    if finished:
        assert len(list(tmp_path.glob("[0-9]"))) == 6


def test_program_without_guard(tmp_path: Path) -> None:
    text = PROGRAM.replace('if __name__ == "__main__":', "if True:").replace("range(6)", "range(1)").format(ending="")
    code, _, error = run_program(text, tmp_path)
    assert code == 1
    assert (
        "has not run: the process that was started for it ended with exit code 1. A program that makes the pool"
        in error
    )


CACHED = """
import functools
from managed_exec import GPUPoolExecutor, gpu_task

@gpu_task
@functools.lru_cache
def square(x):
    return x * x

if __name__ == "__main__":
    with GPUPoolExecutor(1, workers="processes", devices="cpu") as pool:
        print(pool.submit(square, 3).result(), pool.submit(square.options(priority=1), 4).result())
"""


def test_cached_function_of_the_program(tmp_path: Path) -> None:
    """A cached function goes by its name, which the marked one has."""
    assert run_program(CACHED, tmp_path) == (0, "9 16\n", "")
