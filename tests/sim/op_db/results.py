"""What is known of one operator after its run."""

from __future__ import annotations

import enum
import json
from dataclasses import asdict, dataclass


class Outcome(str, enum.Enum):
    """How an operator ended; the first five end its child process in an orderly way."""

    PASSED = "passed"
    NOT_APPLICABLE = "not applicable"  # the mode does not concern it, e.g. backward of an operator without one
    FAILED = "failed"  # the device raised where the CPU did not
    WRONG_VALUE = "wrong value"
    HARNESS = "harness error"  # no sample could be made or run on the CPU: says nothing about the device
    CRASHED = "crashed"  # ended by a signal, or left without an answer
    TIMED_OUT = "timed out"


@dataclass(frozen=True)
class Result:
    """The record of one operator under one mode."""

    name: str
    outcome: Outcome
    text: str = ""  # exception, difference or signal; empty when it passed
    samples: int = 0  # compared with the CPU
    skipped: int = 0  # the CPU itself raised
    seconds: float = 0.0
    output: str = ""  # the end of what the child printed, where it did not pass

    def to_json(self) -> str:
        """Return one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Result:
        """Read what ``to_json`` wrote."""
        fields = json.loads(line)
        return cls(**{**fields, "outcome": Outcome(fields["outcome"])})


def counts(results: list[Result]) -> dict[str, int]:
    """Return how many operators had each outcome, in the order of ``Outcome``."""
    return {o.value: n for o in Outcome if (n := sum(r.outcome is o for r in results))}
