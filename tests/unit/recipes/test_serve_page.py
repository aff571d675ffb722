"""Look at the server's page in a browser while versions come and questions are asked."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.scripting import SCRIPTS
from tests.unit.recipes.asked import Server, some, train

browser = pytest.importorskip("tests.unit.recipes.browser", exc_type=ImportError)

pytestmark = [
    SCRIPTS,  # the server does
    pytest.mark.browser,
    pytest.mark.skipif(
        browser.program() is None,
        reason="no chromium is installed: apt-get install chromium",
    ),
]


@pytest.mark.timeout(900)
def test_the_page_shows_version_lag_and_rate_live(tmp_path: Path) -> None:
    trained, root = tmp_path / "trained", tmp_path / "root"
    assert train(trained, 4) == 4
    first, second = sorted((trained / "checkpoints").glob("seq-*"))
    root.mkdir()
    with Server(root) as server, browser.Browser(f"http://127.0.0.1:{server.port}/") as page:
        page.wait_until(lambda: "no version is served yet" in page.texts("error")[0])
        assert page.texts("id", "step") == ["none yet", "–"]

        shutil.copytree(first, root / first.name)
        page.wait_until(lambda: page.texts("id") == [first.name])
        page.wait_until(lambda: page.texts("step", "error") == ["2", ""])
        lag, steps, rows = page.texts("lag", "lag-steps", "rows")
        assert lag.endswith(" s")
        assert float(lag.removesuffix(" s")) < 60
        assert steps == "0 steps"
        assert "rows (all)" in rows

        def asks() -> bool:
            server.predict(some(50))
            rate, answers = page.texts("rate", "answers")
            return rate not in ("–", "0") and answers.endswith("ms an answer")

        page.wait_until(asks)
        page.wait_until(lambda: page.texts("rate", "answers") == ["0", "no questions"])

        shutil.copytree(second, root / second.name)
        page.wait_until(lambda: page.texts("id", "step") == [second.name, "4"])
        assert "rows that changed" in page.texts("rows")[0]
        for name in ("step", "lag", "rate"):
            line = f"document.querySelector('#{name}-line polyline').getAttribute('points')"
            assert len(page.value(line).split()) >= 2
        picture = tmp_path / "page.png"
        page.picture(picture)
        assert picture.read_bytes().startswith(b"\x89PNG")

        server.process.kill()
        page.wait_until(lambda: "the server doesn't answer" in page.texts("error")[0])
