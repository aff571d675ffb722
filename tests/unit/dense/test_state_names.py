"""Restore states with misleading names or no content: overwrite none, fail none half-way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchrec_checknrun import Checkpointer, PerRank
from torchrec_checknrun.errors import IncompatibleCheckpoint, UnsupportedState
from torchrec_checknrun.snapshot.items import Items, state_key

pytestmark = pytest.mark.usefixtures("one_rank")


class Box:
    def __init__(self, content: Any = None) -> None:
        self.content = content

    def state_dict(self) -> Any:
        return self.content

    def load_state_dict(self, state_dict: Any) -> None:
        self.content = state_dict


def restored(root: Path, state: Any, given: Any, **options: Any) -> Any:
    model = nn.Linear(1, 1)
    with Checkpointer(str(root), model=model, state=state) as saver:
        saver.steps = 1
        saver.save()
    with Checkpointer(str(root), model=model, state=given) as saver:
        return saver.restore(**options)


def test_names_that_look_like_those_of_ranks(tmp_path: Path) -> None:
    def boxes(*values: int | None) -> dict[str, Any]:
        a, b, c, d = (Box({"v": value}) for value in values)
        return {"reader": PerRank(a), "reader@0": b, "@0:reader": c, "0:reader": PerRank(d)}

    given = boxes(None, None, None, None)
    restored(tmp_path, boxes(1, 2, 3, 4), given)
    objects = [getattr(item, "state", item) for item in given.values()]
    assert [item.content for item in objects] == [{"v": n} for n in (1, 2, 3, 4)]


def test_a_name_that_is_there_already_is_refused() -> None:
    items = Items()
    items._add(state_key("a"), None)  # type: ignore[arg-type]  # only the name counts
    with pytest.raises(UnsupportedState, match=r"two parts .* 'state:a'"):
        items._add(state_key("a"), None)  # type: ignore[arg-type]  # likewise


class TestEmpty:
    def scaler(self, enabled: bool) -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", init_scale=8.0, enabled=enabled)

    def test_a_scaler_that_was_off_is_refused_before_anything_changes(self, tmp_path: Path) -> None:
        with pytest.raises(IncompatibleCheckpoint, match=r"'scaler' was empty .* strict=False"):
            restored(tmp_path, {"scaler": self.scaler(False)}, {"scaler": self.scaler(True)})

    def test_it_keeps_its_own_if_not_strict(self, tmp_path: Path) -> None:
        scaler = self.scaler(True)
        report = restored(
            tmp_path, {"scaler": self.scaler(False)}, {"scaler": scaler}, strict=False
        )
        assert report.skipped == ("state 'scaler': empty in the checkpoint",)
        assert scaler.state_dict()["scale"] == 8.0

    def test_it_may_be_off_again(self, tmp_path: Path) -> None:
        restored(tmp_path, {"scaler": self.scaler(True)}, {"scaler": self.scaler(False)})
        restored(tmp_path, {"scaler": self.scaler(False)}, {"scaler": self.scaler(False)})

    def test_what_takes_an_empty_state_gets_it(self, tmp_path: Path) -> None:
        counts = Box({"label": 3})
        restored(tmp_path, {"counts": Box({})}, {"counts": counts})
        assert counts.content == {}
