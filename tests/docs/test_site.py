"""Build the site without warnings and external resources; check its links."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import PAGES, REPOSITORY

PICTURES = REPOSITORY / "docs" / "pictures"
LOADED = re.compile(r"""<(?:script|img|iframe|source)[^>]*\ssrc=["']?(?:https?:)?//|@import""")
LINKED = re.compile(r"""<link[^>]*\srel=["']?(?:stylesheet|preconnect|preload)[^>]*//""")


def anchors(page: Path) -> set[str]:
    """Return the link targets of a Markdown page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings(page: str) -> None:
    text = re.sub(r"```.*?```", "", (REPOSITORY / page).read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?:", target):
            continue
        name, _, anchor = target.partition("#")
        if name.startswith("examples/") and not (REPOSITORY / "examples").exists():
            continue
        path = (REPOSITORY / page).parent / name if name else REPOSITORY / page
        assert path.exists(), f"{page}: {target}"
        if anchor and not anchor.startswith("torchrec_checknrun"):
            assert anchor in anchors(path), f"{page}: {target}"


def test_the_readme_is_one_page() -> None:
    assert len((REPOSITORY / "README.md").read_text().splitlines()) <= 150


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="the extra docs is missing")
def test_the_site_builds_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir"]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        [*command, str(tmp_path)],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > len([page for page in PAGES if page.startswith("docs/")])
    for page in pages:
        text = page.read_text()
        assert not LOADED.search(text), page
        assert not LINKED.search(text), page
        assert 'class="mermaid' not in text, f"{page}: the theme would fetch mermaid's script"
    for sheet in tmp_path.rglob("*.css"):
        assert not re.search(r"url\([\"']?(?:https?:)?//|@import", sheet.read_text()), sheet


def test_pictures_are_those_that_the_script_draws() -> None:
    script = runpy.run_path(str(PICTURES / "draw.py"))
    for name, (title, lanes) in script["PICTURES"].items():
        assert (PICTURES / name).read_text() == script["draw"](title, lanes)
        for lane in lanes:
            for box in lane.boxes:
                assert (REPOSITORY / "torchrec_checknrun" / box.file).is_file(), box.file
