"""Show a run's checkpoints by `report`, from manifests and JSON lines, as a page or a picture."""

from __future__ import annotations

import base64
import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.unit.chains import DIM, Part, new_root, one_thread, write
from tests.unit.console import Console
from torchrec_checknrun.cli import plots, reporting
from torchrec_checknrun.format.manifest import Manifest, TableTotals
from torchrec_checknrun.root.report import Progress, checkpoint_report
from torchrec_checknrun.store.folder import Folder

WHOLE = (0, DIM)
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def run() -> tuple[Folder, list[Manifest]]:
    root = new_root()
    with one_thread():
        full = write(root, 40, [Part(WHOLE, list(range(40)), 10)])
        return root, [full, write(root, 40, [Part(WHOLE, [1, 2], 10)], full)]


def line(manifest: Manifest, stall: float) -> dict[str, Any]:
    report = checkpoint_report(manifest, 1, Progress(staged=stall, committed=2.0))
    return {"event": "checkpoint", **report.to_json()}


def test_from_manifests_alone(run: tuple[Folder, list[Manifest]], console: Console) -> None:
    root, (full, later) = run
    first, second = console.json("report", root)["checkpoints"]
    assert (first["id"], second["id"]) == (full.id, later.id)
    assert sum(first["bytes"].values()) == first["kept_bytes"]
    assert second["kept_bytes"] == sum(first["bytes"].values()) + sum(second["bytes"].values())
    assert second["modified_fraction"] == pytest.approx(2 / 40)
    assert second["stall_seconds"] is None


def test_a_table_without_rows(run: tuple[Folder, list[Manifest]]) -> None:
    """A manifest may list one, though no training makes one."""
    _, (full, _) = run
    manifest = replace(full, tables={**full.tables, "empty": TableTotals(0, 0)})
    report = checkpoint_report(manifest, 1, Progress())
    assert report.table_fractions["empty"] == 0
    assert report.modified_rows == 40


def test_with_a_log_of_what_was_deleted(
    run: tuple[Folder, list[Manifest]], console: Console, tmp_path: Path
) -> None:
    root, (full, later) = run
    log = tmp_path / "train.jsonl"
    events = [{"event": "step", "step": 3}, line(full, 0.5), line(later, 0.25), {"event": "end"}]
    log.write_text("".join(json.dumps(event) + "\n" for event in events))
    whole = console.json("report", root, "--log", log)["checkpoints"]
    assert [point["stall_seconds"] for point in whole] == [0.5, 0.25]
    assert all(point["there"] for point in whole)
    fs_root = Folder(str(root))
    for name in (fs_root / full.id).names():
        (fs_root / full.id).delete(name)
    first, second = console.json("report", root, "--log", log)["checkpoints"]
    assert (first["id"], first["there"]) == (full.id, False)
    assert sum(first["bytes"].values()) == sum(whole[0]["bytes"].values())
    assert first["bytes"]["weights"] == whole[0]["bytes"]["weights"]
    assert second["kept_bytes"] == whole[1]["kept_bytes"]


def test_a_page_holds_everything(
    run: tuple[Folder, list[Manifest]], console: Console, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    root, manifests = run
    page = tmp_path / "run.html"
    assert console.run("report", root, "--out", page).code == 0
    text = page.read_text()
    assert all(manifest.id in text for manifest in manifests)
    sources = re.findall(r'(?:src|href)="([^"]{0,40})', text)
    assert [source.partition(",")[0] for source in sources] == ["data:image/png;base64"]
    (image,) = re.findall(r"base64,([^\"]+)", text)
    assert base64.b64decode(image).startswith(PNG)


def test_png_holds_a_picture(
    run: tuple[Folder, list[Manifest]], console: Console, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    root, _ = run
    picture = tmp_path / "run.png"
    assert console.run("report", root, "--out", picture).code == 0
    data = picture.read_bytes()
    assert data.startswith(PNG)
    assert min(struct.unpack(">II", data[16:24])) > 500


@pytest.mark.parametrize("count", [1, 2, 30])
def test_axes_are_labelled_with_steps_and_milliseconds(count: int) -> None:
    pytest.importorskip("matplotlib")
    points = [
        plots.Point(
            id=f"seq-{n}",
            sequence=n,
            step=1000 * (n + 1),
            kind="differential" if n else "full",
            parent=f"seq-{n - 1}" if n else None,
            modified_fraction=0.25,
            bytes=dict.fromkeys(reporting.PARTS, 10**6),
            full_fp32_bytes=10**7,
            kept_bytes=5 * 10**6,
            stall_seconds=0.25,
            there=True,
        )
        for n in range(count)
    ]
    figure = plots.figure_of(points)
    figure.canvas.draw()
    steps = {f"{point.step:,}" for point in points}
    assert [ax.get_title() for ax in figure.axes] == [
        "Written by each checkpoint",
        "Needed to restore each checkpoint",
        "Rows written",
        "Stall of training",
    ]
    for ax in figure.axes:
        labels = [label.get_text() for label in ax.get_xticklabels()]
        assert labels[0] == "1,000"
        assert set(labels) <= steps
        assert len(labels) == len(set(labels)) <= 8
        assert ax.get_xlabel() == "step of the checkpoint"
    stalls = figure.axes[3]
    bars: list[Any] = list(stalls.patches)
    assert stalls.get_ylabel() == "ms"
    assert [bar.get_height() for bar in bars] == [250.0] * count


def test_the_page_tells_stalls_in_milliseconds(
    run: tuple[Folder, list[Manifest]], console: Console, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    root, (full, later) = run
    log, page = tmp_path / "train.jsonl", tmp_path / "run.html"
    log.write_text("".join(json.dumps(line(m, 0.0125)) + "\n" for m in (full, later)))
    assert console.run("report", root, "--log", log, "--out", page).code == 0
    assert page.read_text().count("<td>12.5 ms</td>") == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{\n", "line 1, is no report of a checkpoint"),
        ('{"event": "step"}\n{"event": "checkpoint", "id": "a"}\n', "line 2, is no report"),
        ("[" * 200_000 + "\n", "line 1, is no report"),
        ("\udcff\n", "line 1, is no report"),
    ],
)
def test_a_log_of_something_else(
    run: tuple[Folder, list[Manifest]], console: Console, tmp_path: Path, content: str, message: str
) -> None:
    (tmp_path / "log").write_text(content, errors="surrogateescape")
    result = console.run("report", run[0], "--log", tmp_path / "log", "--json")
    assert (result.code, result.out) == (2, "")
    assert message in result.err


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("sequence", '"3"'),
        ("id", '["a"]'),
        ("parent", "7"),
        ("stall_seconds", "1e400"),
        ("bytes", '{"weights": 1e400}'),
    ],
)
def test_a_field_of_another_kind(
    run: tuple[Folder, list[Manifest]], console: Console, tmp_path: Path, field: str, text: str
) -> None:
    fields = {name: json.dumps(value) for name, value in line(run[1][0], 0.5).items()}
    fields[field] = text
    content = ", ".join(f'"{name}": {value}' for name, value in fields.items())
    (tmp_path / "log").write_text(f"{{{content}}}\n")
    result = console.run("report", run[0], "--log", tmp_path / "log", "--json")
    assert (result.code, result.out) == (2, "")
    assert len(result.err.splitlines()) == 1
    assert f" - at `$.{field}" in result.err


@pytest.mark.parametrize("after", ["", '{"event": "step"}\n', "\n"])
def test_a_line_that_a_kill_has_cut_off(
    run: tuple[Folder, list[Manifest]], console: Console, tmp_path: Path, after: str
) -> None:
    """Skip a line cut off by a kill: the last one, or one in the middle when a restart appended."""
    full, later = (json.dumps(line(manifest, 0.5), ensure_ascii=False) for manifest in run[1])
    (tmp_path / "log").write_text(f"{full}\n{later[:40]}{after}{after}")
    result = console.run("report", run[0], "--log", tmp_path / "log", "--json")
    assert result.code == 0
    assert [point["stall_seconds"] for point in result.document["checkpoints"]] == [0.5, None]
    assert "log, line 2, is incomplete and was skipped" in result.err
    (tmp_path / "log").write_text(f"{full}\n{later}")
    result = console.run("report", run[0], "--log", tmp_path / "log", "--json")
    assert [point["stall_seconds"] for point in result.document["checkpoints"]] == [0.5, 0.5]
    assert result.err == ""


def test_no_password_in_the_page(
    run: tuple[Folder, list[Manifest]],
    console: Console,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("matplotlib")
    root = Folder(run[0].url)
    root.url = "ftp://user:secret@host/run"
    monkeypatch.setattr(reporting, "open_root", lambda _: root)
    page = tmp_path / "run.html"
    assert console.run("report", root.url, "--out", page).code == 0
    assert "<h1>Checkpoints of ftp://***@host/run</h1>" in page.read_text()
    assert "secret" not in page.read_text()


def test_mistakes_are_named(
    run: tuple[Folder, list[Manifest]], console: Console, tmp_path: Path
) -> None:
    result = console.run("report", run[0], "--out", tmp_path / "run.pdf")
    assert result.code == 2
    assert ".html or .png" in result.err
    result = console.run("report", run[0], "--log", tmp_path / "none")
    assert result.code == 2
    assert "none" in result.err
