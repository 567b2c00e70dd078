"""CPython's own tests for thread pools pass with ``GPUPoolExecutor`` in the place of ``ThreadPoolExecutor``."""

from __future__ import annotations

import faulthandler
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

PACKAGE = "libpython3.11-testsuite"
SUITE = Path("usr/lib/python3.11/test")


@pytest.fixture(scope="module")
def suite_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fetch Debian's copy of the tests; skip, saying why, where it cannot be had."""
    if sys.version_info[:2] != (3, 11):
        pytest.skip(
            f"{PACKAGE} has the tests of Python 3.11, this is {sys.version_info.major}.{sys.version_info.minor}"
        )
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        pytest.skip(f"{PACKAGE} is fetched with apt-get, and there is none here")
    directory = tmp_path_factory.mktemp("stock")
    fetched = _apt_get(directory, "download", PACKAGE)
    if fetched.returncode != 0:  # a fresh machine has no package lists yet
        _apt_get(directory, "update")
        fetched = _apt_get(directory, "download", PACKAGE)
    packages = list(directory.glob("*.deb"))
    if fetched.returncode != 0 or not packages:
        pytest.skip(f"apt-get could not fetch {PACKAGE}: {fetched.stderr.strip()[-300:]}")
    subprocess.run(["dpkg-deb", "-x", packages[0], directory], check=True)
    # The module alone: the package's other files would shadow the interpreter's own test.support.
    alone = directory / "alone"
    alone.mkdir()
    shutil.copy(directory / SUITE / "test_concurrent_futures.py", alone)
    return alone


SIMULATED = {"cpu": None, "sim": "3x64MiB"}


@pytest.fixture(scope="module")
def runs(suite_directory: Path) -> dict[str, subprocess.CompletedProcess[str]]:
    """Run the suite with and without simulated devices, side by side: it mostly waits."""
    faulthandler.cancel_dump_traceback_later()  # pyproject's is for hangs; the programs have a limit of their own
    with ThreadPoolExecutor() as pool:
        return dict(zip(SIMULATED, pool.map(partial(run_suite, suite_directory), SIMULATED.values()), strict=True))


def run_suite(directory: Path, simulated: str | None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "MANAGED_EXEC_SIM"}
    if simulated is not None:
        environment["MANAGED_EXEC_SIM"] = simulated
    script = Path(__file__).with_name("run_stock_suite.py")
    return subprocess.run(
        [sys.executable, script, directory],
        capture_output=True,
        check=False,
        text=True,
        timeout=580,
        env=environment,
    )


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", SIMULATED)
def test_stock_thread_pool_tests_pass(runs: dict[str, subprocess.CompletedProcess[str]], kind: str) -> None:
    run = runs[kind]
    counted = re.search(r"^ran (\d+), not passed (\d+)$", run.stdout, re.MULTILINE)
    assert counted is not None, run.stdout[-3000:] + run.stderr[-3000:]
    print(counted[0])
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-3000:]
    assert int(counted[1]) >= 44, "the suite lost its tests"
    assert int(counted[2]) == 0


def _apt_get(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["apt-get", "-q", *arguments], cwd=directory, capture_output=True, check=False, text=True, timeout=120
    )
