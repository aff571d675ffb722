"""Run the tests with other releases of torch, FBGEMM and TorchRec.

    python -m recipes.versions                                    # every stack known to fit
    python -m recipes.versions --stack 2.15.0,1.10.0,1.10.0       # another one
    python -m recipes.versions --quick                            # only what a stack breaks first
    python -m recipes.versions --markdown recipes/results/versions.json --docs docs/versions.md

For each stack: a scratch environment, a copy of this tree without build products, an installation
by torchrec_checknrun/install.py with the compiled kernel, the tests that need no GPU. A torch that
setup.py does not allow is allowed in the copy. Needed are a compiler and 8 GB of disk, since most
of torch's wheels bring CUDA's libraries; a stack takes a minute of downloads and up to 20 minutes
of tests.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchrec_checknrun.install import ROOT, STACKS, Stack

Row = dict[str, Any]
"""The outcome of one stack: an entry of recipes/results/versions.json."""

RESULTS = ROOT / "recipes" / "results" / "versions.json"
EXTRAS = "recipes,serve,kmeans,figures,cli,s3,test"
FULL = ("-m", "not slow", "tests/unit", "tests/distributed")
QUICK = (
    *("-m", "not slow", "tests/unit/codecs", "tests/unit/dense", "tests/unit/model"),
    *("tests/unit/format/test_golden.py", "tests/unit/format/test_manifest.py"),
    *("tests/unit/run/test_saver.py", "tests/unit/test_direct_saves.py"),
    *("tests/unit/test_native.py", "tests/distributed/test_dcp_direct.py"),
    *("tests/distributed/test_dense_optimizers.py", "tests/distributed/test_dtensor.py"),
    *("tests/distributed/test_layouts.py", "tests/distributed/test_managed_collision.py"),
    *("tests/distributed/test_optimizer_states.py", "tests/distributed/test_tracking_zoo.py"),
    "tests/distributed/test_optimizer_wrappers.py",
)
LEFT_BEHIND = ".*", "*.so", "*.egg-info", "__pycache__", "build", "dist"
TORCH_REQUIREMENT = re.compile(r'"torch[<>=~!][^"]*"')
ASK_VERSIONS = """
import importlib.metadata, json, sys
from torchrec_checknrun.native import has_extension
names = "torch fbgemm-gpu-cpu torchrec tensordict numpy triton".split()
found = {d.metadata["Name"].lower().replace("_", "-"): d.version
         for d in importlib.metadata.distributions()}
print(json.dumps({"kernel": has_extension(), **{n: found[n] for n in names if n in found}}))
"""
# Triton's interpreter, which runs the GPU's codecs in the tests, needs NumPy < 2.4 before 3.7.
OLDER_NUMPY = """
import importlib.metadata, subprocess, sys
if [int(part) for part in importlib.metadata.version("triton").split(".")[:2]] < [3, 7]:
    subprocess.check_call([sys.executable, "-m", "pip", "install", "numpy<2.4"])
"""


class StackError(Exception):
    """A stack that could not be installed or tested."""


def copy_tree(target: Path, stack: Stack) -> None:
    """Copy the sources and allow the stack's torch; keep an earlier copy's compiled kernel."""
    shutil.copytree(ROOT, target, ignore=shutil.ignore_patterns(*LEFT_BEHIND), dirs_exist_ok=True)
    if stack.series not in STACKS:
        setup = target / "setup.py"
        setup.write_text(TORCH_REQUIREMENT.sub('"torch"', setup.read_text()))


def install(folder: Path, stack: Stack) -> Path:
    """Return the interpreter of a scratch environment; keep the packages of an existing one."""
    folder.mkdir(parents=True, exist_ok=True)
    interpreter = folder / "env" / "bin" / "python"
    copy_tree(folder / "tree", stack)
    if not interpreter.exists():
        _run(folder, "venv.log", [sys.executable, "-m", "venv", str(folder / "env")])
    options = ["--device", "cpu", "--extras", EXTRAS, "--editable", "--stack", ",".join(stack)]
    _run(folder, "install.log", [str(interpreter), "torchrec_checknrun/install.py", *options])
    _run(folder, "numpy.log", [str(interpreter), "-c", OLDER_NUMPY])
    return interpreter


def run_tests(folder: Path, interpreter: Path, tests: Sequence[str], minutes: float) -> Row:
    """Run pytest in the copy and return the counts and the failing tests' names."""
    results = folder / "results.xml"
    results.unlink(missing_ok=True)
    options = ["-q", "-o", "junit_family=xunit1", f"--junitxml={results}", *tests]
    command = [str(interpreter), "-m", "pytest", *options]
    _run(folder, "tests.log", command, minutes * 60, may_fail=True)
    if not results.exists():
        raise StackError(f"pytest ended without results:\n{_tail(folder / 'tests.log')}")
    return count(results)


def count(results: Path) -> Row:
    """Return the counts in a file that pytest's --junitxml wrote, and the failing tests' names."""
    row: Row = {"passed": 0, "failed": 0, "skipped": 0, "failures": []}
    for case in ElementTree.parse(results).iter("testcase"):
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            row["failures"].append(_test_name(case))
        row["skipped"] += "skipped" in kinds
        row["passed"] += not kinds & {"failure", "error", "skipped"}
    # A test whose body and teardown both fail is written twice.
    row["failures"] = sorted(set(row["failures"]))
    row["failed"] = len(row["failures"])
    return row


def _test_name(case: ElementTree.Element) -> str:
    """Return the name that pytest takes on its command line."""
    file, name = case.get("file"), case.get("name", "")
    if file is None:
        return name
    module = file.removesuffix(".py").replace("/", ".")
    if name == module:  # a file that could not be imported
        return file
    inside = case.get("classname", "").removeprefix(module).removeprefix(".")
    return "::".join(part for part in (file, *inside.split("."), name) if part)


def _run(
    folder: Path, log: str, command: list[str], limit: float | None = None, may_fail: bool = False
) -> None:
    """Run a command in the copy, without this process's Python settings; keep its output."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    with (folder / log).open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=folder / "tree",
            env=kept,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            returncode = process.wait(limit)
        except subprocess.TimeoutExpired as error:
            raise StackError(f"not finished after {limit:.0f} s: {' '.join(command)}") from error
        finally:
            if process.poll() is None:  # kills the ranks that the tests have started as well
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if returncode and not may_fail:
        raise StackError(f"{' '.join(command)} failed:\n{_tail(folder / log)}")


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-15:])


def try_stack(folder: Path, stack: Stack, tests: Sequence[str], minutes: float) -> Row:
    """Install a stack and run the tests; a stack that cannot be installed gets a "problem"."""
    started = time.monotonic()
    row: Row = {
        **stack._asdict(),
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
        "tests": "quick" if tests == QUICK else " ".join(tests),
    }
    try:
        interpreter = install(folder, stack)
        asked = [str(interpreter), "-c", ASK_VERSIONS]
        _run(folder, "versions.log", asked)
        row["installed"] = json.loads((folder / "versions.log").read_text().splitlines()[-1])
        row |= run_tests(folder, interpreter, tests, minutes)
    except StackError as error:
        row["problem"] = str(error)
    row["seconds"] = round(time.monotonic() - started)
    return row


def repeat(folder: Path, stack: Stack, earlier: Row, minutes: float) -> Row:
    """Run a stack's failing tests again, after a fix; those that pass now count as passed."""
    row = try_stack(folder, stack, earlier["failures"], minutes)
    row["tests"] = earlier["tests"]
    for kind in ("passed", "skipped"):
        row[kind] = earlier[kind] + row.get(kind, 0)
    return row


def table(rows: Sequence[Row]) -> str:
    """Return the results as a table in Markdown, and below it the failing tests."""
    lines = [
        "| torch | FBGEMM | TorchRec | tests | passed | failed | skipped |",
        "|---|---|---|---|---:|---:|---:|",
    ]
    for row in rows:
        counts = [f"{row[kind]:,}" if kind in row else "–" for kind in COUNTED]
        tests = "quick" if row["tests"] == "quick" else "all without a GPU"
        if "passed" not in row:
            tests = "not installed" if "installed" not in row else "not finished"
        cells = [row["torch"], row["fbgemm"], row["torchrec"], tests, *counts]
        lines.append(f"| {' | '.join(cells)} |")
    for row in rows:
        if row.get("failures"):
            lines += ["", f"torch {row['torch']} fails:", ""]
            lines += [f"- `{name}`" for name in row["failures"]]
    return "\n".join(lines)


COUNTED = ("passed", "failed", "skipped")


def read(path: Path) -> list[Row]:
    """Return the results in a file, oldest torch first; none if there is no file."""
    rows = json.loads(path.read_text())["stacks"] if path.exists() else []
    return sorted(rows, key=lambda row: [int(part) for part in row["torch"].split(".")])


def write(path: Path, row: Row) -> None:
    """Put a row into a file of results, in place of an earlier one of the same torch."""
    kept = [other for other in read(path) if other["torch"] != row["torch"]]
    path.write_text(json.dumps({"stacks": [*kept, row]}, indent=1) + "\n")
    path.write_text(json.dumps({"stacks": read(path)}, indent=1) + "\n")


def put_into(page: Path, text: str) -> None:
    """Replace the table of a page, between its two marks."""
    before, begin, rest = page.read_text().partition("<!-- versions -->")
    _, end, after = rest.partition("<!-- end of versions -->")
    if not end:
        raise ValueError(f"{page} lacks the marks <!-- versions --> and <!-- end of versions -->")
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}")


def main(arguments: list[str] | None = None) -> int:
    """Try the requested stacks, or print the table of a file of results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--stack",
        action="append",
        type=lambda text: Stack(*text.split(",")),
        metavar="TORCH,FBGEMM,TORCHREC",
        help="versions to try, such as 2.13.0,1.8.0,1.8.0; may be repeated; default: all known",
    )
    parser.add_argument("--quick", action="store_true", help="a choice of tests: some minutes")
    parser.add_argument(
        "--failed", action="store_true", help="only the tests that failed, per --json, after a fix"
    )
    parser.add_argument("--tests", help="arguments for pytest in place of the usual ones")
    parser.add_argument("--minutes", type=float, default=60, help="limit for a stack's tests")
    parser.add_argument("--folder", type=Path, help="scratch folder; default: a temporary one")
    parser.add_argument("--keep", action="store_true", help="keep the environments in --folder")
    parser.add_argument("--install-only", action="store_true", help="with --keep: run no tests")
    parser.add_argument("--json", type=Path, default=RESULTS, help="file of results to add to")
    parser.add_argument("--markdown", type=Path, help="print the table of a file of results")
    parser.add_argument("--docs", type=Path, help="with --markdown: put the table into this page")
    given = parser.parse_args(arguments)
    if given.markdown:
        print(table(read(given.markdown)))
        if given.docs:
            put_into(given.docs, table(read(given.markdown)))
        return 0
    if (given.keep or given.install_only) and not (given.keep and given.folder):
        parser.error("--keep needs --folder, and --install-only needs --keep")
    if given.folder:
        given.folder.mkdir(parents=True, exist_ok=True)
    tests = given.tests.split() if given.tests else QUICK if given.quick else FULL
    rows = []
    with tempfile.TemporaryDirectory(prefix="versions-", dir=given.folder) as scratch:
        for stack in given.stack or STACKS.values():
            folder = (given.folder if given.keep else Path(scratch)) / stack.torch
            print(f"torch {stack.torch}: see {folder}/*.log", flush=True)
            if given.install_only:
                install(folder, stack)
                continue
            earlier = {row["torch"]: row for row in read(given.json)}.get(stack.torch, {})
            if given.failed and earlier.get("failures"):
                rows.append(repeat(folder, stack, earlier, given.minutes))
            else:
                rows.append(try_stack(folder, stack, tests, given.minutes))
            write(given.json, rows[-1])
            if not given.keep:
                shutil.rmtree(folder, ignore_errors=True)
            print(*rows[-1].get("failures", []), rows[-1].get("problem", ""), sep="\n")
    print(table(rows))
    return any(row.get("problem") or row["failed"] for row in rows)


if __name__ == "__main__":
    sys.exit(main())
