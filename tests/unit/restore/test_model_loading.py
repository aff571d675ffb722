"""Restore models that load by themselves, since their state dict holds copies, or they compute
values from what they load; or report the values that can't be restored.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torchrec.modules.itep_modules import GenericITEPModule

from tests.crash.save_sweep import alone
from tests.unit.tracked_model import make_model
from torchrec_checknrun import Checkpointer, Consecutive
from torchrec_checknrun.errors import (
    IncompatibleCheckpoint,
    ModelPartlyRestored,
    UnsupportedState,
)
from torchrec_checknrun.restore.model_loading import copied


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


class Norm(nn.Linear):
    """A layer that keeps a value of its weight in no state dict."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.compute()

    def compute(self, *_: Any) -> None:
        self.norm = float(self.weight.detach().norm())


class ComputesInLoading(Norm):
    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.compute()


class ComputesFromContent(Norm):
    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(self._take)

    def _take(self, _: nn.Module, content: dict[str, torch.Tensor], prefix: str, *__: Any) -> None:
        self.norm = float(content[f"{prefix}weight"].norm())


class ComputesAfterwards(Norm):
    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(self.compute)


class ComputesFromExtraState(Norm):
    """A layer whose extra state is memory of a buffer."""

    sum: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sum", torch.zeros(1), persistent=False)

    def get_extra_state(self) -> torch.Tensor:
        return self.sum.copy_(self.weight.detach().square().sum())

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.norm = float(state.sqrt())


class LoadsItsOwnWay(Norm):
    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        found = super().load_state_dict(*args, **kwargs)
        self.compute()
        return found


DERIVING = [
    ComputesInLoading,
    ComputesFromContent,
    ComputesAfterwards,
    ComputesFromExtraState,
]


@pytest.mark.parametrize("wrap", [lambda part: part, nn.Sequential], ids=["whole", "part"])
@pytest.mark.parametrize("kind", DERIVING)
def test_what_is_computed_from_loaded_values_follows(
    tmp_path: Path, kind: type[Norm], wrap: Any
) -> None:
    part, other = kind(), kind()
    with torch.no_grad():
        part.weight.fill_(2.0)
    saved(tmp_path, wrap(part))
    with alone(), Checkpointer(str(tmp_path), model=wrap(other)) as saver:
        saver.restore()
    assert torch.equal(part.weight, other.weight)
    assert other.norm == pytest.approx(6.0)


def test_a_models_own_loading_is_called_and_a_parts_is_not(tmp_path: Path) -> None:
    """As PyTorch does: it calls ``load_state_dict`` of the whole model alone."""
    for wrap, expected in ((lambda part: part, 6.0), (nn.Sequential, None)):
        part, other = LoadsItsOwnWay(), LoadsItsOwnWay()
        before = other.norm
        with torch.no_grad():
            part.weight.fill_(2.0)
        root = tmp_path / str(expected)
        saved(root, wrap(part))
        with alone(), Checkpointer(str(root), model=wrap(other)) as saver:
            saver.restore()
        assert torch.equal(part.weight, other.weight)
        assert other.norm == pytest.approx(before if expected is None else expected)


def test_loading_again_marks_no_rows(tmp_path: Path) -> None:
    def build() -> Any:
        model: Any = make_model()
        model.module.loaded = 0

        def count(module: Any, _: object) -> None:
            module.loaded += 1

        model.module.register_load_state_dict_post_hook(count)
        return model

    with alone():
        model, other = build(), build()
        with Checkpointer(str(tmp_path), model=model, policy=Consecutive()) as saver:
            saver.save()
        with Checkpointer(str(tmp_path), model=other, policy=Consecutive()) as saver:
            saver.restore()
            assert other.module.loaded == 1
            saver.steps += 1
            report = saver.save()
    assert (report.kind, report.modified_rows) == ("differential", 0)


def test_an_error_in_loading_is_told(tmp_path: Path) -> None:
    def refuse(*_: object) -> None:
        raise KeyError("vocabulary")

    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    other.register_load_state_dict_post_hook(refuse)
    saved(tmp_path, model)
    with alone(), pytest.raises(ModelPartlyRestored, match="vocabulary"):
        Checkpointer(str(tmp_path), model=other).restore()


class Counting(nn.Linear):
    """A layer with a number beside its parameters, which its state dict shows as a tensor.

    Args:
        as_tensor: turns the number into what the state dict shows.
    """

    def __init__(self, as_tensor: Any = torch.tensor) -> None:
        super().__init__(2, 2)
        self.count, self.as_tensor = 0, as_tensor

    def get_extra_state(self) -> Any:
        return self.as_tensor(self.count)

    def set_extra_state(self, state: Any) -> None:
        self.count = int(state)


def test_extra_state_that_is_a_tensor_comes_back(tmp_path: Path) -> None:
    part, other = Counting(), Counting()
    part.count = 7
    saved(tmp_path, nn.Sequential(part))
    with alone(), Checkpointer(str(tmp_path), model=nn.Sequential(other)) as saver:
        saver.restore()
    assert other.count == 7


def test_what_is_neither_tensor_nor_extra_state_is_refused_at_the_start(tmp_path: Path) -> None:
    expected = r"'0\.count', a dict, which can't be restored .*state object of its own"
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_state_dict_post_hook(
        lambda _, state, prefix, __: state.update({f"{prefix}count": {"count": 1}})
    )
    with alone(), pytest.raises(UnsupportedState, match=expected):
        Checkpointer(str(tmp_path), model=model)


class Growing(nn.Linear):
    """A layer with a buffer of a shape that it has only when it was trained, or loaded.

    Args:
        rows: of the buffer.
    """

    def __init__(self, rows: int = 0) -> None:
        super().__init__(3, 3)
        self.register_buffer("seen", torch.full((rows, 3), 5.0))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.seen = torch.empty_like(state_dict[f"{prefix}seen"])
        super()._load_from_state_dict(state_dict, prefix, *args)


class Hooks(nn.Linear):
    """The same by a hook."""

    def __init__(self, rows: int = 0) -> None:
        super().__init__(3, 3)
        self.register_buffer("seen", torch.full((rows, 3), 5.0))

        def make(module: Any, state: Any, prefix: str, *_: Any) -> None:
            module.seen = torch.empty_like(state[f"{prefix}seen"])

        self.register_load_state_dict_pre_hook(make)


class Packed(nn.Linear):
    """The same as bytes in the extra state, as many as there are rows."""

    def __init__(self, rows: int = 0) -> None:
        super().__init__(3, 3)
        self.seen = torch.full((rows, 3), 5.0)

    def get_extra_state(self) -> torch.Tensor:
        return torch.frombuffer(bytearray(repr(self.seen.tolist()).encode()), dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.seen = torch.tensor(json.loads(state.numpy().tobytes()))


@pytest.mark.parametrize("kind", [Growing, Hooks, Packed])
@pytest.mark.parametrize("parallel", [False, True])
def test_modules_may_load_values_of_another_shape(
    tmp_path: Path, kind: Any, parallel: bool
) -> None:
    def model(rows: int) -> tuple[Any, nn.Module]:
        part = kind(rows)
        whole: Any = make_model()
        if not parallel:
            return part, nn.Sequential(part)
        whole.module.part = part
        return part, whole

    with alone():
        part, whole = model(2)
        saved(tmp_path, whole)
        other, whole = model(0)
        with Checkpointer(str(tmp_path), model=whole) as saver:
            saver.restore()
    assert torch.equal(other.seen, part.seen)
    assert torch.equal(other.weight, part.weight)


def test_buffers_of_each_rank_may_be_loaded_in_another_shape(tmp_path: Path) -> None:
    part, other = Growing(2), Growing()
    with alone():
        with Checkpointer(str(tmp_path), model=part, per_rank_buffers="seen") as saver:
            saver.save()
        with Checkpointer(str(tmp_path), model=other, per_rank_buffers="seen") as saver:
            saver.restore()
    assert torch.equal(other.seen, part.seen)


def test_a_value_of_another_shape_beside_them_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, nn.Sequential(Growing(2), nn.Linear(3, 2)))
    other = nn.Sequential(Growing(), nn.Linear(3, 4))
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with (
        alone(),
        Checkpointer(str(tmp_path), model=other) as saver,
        pytest.raises(IncompatibleCheckpoint, match=r"model\.1\.weight"),
    ):
        saver.restore()
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())


def test_a_step_in_which_tables_are_pruned_is_repeated(tmp_path: Path) -> None:
    """Prune again after going back: TorchRec's module skips the step that it pruned in last."""
    pruning = GenericITEPModule({"t0": 30})
    model = nn.Sequential(nn.Linear(2, 2), pruning)
    saved(tmp_path, model)
    pruning.last_pruned_iter = 5
    with alone(), Checkpointer(str(tmp_path), model=model) as saver:
        saver.restore()
    assert pruning.last_pruned_iter == GenericITEPModule({}).last_pruned_iter
