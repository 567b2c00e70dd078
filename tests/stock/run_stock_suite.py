"""Run CPython's own tests of ``ThreadPoolExecutor`` with ``GPUPoolExecutor`` in its place.

A program of its own, for the replacement holds for the whole process: ``python run_stock_suite.py DIRECTORY`` where
DIRECTORY holds ``test_concurrent_futures.py`` of the interpreter's version. The last line counts what ran.
"""

from __future__ import annotations

import concurrent.futures
import sys
import unittest
from pathlib import Path

from test.support import script_helper

PRELUDE = """
import sys
sys.path[:0] = {path!r}
import concurrent.futures, test
test.__path__.insert(0, {directory!r})
from managed_exec import GPUPoolExecutor
concurrent.futures.ThreadPoolExecutor = concurrent.futures.GPUPoolExecutor = GPUPoolExecutor
"""


def replace_executor(directory: str) -> None:
    """Put the pool in the standard one's place, here and in the interpreters that the tests start."""
    prelude = PRELUDE.format(path=[entry for entry in sys.path if entry], directory=directory)
    exec(prelude, {})
    assert_python_ok = script_helper.assert_python_ok

    def assert_python_ok_replaced(flag: str, code: str, **environment: str) -> object:
        assert flag == "-c"
        return assert_python_ok(flag, f"exec({prelude!r}, {{}})\n{code}", **environment)

    script_helper.assert_python_ok = assert_python_ok_replaced


def main() -> int:
    directory = str(Path(sys.argv[1]).resolve())
    replace_executor(directory)
    module = __import__("test.test_concurrent_futures", fromlist=["*"])
    assert Path(module.__file__).parent == Path(directory), module.__file__
    assert module.ThreadPoolMixin.executor_type is concurrent.futures.GPUPoolExecutor
    cases = [case for name, case in vars(module).items() if isinstance(case, type) and name.startswith("ThreadPool")]
    loader = unittest.defaultTestLoader
    suite = unittest.TestSuite(
        loader.loadTestsFromTestCase(case) for case in cases if case is not module.ThreadPoolMixin
    )
    outcome = unittest.TextTestRunner(verbosity=2, stream=sys.stdout).run(suite)
    print(f"ran {outcome.testsRun}, not passed {len(outcome.failures) + len(outcome.errors)}")
    return 0 if outcome.wasSuccessful() else 1


if __name__ == "__main__":
    sys.exit(main())
