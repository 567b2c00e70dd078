"""Make the pictures of docs/observing.md, from a real run on the simulator.

    python docs/pictures.py [FOLDER]

``watch.svg`` is what ``pool.watch()`` draws on a terminal. ``run.json`` is what ``pool.trace()`` wrote of the same run;
``trace.png`` is a screenshot of it, opened in Chrome's trace viewer, and has to be taken by hand.
"""

from __future__ import annotations

import argparse
import io
import re
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME

from managed_exec import GPUPoolExecutor, MemoryPolicy, sim
from managed_exec.telemetry import watch


def assemble(n: int) -> torch.Tensor:
    time.sleep(0.02)
    return torch.full((n * 2**18,), 1.0, device="cuda")


def solve(parts: list[torch.Tensor]) -> float:
    total = sum(part.to("cuda").mul(2).sum().item() for part in parts)
    time.sleep(0.04)
    return total


def run(folder: Path) -> None:
    """Run the program and write picture and trace to *folder*."""
    sim.enable(devices=2, memory="16MiB")
    policy = MemoryPolicy(min_bytes="64KiB", spill=("host",))
    with GPUPoolExecutor(max_workers=4, memory=policy) as pool, ExitStack() as traced:
        for future in [pool.submit(lambda: solve([assemble(1)])) for _ in range(4)]:
            future.result()  # what the first kernels cost is not of interest
        traced.enter_context(pool.trace(folder / "run.json"))
        before = pool.statistics()
        parts = list(pool.map(assemble, [1 + i % 4 for i in range(16)]))
        futures = [pool.submit(solve, parts[i : i + 4]) for i in range(12)]
        futures[3].result()
        page = watch.page(pool.statistics(), before)
        for future in futures:
            future.result()
    (folder / "watch.svg").write_text(terminal_picture(page.drawn()), encoding="utf-8")


def terminal_picture(drawn: Any) -> str:
    """Return what rich draws, as SVG that fetches nothing."""
    console = Console(record=True, width=100, file=io.StringIO(), force_terminal=True)
    console.print(drawn)
    svg = console.export_svg(title="pool.watch()", theme=DEFAULT_TERMINAL_THEME, unique_id="watch")
    return re.sub(r"@font-face\s*{.*?}\s*", "", svg, flags=re.DOTALL)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parent / "images")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    run(folder)
