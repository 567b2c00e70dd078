"""What the tests of views and bars share: something that says it is a terminal, and a library that is not there."""

from __future__ import annotations

import io
import sys
import threading

import pytest

RICH = ("rich", "rich.console", "rich.live", "rich.table", "rich.text", "rich.progress", "rich.markup")
WAIT_S = 30
SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"


class Screen(io.StringIO):
    """A file that can be waited on. By default it says that it is a terminal."""

    def __init__(self, *, is_terminal: bool = True) -> None:
        super().__init__()
        self._is_terminal = is_terminal
        self._written = threading.Condition()

    def isatty(self) -> bool:
        return self._is_terminal

    def write(self, text: str) -> int:
        with self._written:
            n = super().write(text)
            self._written.notify_all()
        return n

    def wait_for(self, text: str, times: int = 1) -> None:
        """Wait until *text* was written that often."""
        with self._written:
            found = self._written.wait_for(lambda: self.getvalue().count(text) >= times, WAIT_S)
        assert found, f"{text!r} was not written {times} times, but {self.getvalue()!r}"


def stand_in(monkeypatch: pytest.MonkeyPatch, *, is_terminal: bool) -> Screen:
    """Have standard error be a terminal that is wide enough, or a pipe."""
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("TERM", "xterm")
    screen = Screen(is_terminal=is_terminal)
    monkeypatch.setattr(sys, "stderr", screen)
    return screen


def remove(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """Have *modules* look as if they were not installed."""
    for name in modules:
        monkeypatch.setitem(sys.modules, name, None)
