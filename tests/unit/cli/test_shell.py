"""Run the console tool in a shell: one-line errors, completion, progress, missing extras."""

from __future__ import annotations

import json
import os
import pty
import re
import string
import subprocess
import sys
import threading
import time
from contextlib import suppress
from itertools import product
from pathlib import Path

import pytest
import typer
from msgspec.structs import replace
from typer.core import TyperCommand

from tests.crash import hanging
from tests.examples import some_of
from tests.unit.chains import chain_of_three, new_root, put_manifest
from tests.unit.console import Console
from torchrec_checknrun.cli import listing, main, output
from torchrec_checknrun.errors import StorageFailed
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.version import __version__
from torchrec_checknrun.writers import lease

pytestmark = pytest.mark.usefixtures("small_operations")


@pytest.fixture
def root() -> Folder:
    return new_root()


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


@pytest.mark.parametrize(
    "arguments",
    [
        *("ls", "show", "verify", "diff {} a b", "cat {} --table t --rows 1", "compact"),
        *("publish {} out", "export {} out", "prune {} --keep 1", "pin {} a", "unpin {} a"),
        *("unlock {} --yes", "repair {} --yes", "adopt {} a --yes", "report {} --out out.html"),
    ],
)
def test_storage_that_is_silent_is_given_up(
    console: Console, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: str
) -> None:
    """Say so within minutes where a driver waits and tries again for half an hour."""
    assert 60 < output._PATIENCE_SECONDS * 0.8 < 300
    monkeypatch.setattr(hanging.HangingStore, "hangs", set(hanging.CALLS))
    monkeypatch.setattr(hanging.HangingStore, "released", threading.Event())
    monkeypatch.setattr(output, "_PATIENCE_SECONDS", 0.5)
    monkeypatch.setenv("CHECKNRUN_RETRY_SECONDS", "0.1")
    monkeypatch.chdir(tmp_path)
    command, _, others = arguments.replace("{}", "hanging://run").partition(" ")
    try:
        result = console.run(command, *(others or "hanging://run").split())
    finally:
        hanging.HangingStore.released.set()
    assert (result.code, result.out) == (2, "")
    wanted = r"hanging://run.*nothing was heard from the storage.* CHECKNRUN_RETRY_SECONDS\)"
    assert re.search(wanted, result.err)


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
    assert "internal error, please report it (ZeroDivisionError: division" in result.err
    assert len(result.err.splitlines()) == 1
    monkeypatch.setenv("CHECKNRUN_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        main(["ls", root.url])


class TestInAShell:
    """The tool in a process of its own."""

    COMMAND = (sys.executable, "-W", "ignore", "-m", "torchrec_checknrun.cli")

    def complete(self, *words: object) -> list[str]:
        """Return the completions that bash receives, by click's protocol."""
        environment = {
            **os.environ,
            "_CHECKNRUN_COMPLETE": "complete_bash",
            "COMP_WORDS": " ".join(map(str, ["checknrun", *words])),
            "COMP_CWORD": str(len(words)),
        }
        done = subprocess.run(
            self.COMMAND, env=environment, capture_output=True, text=True, timeout=240
        )
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.split()

    @pytest.mark.parametrize(
        ("command", "encoding"), some_of(product(["ls", "show"], ["ascii", "latin-1"]), 0, 3)
    )
    def test_any_encoding_will_do(self, tmp_path: Path, command: str, encoding: str) -> None:
        """Print dashes and any names in every encoding."""
        root = Folder(tmp_path / "rün–λ")
        *_, head = chain_of_three(root)
        put_manifest(root, replace(head, created_by="ü–λ").sealed())
        texts = []
        for options in ([], ["--json"]):
            done = subprocess.run(
                [*self.COMMAND, command, root.url, *options],
                env={**os.environ, "PYTHONIOENCODING": encoding},
                capture_output=True,
                timeout=240,
            )
            assert (done.returncode, done.stderr) == (0, b"")
            texts.append(done.stdout.decode(encoding))
        document = json.loads(texts[1])
        if command == "show":
            assert document["created_by"] == "ü–λ"
            assert ("ü" if encoding == "latin-1" else "\\xfc") + "\\u2013\\u03bb" in texts[0]

    def test_an_error_in_any_encoding(self, tmp_path: Path) -> None:
        done = subprocess.run(
            [*self.COMMAND, "show", str(tmp_path / "λ")],
            env={**os.environ, "PYTHONIOENCODING": "ascii"},
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 2
        assert "\\u03bb" in done.stderr
        assert "internal error" not in done.stderr

    def test_commands_options_and_ids_are_completed(self, tmp_path: Path) -> None:
        ids = [manifest.id for manifest in chain_of_three(Folder(tmp_path))]
        assert self.complete("repo") == ["report"]
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
            timeout=240,
        )
        assert done.returncode == 0, done.stderr
        assert "_CHECKNRUN_COMPLETE=complete_bash" in done.stdout
        assert done.stdout.rstrip().endswith(" checknrun")

    def test_progress_is_for_those_who_watch(self, tmp_path: Path, console: Console) -> None:
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
            out, _ = process.communicate(timeout=240)
        os.close(ours)
        assert process.returncode == 0
        assert b"verifying" in seen
        assert json.loads(out)["sound"]
        unwatched = console.run("verify", tmp_path, "--json")
        assert (unwatched.out, unwatched.err) == (out.decode(), "")


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


def test_main_can_be_imported_again() -> None:
    for _ in range(2):
        from torchrec_checknrun.cli import main as imported_anew

        with pytest.raises(SystemExit):
            imported_anew(["--version"])


def test_version_is_shown(console: Console) -> None:
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


@pytest.mark.parametrize("hangs", [set(hanging.CALLS), set()])
def test_completion_waits_for_no_storage(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, hangs: set[str]
) -> None:
    """Complete nothing, soon and without a word, where the storage doesn't answer or refuses."""
    monkeypatch.setattr(hanging.HangingStore, "hangs", hangs)
    monkeypatch.setattr(hanging.HangingStore, "released", threading.Event())

    def refuse(*_: object, **__: object) -> None:
        raise ConnectionError("refused")

    if not hangs:
        monkeypatch.setattr(hanging.HangingStore, "ls", refuse)
    context = typer.Context(TyperCommand("ls"))
    context.params = {"root": "hanging://run"}
    began = time.monotonic()
    try:
        assert output._complete(context, "") == []
    finally:
        hanging.HangingStore.released.set()
    assert time.monotonic() - began < 10
    assert caplog.text == ""


def test_looking_needs_no_torch(tmp_path: Path) -> None:
    """Show help, `ls` and `show` without torch; read, compact and write without TorchRec."""
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
run("compact", root)
import torchrec_checknrun.save.process  # of those that write in the background
assert "torch" in sys.modules
assert not {{"torchrec", "fbgemm_gpu", "hydra"}} & set(sys.modules), "TorchRec was imported"
"""
    # Torch 2.10 warns of its own writer of DCP's files.
    python = [sys.executable, "-W", "ignore:TypedStorage is deprecated"]
    done = subprocess.run([*python, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert not done.stderr


def test_training_imports_nothing_that_takes_long() -> None:
    """Import hardly more of torch and TorchRec than a TorchRec script has imported anyway."""
    code = """
import sys
import torch, torchrec
before = set(sys.modules)
from torchrec_checknrun import Checkpointer
slow = {"torch.distributed.optim", "hydra", "rich", "matplotlib", "pandas", "boto3", "s3fs"}
assert not slow & (set(sys.modules) - before), slow & (set(sys.modules) - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
