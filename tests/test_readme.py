"""README.md's change of one name, its commands, and the names it mentions. That its programs run, and its links lead
somewhere, is in ``test_documentation.py``.
"""

from __future__ import annotations

import re

import pytest
from documents import CI, README, blocks


def test_change_is_one_class_name() -> None:
    (block,) = blocks(README, "diff")
    removed = [line[1:] for line in block.text.splitlines() if line.startswith("-")]
    added = [line[1:] for line in block.text.splitlines() if line.startswith("+")]
    assert len(removed) == len(added) == 2
    assert [line.replace("ThreadPoolExecutor", "GPUPoolExecutor") for line in removed] == [
        line.replace("from managed_exec", "from concurrent.futures") for line in added
    ]


def test_commands_are_those_of_the_continuous_integration() -> None:
    commands = [block.text.strip() for block in blocks(README, "sh")]
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
    for dotted in sorted(set(re.findall(r"`((?:managed_exec\.)?sim(?:\.\w+)*)", text))):
        found: object = managed_exec
        for part in dotted.removeprefix("managed_exec.").split("."):
            found = getattr(found, part)
    table = text.partition("## The constructor")[2].partition("\n## ")[0]
    named = {name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert named == set(inspect.signature(managed_exec.GPUPoolExecutor).parameters)
