"""The console tool's commands on whole checkpoints: what they say, to people and to programs."""

from __future__ import annotations

import json
import os
import pty
import string
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.core import TyperCommand

from tests.unit.chains import (
    DIM,
    TABLE,
    Part,
    make_shards,
    new_root,
    restore,
    same_bits,
    write,
)
from tests.unit.console import Console
from torchrec_checknrun import lease
from torchrec_checknrun.cli import listing, main, output
from torchrec_checknrun.codecs import Rowwise
from torchrec_checknrun.errors import StorageFailed
from torchrec_checknrun.filesystem import Folder
from torchrec_checknrun.inventory import inventory
from torchrec_checknrun.manifest import MANIFEST_NAME, Manifest, checkpoint_id
from torchrec_checknrun.quantization import Encoding
from torchrec_checknrun.shards import Rectangle
from torchrec_checknrun.version import __version__

pytestmark = pytest.mark.usefixtures("small_operations")

WHOLE = (0, DIM)
ROWS = 40


@pytest.fixture
def root() -> Folder:
    return new_root()


def chain_of_three(root: Folder) -> list[Manifest]:
    encoding = Encoding(Rowwise(4))
    full = write(root, ROWS, [Part(WHOLE, list(range(ROWS)), 10, encoding=encoding)], ranks=2)
    second = write(root, ROWS, [Part(WHOLE, [1, 2], 10, encoding=encoding)], full)
    return [full, second, write(root, ROWS, [Part(WHOLE, [3], 10)], second)]


def table_of(root: Folder, head: str) -> torch.Tensor:
    shards = make_shards(ROWS, [Rectangle(0, ROWS, *WHOLE)])
    restore(root, head, shards)
    return shards[0].weight


def put_manifest(root: Folder, manifest: Manifest) -> None:
    (root / manifest.id).put(MANIFEST_NAME, manifest.to_bytes())


def other_checkpoint(root: Folder, like: Manifest, sequence: int, **fields: Any) -> Manifest:
    """A copy of one, with its files, under another name."""
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
        assert second["modified_fraction"] == pytest.approx(2 / ROWS)
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
        assert console.run("show", root).out.startswith(full.id)  # the newest that is whole

    def test_forks_and_late_writers(self, root: Folder, console: Console) -> None:
        full, second, _ = chain_of_three(root)
        # Gone on from the second, so that the third was left behind.
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

    def test_abandoned(self, root: Folder) -> None:
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
    def test_the_newest(self, root: Folder, console: Console) -> None:
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
    def test_sound(self, root: Folder, console: Console) -> None:
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
        text = console.run("verify", root, second.id)  # with what it needs
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
        assert f"{third.id}  would go  older than what is kept" in text
        assert console.json("prune", root, "--keep", 1) == {**planned, "dry_run": False}
        assert root.names() == [newest[1].id]

    def test_pins(self, root: Folder, console: Console) -> None:
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
            (["export", "nosuch://x"], "nosuch://x can't be opened: Protocol not known: nosuch"),
            (["pin", "seq-1"], "no committed checkpoint 'seq-1'"),
            (["unpin", "seq-1"], "no checkpoint 'seq-1'"),
        ],
    )
    def test_mistakes(
        self, root: Folder, console: Console, arguments: list[str], message: str
    ) -> None:
        chain_of_three(root)
        command, *others = arguments
        result = console.run(command, root, *others)
        assert result.code == 2
        assert message in " ".join(result.err.replace("│", " ").split())
        assert len(root.names()) == 3


def test_compact(root: Folder, console: Console) -> None:
    *_, third = chain_of_three(root)
    found = console.json("compact", root)["compacted"]
    assert found["kind"] == "full"
    assert same_bits(table_of(root, found["id"]), table_of(root, third.id))
    assert console.json("compact", root) == {"compacted": None}
    assert "nothing to compact" in console.run("compact", root).out


def test_a_folder_will_do(tmp_path: Path, console: Console) -> None:
    manifests = chain_of_three(Folder(tmp_path))
    assert len(console.json("ls", tmp_path)["checkpoints"]) == len(manifests)


def test_what_the_storage_refuses_is_one_line(
    root: Folder, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Folder) -> list[str]:
        raise StorageFailed("listing s3://a/b: access denied: check the credentials")

    monkeypatch.setattr(Folder, "names", refuse)
    result = console.run("ls", root, "--json")
    assert (result.code, result.out) == (2, "")
    assert result.err == "checknrun: listing s3://a/b: access denied: check the credentials\n"


ESCAPES = "\x1b]0;title\x07\x1b[2J\x9b2J\u202e"


def test_no_escape_of_a_manifest_reaches_the_terminal(root: Folder, console: Console) -> None:
    (full, *_) = chain_of_three(root)
    put_manifest(
        root, replace(full, created_by=f"x{ESCAPES}", states={f"s{ESCAPES}": True}).sealed()
    )
    text = console.run("show", root, full.id)
    assert text.code == 0
    assert not set(ESCAPES) & set(text.out) - set(string.printable)
    assert "\\u001b" in text.out
    shown = console.run("show", root, full.id, "--json")
    assert not set(ESCAPES) & set(shown.out) - set(string.printable)
    assert shown.document["created_by"] == f"x{ESCAPES}"
    error = console.run("show", root, f"seq{ESCAPES}")
    assert error.code == 2
    assert not set(ESCAPES) & set(error.err) - set(string.printable)


def test_no_password_reaches_the_terminal(
    console: Console, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("aiohttp")
    monkeypatch.setenv("CHECKNRUN_RETRY_SECONDS", "0.01")
    for command in ("ls", "verify", "report"):
        result = console.run(command, "http://user:secret@127.0.0.1:9/run")
        assert result.code == 2
        assert "http://***@127.0.0.1:9/run" in result.err
        assert "secret" not in result.out + result.err + caplog.text


@pytest.mark.parametrize("arguments", [["ls"], ["show"], ["verify"], ["prune", "--keep", "1"]])
def test_a_setting_that_is_no_number_is_one_line(
    root: Folder, console: Console, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    chain_of_three(root)
    monkeypatch.setenv("CHECKNRUN_RETRY_SECONDS", "abc")
    command, *others = arguments
    result = console.run(command, root, *others)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("checknrun: the environment variable CHECKNRUN_RETRY_SECONDS is")
    assert len(result.err.splitlines()) == 1


def test_a_mistake_of_the_tool_is_one_line(
    root: Folder, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("division\nby zero")

    monkeypatch.setattr(listing, "inventory", fail)
    monkeypatch.delenv("CHECKNRUN_DEBUG", raising=False)
    result = console.run("ls", root)
    assert (result.code, result.out) == (2, "")
    assert "please report it (ZeroDivisionError: division" in result.err
    assert len(result.err.splitlines()) == 1
    monkeypatch.setenv("CHECKNRUN_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        main(["ls", root.url])


class TestInAShell:
    """The tool as a process of its own."""

    COMMAND = (sys.executable, "-W", "ignore", "-m", "torchrec_checknrun.cli")

    def complete(self, *words: object) -> list[str]:
        """What bash is told, by the protocol of click."""
        environment = {
            **os.environ,
            "_CHECKNRUN_COMPLETE": "complete_bash",
            "COMP_WORDS": " ".join(map(str, ["checknrun", *words])),
            "COMP_CWORD": str(len(words)),
        }
        done = subprocess.run(
            self.COMMAND, env=environment, capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.split()

    def test_completion(self, tmp_path: Path) -> None:
        ids = [manifest.id for manifest in chain_of_three(Folder(tmp_path))]
        assert self.complete("re") == ["report"]
        assert self.complete("prune", tmp_path, "--ke") == ["--keep"]
        assert self.complete("show", tmp_path, "seq-") == ids[::-1]
        assert self.complete("diff", tmp_path, ids[0], "seq-000003") == [ids[2]]
        assert self.complete("show", "nowhere://x", "seq") == []

    def test_the_shell_is_told_whom_to_ask(self) -> None:
        done = subprocess.run(
            [*self.COMMAND, "--show-completion", "bash"],
            env={**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        assert "_CHECKNRUN_COMPLETE=complete_bash" in done.stdout
        assert done.stdout.rstrip().endswith(" checknrun")

    def test_progress_is_for_those_who_watch(self, tmp_path: Path) -> None:
        chain_of_three(Folder(tmp_path))
        command = [*self.COMMAND, "verify", str(tmp_path), "--json"]
        ours, theirs = pty.openpty()
        with subprocess.Popen(
            command,
            env={**os.environ, "TERM": "xterm"},
            stdout=subprocess.PIPE,
            stderr=theirs,
        ) as process:
            os.close(theirs)
            seen = b""
            with suppress(OSError):  # the terminal's other side is closed at the end
                while data := os.read(ours, 4096):
                    seen += data
            out, _ = process.communicate(timeout=60)
        os.close(ours)
        assert process.returncode == 0
        assert b"verifying" in seen
        assert json.loads(out)["sound"]
        done = subprocess.run(command, capture_output=True, timeout=60)
        assert (done.stdout, done.stderr) == (out, b"")


def test_a_missing_extra_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit) as ended:
        main(["ls", "x"])
    assert ended.value.code == 2
    assert "pip install 'torchrec_checknrun[cli]'" in capsys.readouterr().err


def test_a_missing_library_of_one_command_is_named(
    root: Folder, console: Console, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    chain_of_three(root)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    result = console.run("export", root, tmp_path / "out", "--format", "safetensors")
    assert result.code == 2
    assert "pip install 'torchrec_checknrun[cli]'" in result.err


@pytest.mark.parametrize("command", ["ls", "show", "verify", "compact", "report"])
@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nowhere://x", "nowhere://x can't be opened: Protocol not known: nowhere"),
        ("s3://bucket/run", "pip install 'torchrec_checknrun[s3]'"),
    ],
)
def test_urls_that_can_not_be_opened(
    console: Console, monkeypatch: pytest.MonkeyPatch, command: str, url: str, message: str
) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    result = console.run(command, url)
    assert (result.code, result.out) == (2, "")
    assert message in result.err
    assert len(result.err.splitlines()) == 1


def test_version(console: Console) -> None:
    assert console.run("--version").out == f"torchrec_checknrun {__version__}\n"


def test_ids_are_completed(root: Folder) -> None:
    manifests = chain_of_three(root)
    writer = lease.Lease(root)
    writer.acquire(lambda _: ())
    writer.release()

    context = typer.Context(TyperCommand("ls"))
    context.params = {"root": root.url}
    complete = output._complete
    assert complete(context, "seq-") == [m.id for m in reversed(manifests)]
    assert complete(context, "seq-000002") == [manifests[1].id]
    context.params = {"root": "nowhere://x"}
    assert complete(context, "") == []


def test_looking_needs_no_torch(tmp_path: Path) -> None:
    """Help, `ls` and `show` answer at once; nothing of the tool needs TorchRec."""
    manifests = chain_of_three(Folder(tmp_path))
    code = f"""
import contextlib, io, sys
from torchrec_checknrun.cli import main
def run(*arguments):
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            main(arguments)
        except SystemExit as ended:
            assert not ended.code, arguments
root, full, last = {str(tmp_path)!r}, {manifests[0].id!r}, {manifests[-1].id!r}
run("--help")
run("ls", root)
run("show", root)
run("prune", root, "--keep", "9")
run("plan", "--rows", "1e9", "--dim", "64")
assert not {{"torch", "matplotlib"}} & set(sys.modules)
run("verify", root)
run("cat", root, "--table", "t", "--rows", "1")
run("diff", root, full, last)
run("export", root, {str(tmp_path / "out")!r})
assert "torch" in sys.modules
assert not {{"torchrec", "fbgemm_gpu"}} & set(sys.modules), "TorchRec was imported"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert not done.stderr


def test_a_root_that_was_replaced_is_seen(root: Folder) -> None:
    full, second, third = chain_of_three(root)
    put_manifest(root, replace(full, step=11).sealed())
    found = {c.id: c for c in inventory(root).checkpoints}
    assert found[full.id].status == "restorable"
    assert found[second.id].problem == f"{second.id} needs {full.id}, which was replaced"
    assert found[third.id].status == "broken"
