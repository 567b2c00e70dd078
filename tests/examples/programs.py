"""The examples, as modules and as programs."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


@contextmanager
def imported(name: str) -> Iterator[ModuleType]:
    """Import an example, which finds its neighbours beside it, as it does when it is run; forget all of them after."""
    before = set(sys.modules)
    sys.path.insert(0, str(EXAMPLES))
    try:
        yield importlib.import_module(name)
    finally:
        sys.path.remove(str(EXAMPLES))
        for path in EXAMPLES.glob("*.py"):
            if path.stem not in before:
                sys.modules.pop(path.stem, None)


def run_example(name: str, *options: str, simulated: str = "") -> subprocess.CompletedProcess[str]:
    """Run an example in a process of its own, where a warning is an error.

    Args:
        name: of the example.
        options: of the program.
        simulated: what MANAGED_EXEC_SIM says there.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "MANAGED_EXEC_SIM": simulated,
        "PYTHONWARNINGS": "error",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
