"""Publications that can't be are refused by name when a Checkpointer is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.serve.served import Job, Net
from torchrec_checknrun import Publish
from torchrec_checknrun.errors import UnsupportedState, UnsupportedTable

pytestmark = pytest.mark.usefixtures("one_rank")


class Remembering(Net):
    """A model whose state dict holds what is no tensor."""

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        pass


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"tables": ["nothing*"]}, UnsupportedTable, r"'nothing\*', which is no table of the model"),
    ({"tables": []}, UnsupportedTable, "no table to publish"),
    ({"root": "run/serve"}, ValueError, "must lie outside of the checkpoints' root"),
    ({"root": "run"}, ValueError, "must lie outside"),
    ({"root": "."}, ValueError, "must lie outside"),
]


@pytest.mark.parametrize(("rule", "error", "message"), REFUSED)
def test_what_cannot_be_published_is_refused(
    tmp_path: Path, rule: dict[str, Any], error: type[Exception], message: str
) -> None:
    root = tmp_path / rule.pop("root", "serve")
    with pytest.raises(error, match=message):
        Job(tmp_path / "run", publish=Publish(root, **rule))


def test_extra_state_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("get_extra_state", "set_extra_state"):
        monkeypatch.setattr(Net, name, getattr(Remembering, name))
    with pytest.raises(UnsupportedState, match=r"'_extra_state', a dict \(extra state\)"):
        Job(tmp_path / "run", publish=Publish(tmp_path / "serve"))


WRONG = [
    {"root": ""},
    {"root": None},
    {"every_seconds": 0},
    {"every_seconds": float("inf")},
    {"every_seconds": True},
    {"bits": 3},
    {"bits": "8"},
    {"method": "kmeans"},
    {"tables": "wide"},
    {"tables": [1]},
    {"keep": 0},
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_a_rule_out_of_range(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"publish: {next(iter(wrong))} must be"):
        Publish(**{"root": "x", **wrong})


def test_no_rule_at_all(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="publish must be Publish"):
        Job(tmp_path, publish="s3://bucket/serve")
    job = Job(tmp_path)
    with pytest.raises(ValueError, match="nothing is published"):
        job.saver.publish()
    assert job.saver.published is None
    job.saver.close()
