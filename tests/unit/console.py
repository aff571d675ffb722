"""Run the console tool in this process as a shell does."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from torchrec_checknrun.cli import main


@dataclass
class Result:
    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """Return the output of --json, which must be the only output."""
        return json.loads(self.out, parse_constant=_refuse)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


class Console:
    """A caller of the tool's commands."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def run(self, *arguments: object) -> Result:
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        printed = self._capsys.readouterr()
        code = ended.value.code
        assert code is None or isinstance(code, int)
        return Result(code or 0, printed.out, printed.err)

    def json(self, *arguments: object) -> Any:
        result = self.run(*arguments, "--json")
        assert result.code == 0, result.err
        return result.document
