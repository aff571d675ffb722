"""Run the console tool's commands on complete checkpoints; check the output, also as JSON."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from tests.unit.chains import (
    CHAIN_ROWS,
    DIM,
    TABLE,
    chain_of_three,
    make_shards,
    new_root,
    put_manifest,
    restore,
    same_bits,
)
from tests.unit.console import Console
from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.format.names import MANIFEST_NAME, checkpoint_id
from torchrec_checknrun.root.catalog import inventory
from torchrec_checknrun.shards import Rectangle
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.writers import lease

pytestmark = pytest.mark.usefixtures("small_operations")

WHOLE = (0, DIM)


@pytest.fixture
def root() -> Folder:
    return new_root()


def table_of(root: Folder, head: str) -> torch.Tensor:
    shards = make_shards(CHAIN_ROWS, [Rectangle(0, CHAIN_ROWS, *WHOLE)])
    restore(root, head, shards)
    return shards[0].weight


def other_checkpoint(root: Folder, like: Manifest, sequence: int, **fields: Any) -> Manifest:
    """Copy a checkpoint with its files under another name."""
    id = checkpoint_id(sequence, 10 * sequence, f"{sequence:08x}")
    other = replace(like, id=id, sequence=sequence, **fields).sealed()
    (root / id).create()
    for file in like.files:
        (root / id).put(file.name, (root / like.id).read(file.name))
    put_manifest(root, other)
    return other


class TestLs:
    def test_newest_first_with_all_that_matters(self, root: Folder, console: Console) -> None:
        manifests = chain_of_three(root)
        found = console.json("ls", root)
        assert [c["id"] for c in found["checkpoints"]] == [m.id for m in reversed(manifests)]
        last, second, full = found["checkpoints"]
        assert last["chain"] == [m.id for m in manifests]
        assert last["chain_bytes"] == sum(c["bytes"] for c in found["checkpoints"])
        assert (full["kind"], full["parent"], full["step"]) == ("full", None, 10)
        assert (second["kind"], second["parent"]) == ("differential", full["id"])
        assert second["modified_fraction"] == pytest.approx(2 / CHAIN_ROWS)
        folder = root / full["id"]
        assert full["bytes"] == sum(folder.size(name) or 0 for name in folder.names())
        assert {c["status"] for c in found["checkpoints"]} == {"restorable"}
        assert found["writer"] is None
        text = console.run("ls", root)
        lines = text.out.splitlines()
        assert lines[1].split()[:3] == [last["id"], "30", "differential"]
        assert "5.0%" in lines[2]

    def test_what_can_not_be_restored(self, root: Folder, console: Console) -> None:
        full, second, third = chain_of_three(root)
        (root / second.id).put("rank-00000.bin", b"short")
        never = checkpoint_id(4, 40, "00000004")
        (root / never).create()
        (root / never).put("rank-00000.bin", b"half")
        unreadable = checkpoint_id(5, 50, "00000005")
        (root / unreadable).create()
        (root / unreadable).put(MANIFEST_NAME, b"{}")
        found = {c["id"]: c for c in console.json("ls", root)["checkpoints"]}
        assert {id: c["status"] for id, c in found.items()} == {
            unreadable: "broken",
            never: "uncommitted",
            third.id: "broken",
            second.id: "broken",
            full.id: "restorable",
        }
        assert "rank-00000.bin should have" in found[second.id]["problem"]
        assert found[third.id]["problem"].startswith(f"it needs {second.id}, which is damaged")
        assert found[never]["bytes"] == 4
        assert "is not a manifest" in console.run("ls", root).out
        assert console.run("show", root).out.startswith(full.id)  # the newest complete one

    def test_a_needed_checkpoint_without_manifest(self, root: Folder, console: Console) -> None:
        full, second, third = chain_of_three(root)
        (root / second.id).delete(MANIFEST_NAME)
        found = {c["id"]: c for c in console.json("ls", root)["checkpoints"]}
        assert {id: c["status"] for id, c in found.items()} == {
            third.id: "broken",
            second.id: "broken",
            full.id: "restorable",
        }
        assert f"is missing, but {third.id} builds on it: put" in found[second.id]["problem"]
        assert "put that file back" in found[third.id]["problem"]

    @pytest.mark.parametrize("to", ["a checkpoint", "/nonexistent"])
    def test_links_are_refused_one_by_one(self, tmp_path: Path, console: Console, to: str) -> None:
        """Refuse links one by one, and list the checkpoints beside them."""
        root = Folder(tmp_path / "run")
        root.create()
        full, second, third = chain_of_three(root)
        target = root.url + f"/{full.id}" if to == "a checkpoint" else to
        linked, within = checkpoint_id(8, 80, "00000008"), checkpoint_id(9, 90, "00000009")
        (tmp_path / "run" / linked).symlink_to(target)
        (root / within).create()
        (root / within).put("rank-00000.bin", b"bytes")
        (tmp_path / "run" / within / MANIFEST_NAME).symlink_to(f"{target}/{MANIFEST_NAME}")
        found = {c["id"]: c for c in console.json("ls", root)["checkpoints"]}
        assert {id: c["status"] for id, c in found.items()} == {
            within: "broken",
            linked: "broken",
            **{manifest.id: "restorable" for manifest in (third, second, full)},
        }
        for id in (linked, within):
            assert "is a symbolic link" in found[id]["problem"]
            assert id in found[id]["problem"]
        assert console.run("show", root).out.startswith(third.id)
        report = console.run("report", root, "--out", tmp_path / "x.html")
        assert report.code == 0
        assert [line.split(": ")[2] for line in report.err.splitlines()] == [within, linked]
        pruned = console.run("prune", root, "--keep", 2)
        assert (pruned.code, pruned.err) == (0, "")
        assert {linked, within} < set(root.names())

    def test_forks_and_late_writers(self, root: Folder, console: Console) -> None:
        full, second, _ = chain_of_three(root)
        # Continue from the second checkpoint, so that the third is abandoned.
        fork = other_checkpoint(root, second, 4, parent=full.link, previous=second.link)
        writer = lease.Lease(root)
        writer.acquire(lambda _: (full.id, second.id, fork.id))
        try:
            late = other_checkpoint(root, second, 5, parent=full.link, previous=fork.link)
            found = console.json("ls", root)
            assert found["writer"]["alive"]
            assert "in use by process" in console.run("ls", root).out
        finally:
            writer.release()
        status = {c["id"]: c["status"] for c in found["checkpoints"]}
        assert status[late.id] == "ignored"
        assert status[fork.id] == "restorable"

    def test_checkpoints_left_by_a_fork_are_abandoned(self, root: Folder) -> None:
        full, second, third = chain_of_three(root)
        fork = other_checkpoint(root, second, 4, parent=full.link, previous=second.link)
        found = {c.id: c.status for c in inventory(root).checkpoints}
        assert found == {
            fork.id: "restorable",
            third.id: "abandoned",
            second.id: "restorable",
            full.id: "restorable",
        }

    @pytest.mark.parametrize("command", ["ls", "show", "verify", "report"])
    def test_an_empty_root(self, root: Folder, console: Console, command: str) -> None:
        result = console.run(command, root)
        assert (result.code, result.out) == (2, "")
        assert result.err.startswith("checknrun: no c")


class TestShow:
    def test_the_newest_is_shown_by_default(self, root: Folder, console: Console) -> None:
        full, _, third = chain_of_three(root)
        found = console.json("show", root)
        assert (found["id"], found["status"]) == (third.id, "restorable")
        assert found["tables"][TABLE]["stored_values"] == DIM
        found = console.json("show", root, full.id)
        assert found["files"] == [
            {"name": f.name, "bytes": f.size, "chunks": f.chunks} for f in full.files
        ]
        assert found["states"] == {"model": "all", "rng": "per rank"}
        table = found["tables"][TABLE]
        assert table["codecs"][0]["name"] == "fbgemm_rowwise"
        assert table["error_mean"] == full.tables[TABLE].error_mean
        text = console.run("show", root, full.id).out
        assert "fbgemm_rowwise (bits 4" in text
        assert f"{full.tables[TABLE].error_mean:.2e}" in text

    def test_one_that_is_not_there(self, root: Folder, console: Console) -> None:
        chain_of_three(root)
        result = console.run("show", root, "seq-1")
        assert result.code == 2
        assert "no checkpoint 'seq-1'" in result.err


class TestVerify:
    def test_a_sound_root_is_reported(self, root: Folder, console: Console) -> None:
        manifests = chain_of_three(root)
        found = console.json("verify", root)
        assert found["sound"]
        assert [c["id"] for c in found["checkpoints"]] == [m.id for m in reversed(manifests)]
        assert console.run("verify", root, manifests[0].id).code == 0

    def test_damage_has_exit_code_1(self, root: Folder, console: Console) -> None:
        full, second, _ = chain_of_three(root)
        data = bytearray((root / full.id).read("rank-00001.bin"))
        data[3] ^= 16
        (root / full.id).put("rank-00001.bin", bytes(data))
        result = console.run("verify", root, "--json")
        assert result.code == 1
        assert not result.document["sound"]
        bad = {c["id"]: c["problems"] for c in result.document["checkpoints"] if c["problems"]}
        assert list(bad) == [full.id]
        text = console.run("verify", root, second.id)  # with all it needs
        assert text.code == 1
        assert f"{full.id}/rank-00001.bin, chunk 0" in text.out


class TestKeeping:
    def test_dry_run_and_prune(self, root: Folder, console: Console) -> None:
        full, second, third = chain_of_three(root)
        newest = [other_checkpoint(root, full, n, previous=third.link) for n in (7, 8)]
        before = root.names()
        planned = console.json("prune", root, "--keep", 1, "--dry-run")
        assert root.names() == before
        assert planned["delete"].keys() == {m.id for m in (full, second, third, newest[0])}
        assert planned["keep"] == {newest[1].id: "one of the newest 1"}
        text = console.run("prune", root, "--keep", 1, "--dry-run").out
        assert f"{third.id}  would be deleted  older than what is kept" in text
        assert console.json("prune", root, "--keep", 1) == {**planned, "dry_run": False}
        assert root.names() == [newest[1].id]

    def test_pins_keep_and_are_listed(self, root: Folder, console: Console) -> None:
        full, second, third = chain_of_three(root)
        newest = other_checkpoint(root, full, 7, previous=third.link)
        assert console.run("pin", root, second.id).code == 0
        assert [c["pinned"] for c in console.json("ls", root)["checkpoints"]] == [
            *(False, False),
            True,
            False,
        ]
        console.run("prune", root, "--keep", 1)
        assert root.names() == sorted([full.id, second.id, newest.id])
        assert console.run("unpin", root, second.id).code == 0
        console.run("prune", root, "--keep", 1)
        assert root.names() == [newest.id]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["prune"], "--keep"),
            (["prune", "--keep", "0"], "greater than or equal to 1"),
            (["prune", "--keep", "1", "--every-hours", "-1"], "every_hours must be positive"),
            (["prune", "--keep", "1", "--every-hours", "1e-320"], "give at least 0.001"),
            (["cat", "--table", "t", "--rows", "0-9999999999"], "more than 100,000 rows"),
            (["cat", "--table", "t", "--rows", f"0-{10**23}"], "more than 100,000 rows"),
            (["cat", "--table", "t", "--rows", "0-60000,0-60000"], "more than 100,000 rows"),
            (["cat", "--table", "t", "--rows", f"{10**23}"], "there is no row 1000"),
            (["cat", "--table", "t", "--rows", "1,5-3"], "'1,5-3' is no list of row ids"),
            (["export", "nosuch://x"], "nosuch://x can't be opened: Protocol not known: nosuch"),
            (["pin", "seq-1"], "no committed checkpoint 'seq-1'"),
            (["unpin", "seq-1"], "no checkpoint 'seq-1'"),
        ],
    )
    def test_mistakes_are_named_and_change_nothing(
        self, root: Folder, console: Console, arguments: list[str], message: str
    ) -> None:
        chain_of_three(root)
        command, *others = arguments
        result = console.run(command, root, *others)
        assert result.code == 2
        assert message in " ".join(result.err.replace("│", " ").split())
        assert len(root.names()) == 3


@pytest.mark.parametrize(
    "arguments",
    [
        *("ls", "show", "verify", "cat {} --table t --rows 1", "compact", "publish {} out"),
        *("export {} out", "prune {} --keep 1", "unlock", "repair", "report {} --out x.html"),
    ],
)
def test_what_is_in_place_of_the_root_is_told(
    tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch, arguments: str
) -> None:
    """Tell a typo, and what was meant perhaps."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run-17").mkdir()
    command, *others = arguments.replace("{}", "run-71").split()
    result = console.run(command, *(others or ["run-71"]))
    assert (result.code, result.out) == (2, "")
    assert f"{tmp_path}/run-71 does not exist (beside it: run-17)" in result.err
    (tmp_path / "run-71").write_text("x")
    result = console.run(command, *(others or ["run-71"]))
    assert result.code
    assert f"{tmp_path}/run-71" in result.out + result.err


@pytest.mark.parametrize(
    "command",
    [
        *("ls {}", "show {}", "verify {}", "diff {} a b", "cat {} --table t --rows 1"),
        *("prune {} --keep 1", "compact {}", "export {} out", "export run out", "publish run {}"),
        *("report {} --out r.png", "pin {} a", "unpin {} a", "unlock {}", "repair {}"),
    ],
)
def test_a_file_in_place_of_the_root(
    tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").write_text("x")
    result = console.run(*command.format("run").split())
    assert (result.code, result.out) == (2, "")
    assert f"{tmp_path}/run is a file, where a folder should be" in result.err


def test_newer_ones_that_are_passed_over_are_told(
    tmp_path: Path, console: Console, caplog: pytest.LogCaptureFixture
) -> None:
    """Export the newest that is whole, and say that it is not the newest."""
    _, second, third = chain_of_three(Folder(tmp_path / "run"))
    (tmp_path / "run" / third.id / "manifest.json").write_bytes(b"")
    assert console.json("export", tmp_path / "run", tmp_path / "out")["id"] == second.id
    assert f"passed over: {third.id}: " in caplog.text


def test_compact_makes_one_full_checkpoint(root: Folder, console: Console) -> None:
    *_, third = chain_of_three(root)
    found = console.json("compact", root)["compacted"]
    assert found["kind"] == "full"
    assert same_bits(table_of(root, found["id"]), table_of(root, third.id))
    assert console.json("compact", root) == {"compacted": None}
    assert "nothing to compact" in console.run("compact", root).out


def test_a_folder_will_do(tmp_path: Path, console: Console) -> None:
    manifests = chain_of_three(Folder(tmp_path))
    assert len(console.json("ls", tmp_path)["checkpoints"]) == len(manifests)


def test_a_root_that_was_replaced_is_seen(root: Folder) -> None:
    full, second, third = chain_of_three(root)
    put_manifest(root, replace(full, step=11).sealed())
    found = {c.id: c for c in inventory(root).checkpoints}
    assert found[full.id].status == "restorable"
    problem = found[second.id].problem
    assert problem is not None
    assert re.match(f"{second.id} needs {full.id} with .* it was replaced$", problem)
    assert found[third.id].status == "broken"
