"""Compare the lines that the README shows under its loop with what the loop prints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs import readme_loop
from tests.docs.blocks import REPOSITORY
from tests.groups import end_process_group
from tests.unit.chains import one_thread

SHOWN = re.compile(r"```text\n((?:\w+ checkpoint seq-.*\n)+)```")
VARYING = re.compile(r"(?<=step-\d{8}_)[0-9a-f]{8}|(?<=stall )\d+ ms|(?<=after )[\d.]+ s")


def test_the_readme_shows_what_its_loop_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with one_thread():
        readme_loop.main(str(tmp_path / "run-17"))
    end_process_group()
    shown = SHOWN.findall((REPOSITORY / "README.md").read_text())
    assert len(shown) == 1
    assert VARYING.sub("", capsys.readouterr().out) == VARYING.sub("", shown[0])
