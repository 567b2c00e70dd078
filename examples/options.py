"""The option that all examples have, ``--sim``: run on simulated devices."""

from __future__ import annotations

import argparse

from managed_exec import sim


def parsed(parser: argparse.ArgumentParser, arguments: list[str] | None, example: str) -> argparse.Namespace:
    """Give *parser* the option ``--sim NxSIZE``, read the options, and make the simulated devices asked for, if any.

    What cannot be read ends the program here, with the usual message, and not where the first pool is made.

    Args:
        parser: of the program.
        arguments: None for those of the command line.
        example: a value of ``--sim`` that suits the program.

    Returns:
        The options; ``simulated`` says whether there are simulated devices, by ``--sim`` or else the environment.
    """
    parser.add_argument(
        "--sim", metavar="NxSIZE", help=f"use simulated devices, such as {example}; else MANAGED_EXEC_SIM, else GPUs"
    )
    options = parser.parse_args(arguments)
    try:
        if options.sim:
            devices, _, memory = options.sim.partition("x")
            sim.enable(devices=int(devices), memory=memory)
        options.simulated = bool(options.sim) or sim.enable_from_environment()
    except ValueError as wrong:
        parser.error(f"--sim takes NxSIZE, such as 4x256MiB: {wrong}" if options.sim else str(wrong))
    return options


def positive(text: str) -> int:
    """Read a count, for ``add_argument(type=positive)``."""
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {count}")
    return count
