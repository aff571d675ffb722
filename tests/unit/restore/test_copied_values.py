"""Restore models whose state dict holds copies, or report the values that can't be restored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.crash.save_sweep import alone
from tests.unit.tracked_model import make_model
from torchrec_checknrun import Checkpointer
from torchrec_checknrun.errors import ModelPartlyRestored
from torchrec_checknrun.restore.copied_values import copied


class Hooked(nn.Linear):
    """A module whose state dict has a copy of the weight.

    Args:
        change: changes the copy.
    """

    def __init__(self, change: Any, takes_back: bool = True) -> None:
        super().__init__(4, 2)
        self.register_buffer("mean", torch.rand(3))
        self.change, self.takes_back = change, takes_back

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.change(destination[f"{prefix}weight"])

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        if not self.takes_back:
            state_dict = {k: v for k, v in state_dict.items() if k != f"{prefix}weight"}
        super()._load_from_state_dict(state_dict, prefix, *args)


def build(change: Any, takes_back: bool = True) -> nn.Sequential:
    return nn.Sequential(Hooked(change, takes_back), nn.Linear(2, 2))


def saved(root: Path, model: nn.Module) -> None:
    with alone(), Checkpointer(str(root), model=model) as saver:
        saver.steps = 1
        saver.save()


CHANGES: dict[str, Any] = {
    "clone": torch.clone,
    "cast": lambda weight: weight.bfloat16(),
    "itself": lambda weight: weight,
    "view": lambda weight: weight.view(2, 4),
}


@pytest.mark.parametrize("name", CHANGES)
def test_they_come_back(tmp_path: Path, name: str) -> None:
    change = CHANGES[name]
    model, other = build(change), build(change)
    saved(tmp_path, model)
    with alone(), Checkpointer(str(tmp_path), model=other) as saver:
        report = saver.restore()
        assert report is not None
        assert not saver._target.tracked.modified_rows()
    wanted, found = model.state_dict(), other.state_dict()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    assert torch.equal(
        change(model.get_parameter("0.weight")), change(other.get_parameter("0.weight"))
    )


def test_a_model_that_does_not_take_them_back(tmp_path: Path) -> None:
    saved(tmp_path, build(torch.clone))
    other = build(torch.clone, takes_back=False)
    with alone(), pytest.raises(ModelPartlyRestored, match=r"copy of '0\.weight'.*take it back"):
        Checkpointer(str(tmp_path), model=other).restore()


def test_what_follows_from_others_is_no_loss(tmp_path: Path) -> None:
    class Norm(nn.Linear):
        def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            destination[f"{prefix}norm"] = self.weight.detach().norm()

    model, other = Norm(3, 3), Norm(3, 3)
    saved(tmp_path, model)
    with alone(), Checkpointer(str(tmp_path), model=other) as saver:
        saver.restore()
    assert torch.equal(model.weight, other.weight)


def test_sharded_copies_and_none(tmp_path: Path) -> None:
    with alone():
        mesh = init_device_mesh("cpu", (1,))

        class Placed(nn.Linear):
            def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
                super()._save_to_state_dict(destination, prefix, keep_vars)
                name = f"{prefix}weight"
                whole = destination[name].detach().clone()
                destination[name] = distribute_tensor(whole, mesh, [Shard(0)])

            def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
                name = f"{prefix}weight"
                whole = {name: state_dict[name].full_tensor()}
                super()._load_from_state_dict({**state_dict, **whole}, prefix, *args)

        model, other = Placed(3, 3), Placed(3, 3)
        saved(tmp_path, model)
        with Checkpointer(str(tmp_path), model=other) as saver:
            saver.restore()
        assert torch.equal(model.weight, other.weight)
        with Checkpointer(str(tmp_path / "tables"), model=make_model()) as saver:
            tracked, inner = saver._target.tracked, saver._saver._model
            assert len(inner.state_dict()) == 3
            assert copied(inner, inner.state_dict(), tracked) == {}
