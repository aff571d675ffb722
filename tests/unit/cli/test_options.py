"""Check that options without another test reach the commands' work."""

from __future__ import annotations

import io
import sys

import pytest
from msgspec.structs import replace

from tests.unit.chains import DIM, Part, chain_of_three, new_root, put_manifest, write
from tests.unit.cli.exported import newest_id
from tests.unit.console import Console
from torchrec_checknrun.cli import reading
from torchrec_checknrun.cli.output import size

pytestmark = pytest.mark.usefixtures("small_operations")

PLAN = ("plan", "--rows", "1e6", "--dim", 16, "--bits", 32)


def test_cat_shows_all_columns(console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_SHOWN", 3)
    root = new_root()
    write(root, 20, [Part((0, DIM), list(range(20)), 20)])
    some = console.run("cat", root, "--table", "t", "--rows", 5)
    everything = console.run("cat", root, "--table", "t", "--rows", 5, "--all-columns")
    assert "…" in some.out
    assert "…" not in everything.out
    assert len(everything.out.split()) == len(some.out.split()) + DIM - 3 - 1


@pytest.mark.parametrize("long", ["a table's name ", "table"])
def test_lines_of_piped_output_are_whole(console: Console, long: str) -> None:
    """Wrap nothing that a program reads, however long names are."""
    root = new_root()
    (full, *_) = chain_of_three(root)
    name = f"{long * 60}end"
    tables = {name: next(iter(full.tables.values()))}
    put_manifest(root, replace(full, tables=tables, created_by=name).sealed())
    shown = console.run("show", root, full.id).out.splitlines()
    assert [line.startswith("created") for line in shown if name in line] == [True, False]
    assert name in console.run("verify", root, full.id).out


@pytest.mark.parametrize(
    ("terminal", "columns"), [("xterm", "80"), ("xterm", "20"), ("dumb", "80")]
)
def test_tables_are_legible_in_narrow_terminals(
    console: Console, monkeypatch: pytest.MonkeyPatch, terminal: str, columns: str
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", terminal)
    monkeypatch.setenv("COLUMNS", columns)
    root = new_root()
    *_, head = chain_of_three(root)
    (line,) = [line for line in console.run("ls", root).out.splitlines() if head.id in line]
    assert "differential" in line
    assert head.created_at[:19].replace("T", " ") in line


def test_a_closed_stdin_is_no_terminal(console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    root = new_root()
    chain_of_three(root)
    monkeypatch.setattr(sys, "stdin", None)
    result = console.run("repair", root, "--ignore", newest_id(root))
    assert result.code == 2
    assert result.err == "checknrun: nothing was changed: add --yes to do it without being asked\n"


def test_an_answer_that_never_comes_changes_nothing(
    console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """End with the code of a failure at an end of input or an interrupt, as after a no."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    root = new_root()
    chain_of_three(root)
    monkeypatch.setattr(sys, "stdin", Terminal(""))
    result = console.run("repair", root, "--ignore", newest_id(root))
    assert (result.code, result.err.splitlines()[-1]) == (2, "checknrun: nothing was changed")


def test_with_stderr_closed_stdout_holds_no_error(
    console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert console.run("ls", "/nowhere", "--json").out == ""


@pytest.mark.parametrize(
    "command", ["ls {}", "verify {}", "prune {} --keep 1", "export run {}", "publish run {}"]
)
def test_an_empty_name_is_not_the_working_directory(console: Console, command: str) -> None:
    """Refuse what a shell makes of a variable that is not set."""
    result = console.run(*(word.format("") for word in command.split(" ")))
    assert (result.code, result.out) == (2, "")
    assert "'' names no folder" in result.err


def test_plan_of_nodes_optimizer_bytes_and_read_bandwidth(console: Console) -> None:
    plain = console.json(*PLAN)
    nodes = console.json(*PLAN, "--nodes", 3 * plain["job"]["nodes"])
    assert nodes["expected_restores"] == pytest.approx(3 * plain["expected_restores"])
    rows_of_eight = console.json(*PLAN, "--optimizer-bytes", 8)
    assert rows_of_eight["full_fp32_bytes"] == plain["full_fp32_bytes"] + 4 * 1_000_000
    read = console.json(*PLAN, "--read-bandwidth", 2)
    for before, after in zip(plain["policies"], read["policies"], strict=True):
        assert before["longest_read"] is None
        assert after["longest_read"] == pytest.approx(after["kept_bytes"] / 2e9)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999.7, "1 kB"), (1_234, "1.23 kB"), (999_600, "1 MB"), (5.4e15, "5,400 TB")],
)
def test_sizes_are_no_powers_of_ten(count: float, text: str) -> None:
    """Among others just below the next unit."""
    assert size(count) == text
