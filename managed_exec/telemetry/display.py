"""Where something that changes is shown: in place on a terminal or in a notebook's cell, else as lines, one by one.

rich draws, where it is installed. Without it a terminal gets lines too, and a cell is rewritten with them.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TextIO

from managed_exec.sizes import format_bytes


class Page(NamedTuple):
    """What is to be seen at one time."""

    plain: str  # lines, the last one ended
    drawn: Callable[[], Any]  # makes the same for rich; called only where that is installed


class Display(Protocol):
    """A place to show pages."""

    redraws: bool  # whether a page takes the place of the one before

    def show(self, page: Page) -> None: ...

    def close(self) -> None:
        """Leave the last page as it is, and the terminal as it was."""


def open_display(out: TextIO | None = None) -> Display:
    """Return a display on *out*; None is for the notebook's cell, or standard error where there is no notebook."""
    if out is None:
        if _is_in_notebook():
            return _Cell()
        out = sys.stderr
    if out is not None and is_terminal(out) and importlib.util.find_spec("rich") is not None:
        return _Terminal(out)
    return _Lines(out)


def used_text(used_bytes: int | None, total_bytes: int | None) -> str:
    """Return used and usable memory as people read it."""
    if used_bytes is None or total_bytes is None:
        return "-"
    return f"{format_bytes(used_bytes)} of {format_bytes(total_bytes)}"


def busy_text(utilization: float | None) -> str:
    """Return a share of time as people read it."""
    return "-" if utilization is None else f"{utilization:.0%}"


def table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], caption: str | None = None) -> Any:
    """Return a table of rich's. Texts go in as text, not as its markup."""
    from rich.table import Table
    from rich.text import Text

    drawn = Table(title=Text(title), caption=None if caption is None else Text(caption))
    for heading in headings:
        drawn.add_column(heading)
    for row in rows:
        drawn.add_row(*map(Text, row))
    return drawn


class _Lines:
    redraws = False

    def __init__(self, out: TextIO | None) -> None:
        self._out = out  # None: there is no standard error

    def show(self, page: Page) -> None:
        if self._out is not None:
            self._out.write(page.plain)
            self._out.flush()

    def close(self) -> None:
        """Do nothing: there is nothing to restore."""


class _Terminal:
    redraws = True

    def __init__(self, out: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        # What the program prints meanwhile appears above, but goes where it is sent: not to *out* if that is a file.
        self._live = Live(
            console=Console(file=out),
            auto_refresh=False,  # by itself it would take a thread
            redirect_stdout=is_terminal(sys.stdout),
            redirect_stderr=is_terminal(sys.stderr),
        )
        self._live.start()

    def show(self, page: Page) -> None:
        self._live.update(page.drawn(), refresh=True)

    def close(self) -> None:
        self._live.stop()


class _Cell:
    """The output of the notebook's cell that was run when it was made."""

    redraws = True

    def __init__(self) -> None:
        from IPython.display import display

        self._handle = display({"text/plain": ""}, raw=True, display_id=True)
        self._draws = importlib.util.find_spec("rich") is not None

    def show(self, page: Page) -> None:
        bundle = {"text/plain": page.plain}
        if self._draws:
            bundle = page.drawn()._repr_mimebundle_(include=(), exclude=())
        self._handle.update(bundle, raw=True)

    def close(self) -> None:
        """Do nothing: the cell keeps the last page."""


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether *stream* is a terminal. Not all that stands for a stream can say so, and a closed one does not."""
    try:
        return stream is not None and stream.isatty()
    except (AttributeError, ValueError):
        return False


def _is_in_notebook() -> bool:
    """Return whether this process serves a notebook, or another front end that shows more than text."""
    ipython: Any = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None
