"""Run the operator database by hand: ``python -m tests.sim.op_db --device sim --mode forward --only add``."""

from __future__ import annotations

import argparse
import os
import sys
import time

# Read when a process starts. OMP and the BLAS: the process that forks must not own a thread pool. The allocators: with
# large pages a fork of this parent (300 MB) costs 8 ms instead of 32 ms, and the whole run a third of the time.
STARTED_WITH = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "PYTHONMALLOC": "malloc",
}


def main() -> int:
    """Print what did not pass, and the figures; return 0 if everything passed."""
    parser = argparse.ArgumentParser(prog="op_db", description=__doc__)
    parser.add_argument("--device", default="sim", help="sim, cpu, cuda, ...: one of torch's device types")
    parser.add_argument("--mode", default="forward", help="forward, backward or package.module:Class")
    parser.add_argument("--only", action="append", metavar="NAME", help="run this operator; may be repeated")
    parser.add_argument("--jobs", type=int, default=2, help="children at a time")
    parser.add_argument("--limit", type=float, default=30.0, metavar="SECONDS", help="of one operator")
    parser.add_argument("--output", action="store_true", help="show what failing operators printed, with their stacks")
    parser.add_argument("--records", metavar="FILE", help="write a JSON line for each operator")
    parser.add_argument("--slowest", type=int, default=0, metavar="N", help="list the N slowest operators")
    options = parser.parse_args()

    if any(os.environ.get(name) != value for name, value in STARTED_WITH.items()):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **STARTED_WITH})
    for name in ("GLIBC_TUNABLES", "PYTHONMALLOC"):
        del os.environ[name]  # the compiler that builds the simulator is not meant
    started = time.monotonic()
    from .entries import entries
    from .modes import find_mode
    from .results import Outcome, Result, counts
    from .runner import run_all

    chosen = entries()
    if options.only:
        unknown = set(options.only) - {op.full_name for op in chosen} - {op.name for op in chosen}
        if unknown:
            parser.error(f"no such operator: {', '.join(sorted(unknown))}")
        chosen = [op for op in chosen if {op.name, op.full_name} & set(options.only)]
    mode = find_mode(options.mode)
    mode.prepare(options.device)
    ready = time.monotonic()

    def show(result: Result) -> None:
        if result.outcome not in (Outcome.PASSED, Outcome.NOT_APPLICABLE):
            print(f"{result.name}: {result.outcome.value}: {result.text}", flush=True)
            if options.output or options.only:
                print("    " + result.output.replace("\n", "\n    "), flush=True)

    results = run_all(chosen, mode, jobs=options.jobs, limit_s=options.limit, on_result=show)
    if options.records:
        with open(options.records, "w") as file:
            file.writelines(result.to_json() + "\n" for result in results)
    for result in sorted(results, key=lambda r: -r.seconds)[: options.slowest]:
        print(f"{result.seconds:6.1f} s  {result.samples:4} samples  {result.name}")
    print(
        f"{options.mode} on {options.device}: {counts(results)}, {sum(r.samples for r in results)} samples compared, "
        f"{sum(r.skipped for r in results)} skipped; {ready - started:.1f} s to start, "
        f"{time.monotonic() - ready:.1f} s to run"
    )
    return int(any(r.outcome not in (Outcome.PASSED, Outcome.NOT_APPLICABLE) for r in results))


if __name__ == "__main__":
    sys.exit(main())
