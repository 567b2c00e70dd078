"""The runner counts what goes wrong in a child, and goes on; the table cannot rot."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from .conformance import complaints, run_op_db
from .results import Outcome, Result, counts

FAULTY = f"{__package__}.faulty_mode:Faulty"


@pytest.fixture(scope="module")
def by_name() -> dict[str, Result]:
    only = ["abs", "exp", "sin", "cos", "tan", "neg", "add", "empty", "rand_like"]
    return {r.name: r for r in run_op_db("cpu", FAULTY, only=only, limit_s=3.0)}


@pytest.mark.parametrize(
    ("name", "outcome", "text"),
    [
        ("abs", Outcome.CRASHED, "SIGSEGV"),
        ("exp", Outcome.CRASHED, "no answer"),
        ("sin", Outcome.TIMED_OUT, "3 s"),
        ("cos", Outcome.FAILED, "NotImplementedError: no cosine here"),
        ("tan", Outcome.WRONG_VALUE, "not close"),
        ("neg", Outcome.NOT_APPLICABLE, ""),
        ("add", Outcome.PASSED, ""),
        ("empty", Outcome.PASSED, ""),
        ("rand_like", Outcome.PASSED, ""),
    ],
)
def test_outcome(by_name: dict[str, Result], name: str, outcome: Outcome, text: str) -> None:
    result = by_name[name]
    assert result.outcome is outcome, result
    assert text in result.text
    assert Result.from_json(result.to_json()) == result


def test_what_a_child_printed_is_kept_with_the_sample_and_the_stack(by_name: dict[str, Result]) -> None:
    assert "sample 0 of" in by_name["abs"].output
    assert "Segmentation fault" in by_name["abs"].output
    assert "in run" in by_name["sin"].output
    assert by_name["add"].output == ""


def test_a_parent_with_a_second_thread_is_refused() -> None:
    if sys.platform != "linux":
        pytest.skip("threads are counted in /proc")
    with pytest.raises(RuntimeError, match="2 threads, expected 1"):
        run_op_db("cpu", FAULTY.replace("Faulty", "LeavesThread"), only=["add"])


def test_complaints() -> None:
    ran = [
        Result("good", Outcome.PASSED),
        Result("known", Outcome.FAILED, "boom"),
        Result("new", Outcome.FAILED, "boom"),
        Result("bad", Outcome.WRONG_VALUE, "3 instead of 4"),
    ]
    assert counts(ran) == {"passed": 1, "failed": 2, "wrong value": 1}
    found = complaints(
        ran, {"known": "no such kernel", "good": "was broken once", "bad": "excused?", "gone": "renamed"}
    )
    assert [line.split(":")[0] for line in found] == ["new", "bad", "good", "gone"]
    assert complaints(ran[:2], {"known": "no such kernel"}) == []


def test_every_module_is_described() -> None:
    folder = Path(__file__).parent
    described = (folder / "__init__.py").read_text()
    modules = {p.name for p in folder.glob("*.py")} - {"__init__.py", "__main__.py"}
    assert [m for m in modules if m not in described and not m.startswith("test_") and m != "faulty_mode.py"] == []
