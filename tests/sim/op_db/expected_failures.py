"""Operators that are known not to pass, and why; the only place where a failure is excused.

By mode, then by the entry's full name (with its variant). An entry that passes must not be listed, an operator that
gives a wrong value or ends its process must not be listed either: those are defects of the device.
"""

from __future__ import annotations

EXPECTED_FAILURES: dict[str, dict[str, str]] = {
    "forward": {},
    "backward": {},
}
