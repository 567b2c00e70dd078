"""The option that all examples have, ``--sim``: run on simulated devices."""

from __future__ import annotations

import argparse

from managed_exec import sim


def add_sim(parser: argparse.ArgumentParser, example: str) -> None:
    """Give *parser* the option ``--sim NxSIZE``; *example* is one that suits the program."""
    parser.add_argument(
        "--sim", metavar="NxSIZE", help=f"use simulated devices, such as {example}; else MANAGED_EXEC_SIM, else GPUs"
    )


def enable_sim(parser: argparse.ArgumentParser, options: argparse.Namespace) -> bool:
    """Make the simulated devices that ``--sim``, or else the environment, asks for; return whether there are any.

    What cannot be read ends the program here, with the usual message, and not where the first pool is made.
    """
    try:
        if options.sim:
            devices, _, memory = options.sim.partition("x")
            sim.enable(devices=int(devices), memory=memory)
            return True
        return sim.enable_from_environment()
    except ValueError as wrong:
        parser.error(f"--sim takes NxSIZE, such as 4x256MiB: {wrong}" if options.sim else str(wrong))


def positive(text: str) -> int:
    """Read a count, for ``add_argument(type=positive)``."""
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {count}")
    return count
