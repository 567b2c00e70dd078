"""What ``top`` shows of a machine that the stub describes."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable

import pytest
from nvml_stub import NvmlStub

from managed_exec.telemetry import top

GIB = 2**30
CARDS = (
    f"card GPU-aaaa1111 {80 * GIB} {30 * GIB} 25",
    f"process 41 {10 * GIB} small",
    f"process 42 {40 * GIB} [red]python \x1b[2J train.py",
    "process 43 - unknown",
    f"card GPU-bbbb2222 {80 * GIB} {80 * GIB} 0",
)
CLOCK = re.compile(r"^\d\d:\d\d:\d\d$")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(out: io.StringIO | None = None, *, status: int = 0) -> str:
    """Return what one reading shows; the time of day is cut off."""
    out, err = out or io.StringIO(), io.StringIO()
    assert top.run(out, err, once=True, interval_s=1) == status
    assert (err.getvalue() == "") == (status == 0)
    return out.getvalue() or err.getvalue()


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Called with functions: between readings one after the other is called, and in the end Ctrl-C pressed."""

    def during(*steps: Callable[[], None]) -> None:
        left = list(steps)

        def sleep(seconds: float) -> None:
            assert seconds == 7
            if not left:
                raise KeyboardInterrupt
            left.pop(0)()

        monkeypatch.setattr(top.time, "sleep", sleep)

    return during


class TestPlain:
    def test_cards_and_processes(self, nvml_stub: NvmlStub) -> None:
        """The largest process first; nothing of its name reaches the terminal as a command."""
        nvml_stub.describe(*CARDS)
        time_of_day, *lines = shown().splitlines()
        assert CLOCK.match(time_of_day)
        assert lines == [
            "NVIDIA 0  Stub GPU-aaaa  50.0 GiB of 80.0 GiB  busy 25%",
            "    42  [red]python ?[2J train.py  40.0 GiB",
            "    41  small  10.0 GiB",
            "    43  unknown  -",
            "NVIDIA 1  Stub GPU-bbbb  0 B of 80.0 GiB  busy 0%",
        ]

    def test_instances(self, nvml_stub: NvmlStub) -> None:
        """The processes of a card in MIG mode are shown with its instances alone."""
        nvml_stub.describe(
            "card GPU-aaaa1111 1000 900 0 mig",
            "process 41 50 worker",
            "instance MIG-dddd4444 1 0 400 350",
            "process 41 50 worker",
        )
        assert shown().splitlines()[1:] == [
            "NVIDIA 0  Stub GPU-aaaa  100 B of 1000 B  busy 0%",
            "NVIDIA 0 MIG 1/0  Stub GPU-aaaa  50 B of 400 B  busy -",
            "    41  worker  50 B",
            "    utilization: Not Supported",
        ]

    def test_what_cannot_be_read(self, nvml_stub: NvmlStub) -> None:
        nvml_stub.describe(
            *CARDS,
            "fail nvmlDeviceGetMemoryInfo GPU-bbbb2222 4",
            "fail nvmlDeviceGetMigMode GPU-bbbb2222 4",
            "fail * GPU-aaaa1111 15",
        )
        reason = "Insufficient Permissions: only some users of this machine may read that"
        assert shown().splitlines()[1:] == [
            "NVIDIA 0  -  -  busy -",
            "    GPU is lost: it no longer answers on its bus; reset it or reboot",
            "NVIDIA 1  Stub GPU-bbbb  -  busy 0%",
            f"    memory: {reason}",
            f"    MIG: {reason}",
        ]

    def test_nothing_to_show(self, nvml_stub: NvmlStub) -> None:
        assert shown(status=1) == "NVML lists no card\n"
        nvml_stub.describe(*CARDS, "fail nvmlDeviceGetCount * 999")
        assert shown(status=1) == "NVML cannot be read: Unknown Error\n"

    def test_no_nvml(self, nvml_stub: NvmlStub) -> None:
        nvml_stub.describe("init 9")
        assert shown(status=1).startswith("NVML cannot be read: Driver Not Loaded: load the NVIDIA driver")


class TestAgainAndAgain:
    def test_until_interrupted(self, nvml_stub: NvmlStub, interrupt: Callable[..., None]) -> None:
        """A card that is lost says so and the other goes on; so do all, when NVML itself fails and comes back."""
        out, err = io.StringIO(), io.StringIO()
        nvml_stub.describe(*CARDS)
        interrupt(
            lambda: nvml_stub.describe(*CARDS, "fail * GPU-aaaa1111 15"),
            lambda: nvml_stub.describe(*CARDS, "fail nvmlDeviceGetCount * 999"),
            lambda: nvml_stub.describe(*CARDS),
        )
        assert top.run(out, err, once=False, interval_s=7) == 0
        assert err.getvalue() == ""
        readings = re.split(r"^\d\d:\d\d:\d\d\n", out.getvalue(), flags=re.MULTILINE)[1:]
        assert len(readings) == 4
        assert readings[0] == readings[3]
        assert "GPU is lost" in readings[1]
        assert readings[1].endswith(readings[0].splitlines(keepends=True)[-1]), "the second card's line"
        assert readings[2] == "NVML cannot be read: Unknown Error\n"

    @pytest.mark.parametrize("terminal", [False, True])
    def test_interrupted_at_once(self, nvml_stub: NvmlStub, interrupt: Callable[..., None], terminal: bool) -> None:
        nvml_stub.describe(*CARDS)
        interrupt()
        out, err = Terminal() if terminal else io.StringIO(), io.StringIO()
        assert top.run(out, err, once=False, interval_s=7) == 0
        assert "50.0 GiB of 80.0 GiB" in out.getvalue()
        assert err.getvalue() == ""

    def test_interrupted_in_a_reading(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupted() -> top.Snapshot:
            raise KeyboardInterrupt

        monkeypatch.setattr(top, "snapshot", interrupted)
        assert top.run(io.StringIO(), io.StringIO(), once=False, interval_s=7) == 0


class TestTerminal:
    def test_plain_lines_without_rich(self, nvml_stub: NvmlStub, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("rich", "rich.console", "rich.live"):
            monkeypatch.setitem(sys.modules, name, None)
        nvml_stub.describe(*CARDS)
        assert shown(Terminal()).splitlines()[1:] == shown().splitlines()[1:]

    def test_table_with_rich(self, nvml_stub: NvmlStub, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("rich", reason="rich, the extra ui, is not installed")
        monkeypatch.setenv("COLUMNS", "120")
        monkeypatch.setenv("TERM", "xterm")
        nvml_stub.describe(*CARDS, "fail nvmlDeviceGetMemoryInfo GPU-bbbb2222 4")
        text = shown(Terminal())
        for part in ("device", "NVIDIA 0", "50.0 GiB of 80.0 GiB", "25%", "42  [red]python ?[2J train.py  40.0 GiB"):
            assert part in text
        assert "memory: Insufficient Permissions" in text
        assert "\x1b[2J" not in text

    def test_table_with_rich_when_nvml_fails_later(
        self, nvml_stub: NvmlStub, interrupt: Callable[..., None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pytest.importorskip("rich", reason="rich, the extra ui, is not installed")
        monkeypatch.setenv("COLUMNS", "120")
        nvml_stub.describe(*CARDS)
        interrupt(lambda: nvml_stub.describe("fail nvmlDeviceGetCount * 999"))
        out = Terminal()
        assert top.run(out, io.StringIO(), once=False, interval_s=7) == 0
        assert "NVML cannot be read: Unknown Error" in out.getvalue()
