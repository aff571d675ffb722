"""Check the figures of the campaign in the documentation against the file of results."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaign import results

REPOSITORY = Path(__file__).parents[2]
RESULTS = REPOSITORY / "recipes" / "results" / "campaign.json"
PAGE = REPOSITORY / "docs" / "explanation" / "consistency_and_crashes.md"


def test_the_table_is_that_of_the_results() -> None:
    rows = results.read(RESULTS)
    assert (
        results.table(rows)
        in (REPOSITORY / "docs" / "explanation" / "consistency_and_crashes.md").read_text()
    )
    assert not results.problems(rows)
    assert not results.too_few(rows)


def test_a_row_goes_on_where_it_ended() -> None:
    row = {"tried": 3, "seed": 1, "trials": 2, "seconds": 1.5, "cpu_seconds": 1.0, "commit": "a"}
    row |= {"lost": 0, "silent": 0, "error": 1, "hung": 0, "failures": ["x"], "counts": {"y": 1}}
    both = results.continued(row, {**row, "commit": "b"}, 2)
    assert (both["tried"], both["trials"], both["error"], both["seconds"]) == (6, 4, 2, 3.0)
    assert (both["failures"], both["counts"], both["commit"]) == (["x", "x"], {"y": 2}, "a, b")
    for first, before in ((0, row), (2, None), (2, {**row, "seed": 2})):
        assert results.continued(before, row, first) == row


def test_a_page_gets_the_table_between_its_marks(tmp_path: Path) -> None:
    row = {"tried": 1200, "unit": "kills", "lost": 0, "silent": 1, "error": 2, "hung": 3}
    rows = {"kills-thread": {**row, "seconds": 90.0, "failures": []}}
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- campaign -->\nold\n<!-- end of campaign -->\nafter\n")
    results.put_into(page, rows)
    assert "| 1,200 kills | 0 | 1 | 5 | 1.5 |" in page.read_text()
    assert "old" not in page.read_text()
    assert page.read_text().startswith("before\n")
    assert page.read_text().endswith("after\n")
    assert results.too_few(rows) == []
    with pytest.raises(ValueError, match="lacks"):
        results.put_into(Path(__file__).parent / "__init__.py", rows)
