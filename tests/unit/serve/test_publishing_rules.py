"""Publications that can't be are refused by name when a Checkpointer is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.serve.served import Job, Net
from torchrec_checknrun import Follower, Publish
from torchrec_checknrun.errors import IncompatibleCheckpoint, UnsupportedTable

pytestmark = pytest.mark.usefixtures("one_rank")


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


@pytest.mark.parametrize("published", [True, False])
def test_extra_state_stays_with_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, published: bool
) -> None:
    """Follow a model whose modules show what is no tensor, in one that doesn't show that."""
    options: dict[str, Any] = {"publish": Publish(tmp_path / "serve")} if published else {}
    with monkeypatch.context() as patch:
        patch.setattr(Net, "get_extra_state", lambda _: {"seen": torch.ones(2), "at": 1})
        patch.setattr(Net, "set_extra_state", lambda *_: None)
        job = Job(tmp_path / "run", **options)
        job.train(seed=1)
        job.save()
        if published:
            job.saver.publish()
        job.saver.close()
        root = tmp_path / ("serve" if published else "run")
        with pytest.raises(IncompatibleCheckpoint, match=r"'_extra_state' of the model is a dict"):
            Follower(root, Net())
    net = Net()
    with Follower(root, net) as follower:
        assert follower.poll() is not None
        assert torch.equal(net.over.weight, job.model.module.over.weight)


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
