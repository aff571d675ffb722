"""Parse the fenced blocks of the pages, and the comments about running them.

A block of ``python``, ``bash``, ``console`` or ``yaml`` is run, unless a comment stands before it:

    <!-- run by tests/crash/test_demo.py::on_synthetic_rows -->
    <!-- long: 40 minutes; 2026-11-22: 11 of 15 targets met -->

The first names the test that runs the same; the second says how long the block takes, when it was
run last and what came out.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    *sorted(str(page.relative_to(REPOSITORY)) for page in REPOSITORY.glob("docs/**/*.md")),
)
LANGUAGES = ("python", "bash", "console", "yaml")

_FENCE = re.compile(
    r"(?:^ *<!-- (?P<note>[^\n]*?) -->\n\n?)?^(?P<indent> *)```(?P<language>\w+)[^\n]*\n"
    r"(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
_RUN_BY = re.compile(r"run by tests/([\w/]+\.py)::(\w+)")
_LONG = re.compile(r"long: ([^;]+); (\d{4}-\d\d-\d\d): (.+)")


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        run_by: path below ``tests`` and name of the test that runs the block; None if run here.
        long: whether the block takes too long for any test.
    """

    page: str
    line: int
    language: str
    text: str
    run_by: tuple[str, str] | None = None
    long: bool = False

    @property
    def commands(self) -> list[list[str]]:
        """Return the command lines of a shell's block, each split into words."""
        if self.language == "console":
            lines = re.findall(r"^\$ (.*)$", self.text, re.MULTILINE)
        else:
            lines = self.text.replace("\\\n", " ").splitlines()
        return [words for line in lines if (words := shlex.split(line, comments=True))]

    @property
    def size(self) -> int:
        """Return the number of commands in the block; 1 for other languages."""
        return len(self.commands) if self.language in ("bash", "console") else 1


def blocks_of(page: str) -> list[Block]:
    """Return a page's blocks in their order.

    Raises:
        ValueError: a comment before a block says neither of the two.
    """
    content = (REPOSITORY / page).read_text()
    found = []
    for match in _FENCE.finditer(content):
        language = match["language"]
        if language not in LANGUAGES:
            continue
        line = content.count("\n", 0, match.start("language")) + 1
        note, run_by, long = match["note"], None, False
        if note is not None:
            named, told = _RUN_BY.fullmatch(note), _LONG.fullmatch(note)
            if named is None and told is None:
                raise ValueError(f"{page}:{line}: {note!r} is neither 'run by' nor 'long'")
            run_by = (named[1], named[2]) if named else None
            long = told is not None
        indent = len(match["indent"])
        text = "".join(row[indent:] + "\n" for row in match["text"].splitlines())
        found.append(Block(page, line, language, text, run_by, long))
    return found
