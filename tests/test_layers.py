"""The package's shape: imports point only downward, files stay short, nothing prints."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "managed_exec"
MAX_LINES = 400

# Top first. A module may import from its own layer and from those below.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("__main__",),
    ("__init__",),
    ("executor",),
    ("config", "scheduling", "streaming", "telemetry"),
    ("managed_context",),
    ("task", "context", "inheritance", "options"),
    ("tensors",),
    ("memory",),
    ("devices",),
    ("sim",),
    ("future",),
    ("errors", "events", "receipt", "sizes"),
)
LEVELS = {part: level for level, parts in enumerate(LAYERS) for part in parts}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def part_of(module: str) -> str:
    """Return the part of the package that *module* is in: ``"devices"`` for ``managed_exec.devices.nvml``."""
    return module.split(".")[1]


def imports(nodes: Iterator[ast.AST]) -> Iterator[str]:
    """Yield every module of the package that *nodes* import, by its full name."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "managed_exec")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            module = str(node.module)
            if module.split(".")[0] != "managed_exec":
                continue
            for alias in node.names:
                submodule = f"{module}.{alias.name}"
                if submodule in MODULES:
                    yield submodule
                else:
                    yield "managed_exec.__init__" if module == "managed_exec" else module


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_downward(module: str) -> None:
    assert part_of(module) in LEVELS, f"{module}: give {part_of(module)} a layer"
    tree = ast.parse(MODULES[module].read_text())
    upward = [name for name in imports(ast.walk(tree)) if LEVELS[part_of(name)] < LEVELS[part_of(module)]]
    assert not upward, f"{module} imports {', '.join(upward)} from a layer above its own"


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    graph = {}
    for module, path in MODULES.items():
        graph[module] = set(imports(iter(ast.parse(path.read_text()).body))) - {module}
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_no_module_is_longer_than_its_reader_s_patience() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines())
        for folder in ("managed_exec", "tests", "examples")
        for path in (ROOT / folder).rglob("*.py")
    }
    assert len(lengths) > 40
    too_long = {name: length for name, length in lengths.items() if length > MAX_LINES}
    assert not too_long, f"over {MAX_LINES} lines: {too_long}"


def test_nothing_is_named_utils() -> None:
    assert not [path for path in PACKAGE.rglob("*") if "util" in path.stem]


@pytest.mark.parametrize("module", MODULES)
def test_nothing_prints(module: str) -> None:
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        called = node.func if isinstance(node, ast.Call) else None
        assert not (isinstance(called, ast.Name) and called.id == "print"), f"{module}:{node.lineno} prints"
