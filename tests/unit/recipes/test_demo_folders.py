"""The demos delete what they wrote before, and nothing else of the folder that they are given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recipes.dlrm_criteo import demo
from recipes.dlrm_criteo.job import JobFailed
from recipes.dlrm_criteo.online_demo import __main__ as online
from recipes.dlrm_criteo.online_demo.run import WRITTEN


@pytest.mark.parametrize(("module", "names"), [(demo, demo.RUNS), (online, WRITTEN)])
def test_other_files_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, names: tuple[str, ...]
) -> None:
    def look(root: Path, *_: object) -> None:
        raise JobFailed(str(sorted(path.name for path in root.iterdir())))

    monkeypatch.setattr(module, "demonstrate", look)
    (tmp_path / "thesis.tex").touch()
    for name in names[1:]:
        (tmp_path / name / "checkpoints").mkdir(parents=True)
    (tmp_path / names[0]).touch()
    monkeypatch.chdir(tmp_path)
    assert module.main(["--runs", "."]) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    assert module.main(["--runs", "new/folder"]) == 1
    assert (tmp_path / "new" / "folder").is_dir()
