"""The command line: ``python -m managed_exec devices`` and ``python -m managed_exec top``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from managed_exec.errors import SimulatorUnavailableError
from managed_exec.telemetry import top
from managed_exec.telemetry.inventory import inventory


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that *arguments* give, by default the process's own; return the exit status."""
    options = _parser().parse_args(arguments)
    try:
        status = _devices(options.json) if options.command == "devices" else _top(options.once, options.interval)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader, say head, has seen enough. What is still buffered must not fail once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130  # as a shell counts it; top ends by it, with 0
    return status


def _devices(as_json: bool) -> int:
    try:
        found = inventory()
    except (ValueError, SimulatorUnavailableError) as error:  # of MANAGED_EXEC_SIM
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{json.dumps(found.as_json(), indent=2) if as_json else found}\n")
    return 0


def _top(once: bool, interval_s: float) -> int:
    return top.run(sys.stdout, sys.stderr, once=once, interval_s=interval_s)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m managed_exec", description="What the package sees of this machine."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    devices = commands.add_parser("devices", help="the devices that GPUPoolExecutor() would use, and why not the rest")
    devices.add_argument("--json", action="store_true", help="as JSON, with memory in bytes")
    watch = commands.add_parser("top", help="memory, load and processes of all NVIDIA cards, until Ctrl-C")
    watch.add_argument("--once", action="store_true", help="one reading, then end")
    watch.add_argument("--interval", type=_seconds, default=1.0, metavar="S", help="seconds between readings (1)")
    return parser


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.05 <= seconds <= 86400:
        raise argparse.ArgumentTypeError(f"expected seconds from 0.05 to 86400, got {text!r}")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
