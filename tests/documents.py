"""README.md and the pages of docs/ as the tests read them: blocks of code, links, headings."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
CI = ROOT / ".ci" / "run"
PAGES = (README, ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md")))

_FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_TITLE = re.compile(r'title="([^"]+)"')


class Block(NamedTuple):
    """A fenced block of a page."""

    page: Path
    line: int  # of its first line
    language: str
    attributes: str  # what else is behind the fence
    text: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT).with_suffix('')}, line {self.line}"

    @property
    def title(self) -> str | None:
        """The file that it is, of a block that is no program by itself."""
        match = _TITLE.fullmatch(self.attributes)
        return match[1] if match else None


def blocks(page: Path, language: str | None = None) -> Iterator[Block]:
    """Yield the blocks of *page*, of one language or of all."""
    text = page.read_text(encoding="utf-8")
    for match in _FENCE.finditer(text):
        name, _, attributes = match[1].partition(" ")
        if language in (None, name):
            yield Block(page, text.count("\n", 0, match.start(2)) + 1, name, attributes.strip(), match[2])


def all_blocks(language: str | None = None) -> list[Block]:
    return [block for page in PAGES for block in blocks(page, language)]


def prose(page: Path) -> str:
    """Return the page without its blocks and code spans."""
    return re.sub(r"`[^`\n]+`", "", _FENCE.sub("", page.read_text(encoding="utf-8")))


def links(page: Path) -> list[str]:
    """Return the targets of the page's links and images."""
    return re.findall(r"\]\(([^)\s]+)\)", prose(page))


def anchors(page: Path) -> set[str]:
    """Return the names of the page's headings, as GitHub and the site make them of their texts."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", _FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE):
        text = unicodedata.normalize("NFKD", heading).replace("`", "").lower()
        found.add(re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", text).strip()))
    return found


def after_the_change(diff: str) -> str:
    """Return the program that a diff of all its lines ends in."""
    return "\n".join(line[1:] for line in diff.splitlines() if not line.startswith("-"))
