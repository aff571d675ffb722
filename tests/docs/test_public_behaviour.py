"""Check that tests/public_behaviour.md is complete and names existing tests."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from functools import cache
from pathlib import Path

import pytest
import typer.main

import torchrec_checknrun
from torchrec_checknrun import errors
from torchrec_checknrun.hydra_config.config import CheckNRunConfig, DcpConfig, OffConfig

TESTS = Path(__file__).parents[1]
TEXT = (TESTS / "public_behaviour.md").read_text()
MODULES = ("dcp", "policy", "tracking", "triggers")


def rows(title: str) -> list[list[str]]:
    """Return the two cells of each row of the tables below a heading."""
    (section,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL)
    found = re.findall(r"^\| (.*) \| (.*) \|$", section, re.MULTILINE)
    return [list(cells) for cells in found if cells[1] != "held by"]


def named(title: str) -> set[str]:
    """Return everything in backquotes in the first cells."""
    return {name for promise, _ in rows(title) for name in re.findall(r"`([^`]+)`", promise)}


@cache
def names_in(path: str) -> set[str]:
    return set(re.findall(r"^ *def test_(\w+)", (TESTS / path).read_text(), re.MULTILINE))


SECTIONS = ("Promises of the README", "Console tool", "Hydra keys", "Errors", "Public names")


@pytest.mark.parametrize("title", SECTIONS)
def test_every_row_names_tests_that_exist(title: str) -> None:
    found = rows(title)
    assert found
    for promise, held in found:
        references = re.findall(r"`([\w/]+\.py)::(\w+)`", held)
        assert references, f"no test holds: {promise}"
        for path, name in references:
            assert name in names_in(path), f"{promise}: {path} has no test_{name}"


def test_every_command_and_option_has_a_row() -> None:
    options: dict[str, set[str]] = {}
    for promise, _ in rows("Console tool"):
        commands = re.findall(r"`checknrun (\w+)`", promise)
        for command in commands:
            options.setdefault(command, set()).update(re.findall(r"`(--[\w-]+)`", promise))
    # Imported late: the package's attribute ``main`` is the function, which hides the module.
    from torchrec_checknrun.cli.commands import app

    tool = typer.main.get_command(app)
    commands = tool.commands  # type: ignore[attr-defined]  # a group, by Click
    assert options.keys() == commands.keys()
    for name, command in commands.items():
        wanted = {
            option
            for parameter in command.params
            if parameter.param_type_name == "option"
            for option in (*parameter.opts, *parameter.secondary_opts)
        }
        assert options[name] == wanted, name


def test_every_hydra_key_has_a_row() -> None:
    keys = {
        field.name
        for config in (CheckNRunConfig, DcpConfig, OffConfig)
        for field in dataclasses.fields(config)
    }
    assert keys - {"_target_", "_convert_"} <= named("Hydra keys")


def test_every_error_has_a_row() -> None:
    classes = {name for name, _ in inspect.getmembers(errors, inspect.isclass)}
    assert classes == named("Errors")


def test_every_public_name_has_a_row() -> None:
    public = set(dir(torchrec_checknrun))
    for module in MODULES:
        top = importlib.import_module(f"torchrec_checknrun.{module}")
        public |= {f"{module}.{name}" for name in vars(top)["__all__"]}
    again = {f"policy.{name}" for name in ("Full", "OneShot", "Consecutive", "Intermittent")}
    again |= {f"triggers.{name}" for name in ("AtEnd", "EverySeconds", "EverySteps", "OnSigterm")}
    assert public - again == named("Public names")
