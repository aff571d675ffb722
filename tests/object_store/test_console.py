"""Run the console tool on S3: every command that takes a root."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.object_store.test_s3 import fill, is_restored
from tests.unit.chains import TABLE
from tests.unit.console import Console
from torchrec_checknrun.root.checkpoints import committed
from torchrec_checknrun.store.folder import Folder


@pytest.fixture
def console(capsys: pytest.CaptureFixture[str]) -> Console:
    return Console(capsys)


def test_every_command(bucket: str, console: Console, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="report draws with matplotlib")
    url, page = f"{bucket}/team/run", tmp_path / "page.html"
    head = fill(Folder(url))
    ids = committed(Folder(url))
    assert [found["id"] for found in console.json("ls", url)["checkpoints"]] == ids
    assert console.json("show", url)["id"] == head.id
    assert console.json("verify", url)["sound"]
    changed = console.json("diff", url, ids[-1], head.id)["tables"]
    assert [table["changed_rows"] for table in changed] == [4]
    rows = console.json("cat", url, "--table", TABLE, "--rows", "1,5,9")["rows"]
    assert [row["row"] for row in rows] == [1, 5, 9]
    assert console.run("export", url, f"{bucket}/plain").code == 0
    assert ".metadata" in Folder(f"{bucket}/plain").names()
    assert console.run("report", url, "--out", page).code == 0
    assert page.stat().st_size
    compacted = console.json("compact", url)["compacted"]["id"]
    assert is_restored(Folder(url), compacted)
    assert console.run("pin", url, ids[-1]).code == 0
    planned = console.json("prune", url, "--keep", 1, "--dry-run")
    assert console.json("prune", url, "--keep", 1) == {**planned, "dry_run": False}
    assert committed(Folder(url)) == [compacted, ids[-1]]
    assert is_restored(Folder(url), compacted)


def test_a_missing_bucket_is_one_error_line(bucket: str, console: Console) -> None:
    result = console.run("ls", f"{bucket}-none")
    assert result.code == 2
    assert "\n" not in result.err.strip()
    assert f"{bucket}-none" in result.err
