"""The pictures of the documentation can be made, and are of a real run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
SVG = "{http://www.w3.org/2000/svg}"


def texts(path: Path) -> str:
    """Return all text of a picture, rich's no-break spaces made plain."""
    return "\n".join("".join(each.itertext()) for each in ElementTree.parse(path).iter(f"{SVG}text")).replace(
        "\xa0", " "
    )


def check(folder: Path) -> None:
    view = texts(folder / "watch.svg")
    for part in ("pool.watch()", "sim:0", "sim:1", "running 4", "16.0 MiB", "host"):
        assert part in view
    entries = json.loads((folder / "run.json").read_text())["traceEvents"]
    names = {entry["name"] for entry in entries} | {entry["args"]["name"] for entry in entries if entry["ph"] == "M"}
    assert {"sim:0", "sim:1", "assemble", "solve", "spilled bytes"} <= names
    assert "url(" not in (folder / "watch.svg").read_text().replace("url(#", "")


def test_those_of_the_documentation() -> None:
    check(IMAGES)
    assert (IMAGES / "trace.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.timeout(400)  # whichever comes first builds the simulator
def test_they_can_be_made_anew(tmp_path: Path) -> None:
    pytest.importorskip("rich", reason="rich, the extra ui, is not installed")
    program = [sys.executable, str(ROOT / "docs" / "pictures.py"), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MANAGED_EXEC_SIM": "", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(program, env=environment, capture_output=True, text=True, check=False, timeout=380)
    assert run.returncode == 0, run.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.json", "watch.svg"]
    check(tmp_path)
