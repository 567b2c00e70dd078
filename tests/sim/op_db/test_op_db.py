"""The simulator runs PyTorch's operator database as the CPU does, forward and backward."""

from __future__ import annotations

import faulthandler

import pytest

from .conformance import complaints, figures, run_op_db
from .expected_failures import EXPECTED_FAILURES
from .results import Outcome

AT_LEAST_PASS = {"forward": 660, "backward": 520}  # of 672, and of the 540 that have a float32 backward


@pytest.mark.timeout(1000)  # about a minute; more on a loaded machine and where the simulator has to be built
@pytest.mark.parametrize("mode", ["forward", "backward"])
def test_operators_agree_with_the_cpu(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    faulthandler.cancel_dump_traceback_later()  # pyproject's is for hangs; here every operator has a limit of its own
    results = run_op_db("sim", mode)
    with capsys.disabled():
        print(f"\n{mode} on sim: {figures(results)}")
    wrong = complaints(results, EXPECTED_FAILURES[mode])
    assert not wrong, "\n".join(wrong)
    assert sum(r.outcome is Outcome.PASSED for r in results) >= AT_LEAST_PASS[mode]
