"""Make the pictures of docs/observing.md, from a real run on the simulator.

    python docs/pictures.py [FOLDER]

``watch.svg`` is what ``pool.watch()`` draws on a terminal. ``trace.svg`` shows the file that ``pool.trace()`` wrote of
the same run, drawn here as Perfetto lays it out: a browser is not needed to make it.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import re
import time
from collections import defaultdict
from contextlib import ExitStack
from html import escape
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME

from managed_exec import GPUPoolExecutor, MemoryPolicy, sim
from managed_exec.telemetry import watch

MIB = 2**20
COLORS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#9d755d")
LEFT, WIDTH, ROW, TOP = 240, 1000, 22, 30


def assemble(n: int) -> torch.Tensor:
    time.sleep(0.02)
    return torch.full((n * 2**18,), 1.0, device="cuda")


def solve(parts: list[torch.Tensor]) -> float:
    total = sum(part.to("cuda").mul(2).sum().item() for part in parts)
    time.sleep(0.04)
    return total


def run(folder: Path) -> None:
    """Run the program and write both pictures to *folder*."""
    sim.enable(devices=2, memory="16MiB")
    trace = folder / "run.json"
    policy = MemoryPolicy(min_bytes="64KiB", spill=("host",))
    with GPUPoolExecutor(max_workers=4, memory=policy) as pool, ExitStack() as traced:
        for future in [pool.submit(lambda: solve([assemble(1)])) for _ in range(4)]:
            future.result()  # what the first kernels cost is not of interest
        traced.enter_context(pool.trace(trace))
        before = pool.statistics()
        parts = list(pool.map(assemble, [1 + i % 4 for i in range(16)]))
        futures = [pool.submit(solve, parts[i : i + 4]) for i in range(12)]
        futures[3].result()
        page = watch.page(pool.statistics(), before)
        for future in futures:
            future.result()
    (folder / "watch.svg").write_text(terminal_picture(page.drawn()), encoding="utf-8")
    entries = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    (folder / "trace.svg").write_text(trace_picture(entries), encoding="utf-8")
    trace.unlink()


def terminal_picture(drawn: Any) -> str:
    """Return what rich draws, as SVG that fetches nothing."""
    console = Console(record=True, width=100, file=io.StringIO(), force_terminal=True)
    console.print(drawn)
    svg = console.export_svg(title="pool.watch()", theme=DEFAULT_TERMINAL_THEME, unique_id="watch")
    return re.sub(r"@font-face\s*{.*?}\s*", "", svg, flags=re.DOTALL)


def trace_picture(entries: list[dict[str, Any]]) -> str:
    """Return a trace as SVG: a row for each thread of each process, and a line for each counter."""
    processes = {entry["pid"]: entry["args"]["name"] for entry in entries if entry["name"] == "process_name"}
    threads = {entry["tid"]: entry["args"]["name"] for entry in entries if entry["name"] == "thread_name"}
    spans = sorted(spans_of(entries), key=lambda span: span[1])
    begin, end = min(span[1] for span in spans), max(span[2] for span in spans)
    scale = WIDTH / (end - begin)
    rows: dict[tuple[int, int, int], int] = {}  # by process, thread and level: spans that overlap lie on several
    busy_until: dict[tuple[int, int, int], float] = defaultdict(float)
    placed = []
    for (pid, tid), first, last, name in spans:
        level = next(i for i in itertools.count() if busy_until[pid, tid, i] <= first)
        busy_until[pid, tid, level] = last
        rows.setdefault((pid, tid, level), 0)
        placed.append(((pid, tid, level), first, last, name))
    for i, key in enumerate(sorted(rows, key=lambda key: (processes[key[0]], threads[key[1]], key[2]))):
        rows[key] = i
    names = sorted({name for *_, name in placed})
    parts = [text(LEFT, 18, "0 ms"), text(LEFT + WIDTH, 18, f"{(end - begin) / 1e3:.0f} ms", anchor="end")]
    for key, row in rows.items():
        if key[2] == 0:
            parts.append(text(LEFT - 8, TOP + row * ROW + 15, f"{processes[key[0]]} {threads[key[1]]}", anchor="end"))
    for key, first, last, name in placed:
        x, y = LEFT + (first - begin) * scale, TOP + rows[key] * ROW
        width = max(1.0, (last - first) * scale)
        color = COLORS[names.index(name) % len(COLORS)]
        parts.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW - 3}" fill="{color}"/>')
        if width > 8 * len(name):
            parts.append(text(x + 3, y + 14, name, fill="#fff"))
    bottom = TOP + len(rows) * ROW
    for device, points in counters_of(entries, processes).items():
        most = max((n_bytes for _, n_bytes in points), default=0) or 1
        line = " ".join(f"{LEFT + (at - begin) * scale:.1f},{bottom + 40 - 34 * n / most:.1f}" for at, n in points)
        parts.append(text(LEFT - 8, bottom + 30, f"{device} spilled, to {most / MIB:.0f} MiB", anchor="end"))
        parts.append(f'<polyline points="{line}" fill="none" stroke="#e45756" stroke-width="1.5"/>')
        bottom += 46
    size = f'width="{LEFT + WIDTH + 10}" height="{bottom + 10}"'
    style = "<style>text{font:12px sans-serif}</style>"
    background = '<rect width="100%" height="100%" fill="#fff"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{style}{background}{"".join(parts)}</svg>\n'


def spans_of(entries: list[dict[str, Any]]) -> list[tuple[tuple[int, int], float, float, str]]:
    """Return place, begin, end and name of what takes time, the waiting of tasks left out."""
    spans, begun = [], {}
    for entry in entries:
        place = entry["pid"], entry.get("tid", 0)
        if entry["ph"] == "X":
            spans.append((place, entry["ts"], entry["ts"] + entry["dur"], entry["name"]))
        elif entry["ph"] == "b" and entry["cat"] == "memory":
            begun[entry["id"]] = entry["ts"]
        elif entry["ph"] == "e" and entry["cat"] == "memory":
            spans.append((place, begun.pop(entry["id"]), entry["ts"], entry["name"]))
    return spans


def counters_of(entries: list[dict[str, Any]], processes: dict[int, str]) -> dict[str, list[tuple[float, int]]]:
    """Return, by device, what all tiers together hold of it, and when that changed."""
    counters: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for entry in sorted((entry for entry in entries if entry["ph"] == "C"), key=lambda entry: entry["ts"]):
        points = counters[processes[entry["pid"]]]
        if points:
            points.append((entry["ts"], points[-1][1]))
        points.append((entry["ts"], sum(entry["args"].values())))
    return counters


def text(x: float, y: float, content: str, *, anchor: str = "start", fill: str = "#222") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}">{escape(content)}</text>'


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parent / "images")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    run(folder)
