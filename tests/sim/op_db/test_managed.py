"""PyTorch's operator database on managed tensors: the CPU's values, wherever the operands are. For ``-m slow``."""

from __future__ import annotations

import faulthandler

import pytest

from .conformance import complaints, figures, run_op_db
from .results import Outcome

# Of 672, and of the 540 that have a float32 backward.
AT_LEAST_PASS = {
    "managed": 655,
    "spilled": 655,
    "spilled-backward": 525,
    "partly-managed": 525,
    "split": 640,
    "first-tries": 655,
}


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("mode", AT_LEAST_PASS)
def test_managed_operators_agree_with_the_cpu(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    faulthandler.cancel_dump_traceback_later()  # pyproject's is for hangs; here every operator has a limit of its own
    results = run_op_db("sim", mode)
    with capsys.disabled():
        print(f"\n{mode} on sim: {figures(results)}")
    wrong = complaints(results, {})
    assert not wrong, "\n".join(wrong)
    assert sum(r.outcome is Outcome.PASSED for r in results) >= AT_LEAST_PASS[mode]
