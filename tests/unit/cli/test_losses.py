"""Check that the losses of partial recoveries are told of each checkpoint that came after."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.chains import DIM, Part, write
from tests.unit.console import Console
from torchrec_checknrun.format.losses import Loss
from torchrec_checknrun.root.report import Progress, checkpoint_report
from torchrec_checknrun.store.folder import Folder

LOSSES = (Loss(1, 4, 7, 4, 100), Loss(2, 8, 12, 4, 100))
PLS = (3 + 4) / 400
ROWS = 6
WHOLE = Part((0, DIM), list(range(ROWS)), ROWS)


@pytest.fixture
def console(capsys: pytest.CaptureFixture[str]) -> Console:
    return Console(capsys)


def test_show_and_verify_tell_what_was_lost(tmp_path: Path, console: Console) -> None:
    root = Folder(tmp_path)
    first = write(root, ROWS, [WHOLE])
    second = write(root, ROWS, [WHOLE], parent=first, losses=LOSSES)
    for id, lost in ((first.id, ()), (second.id, LOSSES)):
        shown = console.run("show", root, id, "--json").document
        assert shown["reproducible"] is not bool(lost)
        assert shown["pls"] == pytest.approx(PLS if lost else 0)
        assert [loss["rank"] for loss in shown["losses"]] == [loss.rank for loss in lost]
    assert "not bit for bit: 0.0175 of the samples were lost" in console.run("show", root).out
    assert "reproducible         bit for bit" in console.run("show", root, first.id).out
    found = console.run("verify", root)
    assert found.code == 0
    assert found.out.count("not bit for bit: 0.0175") == 1
    listed = console.run("verify", root, "--json").document["checkpoints"]
    assert [one["pls"] for one in listed] == pytest.approx([PLS, 0])
    assert [one["reproducible"] for one in listed] == [False, True]


def test_a_report_tells_it(tmp_path: Path) -> None:
    manifest = write(Folder(tmp_path), ROWS, [WHOLE], losses=LOSSES)
    report = checkpoint_report(manifest, 1, Progress())
    assert report.pls == pytest.approx(PLS)
    assert not report.reproducible
    assert str(report).endswith("chain of 1, 0.0175 of the samples lost")
    assert report.metrics()["checkpoint/pls"] == pytest.approx(PLS)
