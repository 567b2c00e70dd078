"""The command line, as a user starts it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import run_python
from nvml_stub import NvmlStub

from managed_exec import __main__ as command_line
from managed_exec.__main__ import main

PAGE = Path(__file__).parents[1] / "docs" / "observing.md"
COMMAND = [sys.executable, "-m", "managed_exec"]
WAIT_S = 90
GIB = 2**30
CARDS = (
    f"card GPU-aaaa1111 {80 * GIB} {30 * GIB} 25",
    f"process 41 {10 * GIB} python train.py",
    f"card GPU-bbbb2222 {80 * GIB} {79 * GIB} 0",
)
SECOND_LINE = "NVIDIA 1  Stub GPU-bbbb  1.0 GiB of 80.0 GiB  busy 0%"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        env={**os.environ, **environment},
    )


@contextmanager
def running(*arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Start the command; it is ended in any case."""
    # A shell that puts the tests into the background has Ctrl-C ignored, by all that they start.
    heed = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.executable, sys.argv[1:])"
    )
    with subprocess.Popen(
        [sys.executable, "-c", heed, *COMMAND, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def read_until(process: subprocess.Popen[str], part: str) -> list[str]:
    """Read lines until one has *part*; return them all."""
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line.rstrip("\n"))
        if part in line:
            return lines
    pytest.fail(f"ended without {part!r} after {lines}; {process.stderr and process.stderr.read()}")


class TestDevices:
    def test_text(self) -> None:
        done = run("devices", MANAGED_EXEC_SIM="2x3MiB")
        assert (done.returncode, done.stderr) == (0, "")
        lines = done.stdout.splitlines()
        assert lines[0] == "GPUPoolExecutor() would use"
        assert lines[1:3] == [f"  sim:{i}  Simulated accelerator {i}  3.0 MiB of 3.0 MiB free" for i in range(2)]
        assert lines[3] == "and would not use"
        assert lines[-1] == "  cpu  used where there is no accelerator, and for devices='cpu'"

    def test_json(self, nvml_library: NvmlStub) -> None:
        nvml_library.describe(*CARDS)
        done = run("devices", "--json", MANAGED_EXEC_SIM="1x3MiB", **nvml_library.environment)
        assert (done.returncode, done.stderr) == (0, "")
        seen = json.loads(done.stdout)
        assert [(item["device"], item["free_bytes"], item["reason"]) for item in seen["used"]] == [
            ("sim:0", 3 * 2**20, None)
        ]
        assert [(item["device"], item["free_bytes"]) for item in seen["not_used"]] == [
            ("NVIDIA 0", 30 * GIB),
            ("NVIDIA 1", 79 * GIB),
            ("cpu", None),
        ]

    def test_environment_that_cannot_be_read(self) -> None:
        done = run("devices", MANAGED_EXEC_SIM="many")
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith("MANAGED_EXEC_SIM: expected")
        assert done.stderr.count("\n") == 1

    def test_interrupted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupted() -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(command_line, "inventory", interrupted)
        assert main(["devices"]) == 130


class TestTop:
    def test_once(self, nvml_library: NvmlStub) -> None:
        nvml_library.describe(*CARDS)
        done = run("top", "--once", **nvml_library.environment)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.splitlines()[1:] == [
            "NVIDIA 0  Stub GPU-aaaa  50.0 GiB of 80.0 GiB  busy 25%",
            "    41  python train.py  10.0 GiB",
            SECOND_LINE,
        ]

    def test_card_lost_in_mid_run_then_ctrl_c(self, nvml_library: NvmlStub) -> None:
        nvml_library.describe(*CARDS)
        with running("top", "--interval", "0.05", **nvml_library.environment) as process:
            read_until(process, SECOND_LINE)
            nvml_library.describe(*CARDS, "fail * GPU-aaaa1111 15")
            read_until(process, "    GPU is lost")
            assert read_until(process, "NVIDIA 1") == [SECOND_LINE]
            nvml_library.describe(*CARDS)
            read_until(process, "    41  python train.py")
            process.send_signal(signal.SIGINT)
            assert process.wait(WAIT_S) == 0
            assert process.stderr is not None
            assert process.stderr.read() == ""

    def test_reader_that_has_seen_enough(self, nvml_library: NvmlStub) -> None:
        nvml_library.describe(*CARDS)
        with running("top", "--interval", "0.05", **nvml_library.environment) as process:
            read_until(process, SECOND_LINE)
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.close()
            assert process.wait(WAIT_S) == 0
            assert process.stderr.read() == ""

    def test_where_there_is_no_nvml(self, nvml_library: NvmlStub) -> None:
        nvml_library.describe("init 9")
        done = run("top", **nvml_library.environment)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith("NVML cannot be read: Driver Not Loaded: load the NVIDIA driver")
        assert done.stderr.count("\n") == 1


class TestArguments:
    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            ([], "required: command"),
            (["tap"], "'tap'"),
            (["top", "--interval", "0"], "expected seconds from 0.05 to 86400, got '0'"),
            (["top", "--interval", "-1"], "expected seconds from 0.05 to 86400, got '-1'"),
            (["top", "--interval", "nan"], "got 'nan'"),
            (["top", "--interval", "soon"], "got 'soon'"),
            (["devices", "--once"], "--once"),
        ],
        ids=" ".join,
    )
    def test_wrong(self, arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
        assert text in capsys.readouterr().err

    def test_the_page_s_commands_are_there(self) -> None:
        commands = re.findall(r"python -m managed_exec ([a-z][\w .-]*)", PAGE.read_text(encoding="utf-8"))
        assert {command.split()[0] for command in commands} == {"devices", "top"}
        for command in commands:
            command_line._parser().parse_args(command.split())


def test_the_package_imports_nothing_of_it() -> None:
    code = (
        "import sys, managed_exec\n"
        "parts = ('__main__', 'telemetry.top', 'telemetry.inventory')\n"
        "print([part for part in parts if f'managed_exec.{part}' in sys.modules], 'rich' in sys.modules)\n"
    )
    done = run_python(code)
    assert done.stdout == "[] False\n", done.stderr
