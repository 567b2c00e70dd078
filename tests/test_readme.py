"""What README.md and the documentation say can be run, runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
CI = ROOT / ".ci" / "run"


def blocks(language: str, page: Path = README) -> Iterator[tuple[int, str]]:
    """Yield the blocks of *language* on *page*, each with the number of its first line."""
    text = page.read_text(encoding="utf-8")
    for match in re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield text.count("\n", 0, match.start(1)) + 1, match[1]


def after_the_change(diff: str) -> str:
    return "\n".join(line[1:] for line in diff.splitlines() if not line.startswith("-"))


PROGRAMS = {
    **{
        f"{page.stem}, line {line}": program
        for page in (README, *sorted(DOCS.glob("*.md")))
        for line, program in blocks("python", page)
    },
    **{f"line {line}, changed": after_the_change(diff) for line, diff in blocks("diff")},
}


@pytest.mark.timeout(400)  # whichever comes first builds the simulator
@pytest.mark.parametrize("simulated", ["", "3x64MiB"], ids=["cpu", "sim"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_program_runs(program: str, simulated: str, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAMS[program], encoding="utf-8")
    run = subprocess.run(
        [sys.executable, script],
        check=False,
        capture_output=True,
        text=True,
        timeout=380,
        cwd=tmp_path,
        env={**os.environ, "MANAGED_EXEC_SIM": simulated, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert run.returncode == 0, run.stdout + run.stderr
    # Some builds of torch let their profiler say when it starts and stops, and no setting keeps it from that.
    assert [line for line in run.stderr.splitlines() if not line.startswith("USDT:")] == []


def test_change_is_one_class_name() -> None:
    ((_, diff),) = blocks("diff")
    removed = [line[1:] for line in diff.splitlines() if line.startswith("-")]
    added = [line[1:] for line in diff.splitlines() if line.startswith("+")]
    assert len(removed) == len(added) == 2
    assert [line.replace("ThreadPoolExecutor", "GPUPoolExecutor") for line in removed] == [
        line.replace("from managed_exec", "from concurrent.futures") for line in added
    ]


def test_commands_are_those_of_the_continuous_integration() -> None:
    commands = [command.strip() for _, command in blocks("sh")]
    assert len(commands) == 2
    assert commands[0].endswith("python examples/pde_solve.py")
    assert "pytest" in commands[1]
    if not CI.exists():
        pytest.skip("a source distribution has no .ci")
    lines = [line.strip() for line in CI.read_text(encoding="utf-8").splitlines()]
    for command in commands:
        assert command in lines


def test_names_in_code_exist() -> None:
    """Every ``managed_exec`` name and every option of the constructor that the README mentions is there."""
    import inspect

    import managed_exec

    text = README.read_text(encoding="utf-8")
    for dotted in set(re.findall(r"`((?:managed_exec\.)?sim(?:\.\w+)*)", text)):
        found: object = managed_exec
        for part in dotted.removeprefix("managed_exec.").split("."):
            found = getattr(found, part)
    table = text.partition("## The constructor")[2].partition("\n## ")[0]
    named = {name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert named == set(inspect.signature(managed_exec.GPUPoolExecutor).parameters)
