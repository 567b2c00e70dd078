"""What README.md and the pages of docs/ show runs, and what they point to is there.

Every block of Python is a program, which is run by itself, with no accelerator and with simulated ones; or, with a
``title=``, a file of the page's project, in which pytest is run. Every command of a block of shell is known here.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from documents import DOCS, PAGES, README, ROOT, Block, after_the_change, all_blocks, anchors, blocks, links

from managed_exec.__main__ import _parser

LANGUAGES = {"python", "diff", "sh", "text", "toml", "json"}
PROGRAMS: dict[str, str] = {
    **{block.place: block.text for block in all_blocks("python") if block.title is None},
    **{f"{block.place}, changed": after_the_change(block.text) for block in all_blocks("diff")},
}
SIMULATED = {"cpu": "", "sim": "3x64MiB"}
# Those that make their own devices, or start processes, which takes seconds, are run on the simulator alone.
RUNS = [
    (place, kind)
    for place, program in PROGRAMS.items()
    for kind in SIMULATED
    if kind == "sim" or not re.search(r"sim\.enable\(|workers=\"processes\"", program)
]
TIMEOUT_S = 380  # whichever program comes first builds the simulator

# Runs a program in a folder, with MANAGED_EXEC_SIM as given; returns its exit status.
RunProgram = Callable[[str, Path, str], int]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture(scope="module")
def run_program() -> Iterator[RunProgram]:
    server = subprocess.Popen(
        [sys.executable, Path(__file__).with_name("program_server.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
    )
    assert server.stdin is not None
    assert server.stdout is not None
    with server:

        def run(program: str, folder: Path, simulated: str) -> int:
            script = folder / "program.py"
            script.write_text(program, encoding="utf-8")
            job = {
                "script": str(script),
                "folder": str(folder),
                "stdout": str(folder / "stdout"),
                "stderr": str(folder / "stderr"),
                "environ": {"MANAGED_EXEC_SIM": simulated},
                "timeout_s": TIMEOUT_S,
            }
            server.stdin.write(f"{json.dumps(job)}\n")
            server.stdin.flush()
            answer = server.stdout.readline()
            assert answer, f"the server of programs has ended, status {server.wait()}"
            return int(answer)

        yield run
        server.stdin.close()


@pytest.mark.timeout(TIMEOUT_S + 20)
@pytest.mark.parametrize(("program", "kind"), RUNS)
def test_program_runs(program: str, kind: str, run_program: RunProgram, tmp_path: Path) -> None:
    status = run_program(PROGRAMS[program], tmp_path, SIMULATED[kind])
    errors = (tmp_path / "stderr").read_text()
    assert status == 0, (tmp_path / "stdout").read_text() + errors
    # Some builds of torch let their profiler say when it starts and stops, and no setting keeps it from that.
    assert [line for line in errors.splitlines() if not line.startswith("USDT:")] == []


FAILING = """
import pytest
import torch

@pytest.mark.parametrize("run", range(2))
def test_fails_with_tensors_in_its_frames(pool, run):
    def task():
        x = torch.ones(2**20, device="cuda")
        try:
            x.view(3)
        except RuntimeError:
            raise ValueError("mine")
    pool.submit(task).result()
"""


@pytest.mark.timeout(TIMEOUT_S + 20)
def test_fixtures_and_tests_of_the_page_on_simulation(tmp_path: Path) -> None:
    """The page's own tests pass, also after one that has failed: pytest keeps its frames, and they hold tensors."""
    files = [block for block in all_blocks("python") if block.title is not None]
    assert {block.page for block in files} == {DOCS / "simulation.md"}, "other projects need a test of their own"
    for block in files:
        (tmp_path / str(block.title)).write_text(block.text, encoding="utf-8")
    (tmp_path / "test_a_failure.py").write_text(FAILING)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")  # or the one of a folder above would count
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short"],
        check=False,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        cwd=tmp_path,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTEST_ADDOPTS": ""},
    )
    summary = run.stdout.splitlines()[-1]
    assert re.fullmatch(r"4 failed, \d+ passed in .*", summary), run.stdout + run.stderr
    assert run.stdout.count("ValueError: mine") >= 4, run.stdout


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_block_is_of_a_kind_that_is_checked(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    found = list(blocks(page))
    assert len(re.findall(r"^\s*(?:```|~~~)", text, re.MULTILINE)) == 2 * len(found), "fences begin in the first column"
    for block in found:
        assert block.language in LANGUAGES, f"{block.place}: expected one of {sorted(LANGUAGES)}"
        is_file = block.language == "python" and block.title is not None
        assert is_file or not block.attributes, f"{block.place}: only files of a project, in Python, have a title"


# -- commands ---------------------------------------------------------------------------------------------------------


def commands(block: Block) -> Iterator[str]:
    """Yield the commands of a block of shell: without comments, and one by one where ``&&`` joins them."""
    for line in block.text.replace("\\\n", " ").splitlines():
        for command in line.partition(" #")[0].split("&&"):
            if command.strip() and not command.startswith("#"):
                yield command.strip()


def extras() -> set[str]:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = text.partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    return set(re.findall(r"^(\w+) = ", section, re.MULTILINE))


def check_command(command: str) -> None:
    """Check what can be told without running it: that files, options, extras and markers are there."""
    words = [word.strip("'\"") for word in command.split()]
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words.pop(0)
    if words[:3] == ["python", "-m", "managed_exec"]:
        _parser().parse_args(words[3:])  # a SystemExit is an option that is not there
    elif words[0] == "python" and words[1].endswith(".py"):
        script = ROOT / words[1]
        source = "".join(path.read_text(encoding="utf-8") for path in (script, *script.parent.glob("options.py")))
        for word in words[2:]:
            option = word.partition("=")[0]
            assert not option.startswith("--") or f'"{option}"' in source, f"{words[1]} has no {option}"
    elif words[0] == "pytest":
        assert words[1:], "all tests are run with '-n auto --dist loadfile'"
        for word in words[1:]:
            assert not word.startswith(("tests", "test_")) or (ROOT / word.partition("::")[0]).exists(), word
    elif words[:2] == ["pip", "install"]:
        for wanted in re.findall(r"\[(.*?)\]", command):
            assert set(wanted.split(",")) <= extras(), command
    else:
        assert command in (
            "python3 -m venv .venv",
            ". .venv/bin/activate",
            "ruff check .",
            "ruff format --check .",
            "mypy",
            "mkdocs build --strict",
            "mkdocs serve",
            ".ci/run",
        ), f"teach check_command to check {command!r}"


@pytest.mark.parametrize("block", all_blocks("sh"), ids=lambda block: block.place)
def test_commands_are_there(block: Block) -> None:
    for command in commands(block):
        check_command(command)


def test_site_is_built_by_the_continuous_integration() -> None:
    ci = ROOT / ".ci" / "run"
    if not ci.exists():
        pytest.skip("a source distribution has no .ci")
    lines = [line.strip() for line in ci.read_text(encoding="utf-8").splitlines()]
    shown = [command for block in blocks(DOCS / "contributing.md", "sh") for command in commands(block)]
    for command in ("pip install -e '.[docs]'", "mkdocs build --strict"):
        assert command in lines
        assert command in shown


# -- links ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    """Of the site, ``mkdocs build --strict`` checks this as well; not of README.md."""
    for link in links(page):
        if re.match(r"https?:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name(page)}: {link}"
        is_generated = target.parent == DOCS / "api"  # its headings are the names of what it describes
        if anchor and not is_generated:
            assert anchor in anchors(target), f"{name(page)}: {link}, expected one of {sorted(anchors(target))}"


def test_every_page_is_in_the_navigation() -> None:
    named = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    pages = [page.relative_to(DOCS).as_posix() for page in PAGES if DOCS in page.parents]
    assert sorted(named) == sorted(pages)


# -- the API ----------------------------------------------------------------------------------------------------------


def test_public_surface_is_described() -> None:
    """Each public name is on a page of docs/api, by itself or as part of its module."""
    import managed_exec
    from managed_exec import scheduling

    described = {
        found
        for page in sorted((DOCS / "api").glob("*.md"))
        for found in re.findall(r"^::: ([\w.]+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    }
    expected = {f"managed_exec.{public}" for public in managed_exec.__all__}
    expected |= {f"managed_exec.scheduling.{public}" for public in scheduling.__all__}
    expected |= {"managed_exec.events", "managed_exec.receipt.Receipt", "managed_exec.sim.faults"}
    assert expected <= described, sorted(expected - described)


def test_readme_is_an_entrance() -> None:
    """Every page but the API's, the changelog and the home page is named in README.md."""
    linked = {link.partition("#")[0] for link in links(README)}
    expected = {f"docs/{page.name}" for page in DOCS.glob("*.md")} - {"docs/index.md", "docs/changelog.md"}
    assert expected <= linked, sorted(expected - linked)
