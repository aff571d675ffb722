"""Change tables while their rows are still copied from a GPU; the GPU is a stand-in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.fake_gpu import DEVICE, FakeGpu, gpu
from tests.unit.tracked_model import TALL, WIDE, make_model, only, table, train
from torchrec_checknrun import Checkpointer, Consecutive
from torchrec_checknrun.errors import SaveFailed

pytestmark = pytest.mark.usefixtures("group")
__all__ = ["gpu"]


class Run:
    """A model that is trained and saved."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.model = make_model()
        options.setdefault("policy", Consecutive())
        self.saver = Checkpointer(root, model=self.model, **options)

    def train(self) -> None:
        train(self.model, a=[[1, 2]], shared=[[3, 4]], b=[[5]])

    def write_by_hand(self, name: str = TALL) -> None:
        with torch.no_grad():
            dict(self.model.named_parameters())[f"{name}.weight"][3] += 1

    def tables(self) -> dict[str, torch.Tensor]:
        return {name: table(self.model, name) for name in (WIDE, TALL)}

    def restored(self, name: str | None = None) -> dict[str, torch.Tensor]:
        """Return the tables as another model finds them in a checkpoint."""
        model: nn.Module = make_model()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(9.0)
        with Checkpointer(self.saver.root, model=model) as other:
            assert other.restore(name) is not None
        return {name: table(model, name) for name in (WIDE, TALL)}


@pytest.fixture
def run(gpu: FakeGpu, tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    made.saver._release(failed=True)


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    for name, weight in wanted.items():
        assert torch.equal(found[name], weight), name


def test_an_update_waits_for_the_copies(gpu: FakeGpu, run: Run) -> None:
    with gpu.held():
        run.saver.save(wait=False)
        wanted = run.tables()
        run.train()
    run.saver.wait()
    assert_equal(run.restored(), wanted)


def test_a_write_by_hand_in_the_middle_fails_the_checkpoint(gpu: FakeGpu, run: Run) -> None:
    with gpu.held():
        run.saver.save(wait=False)
        run.write_by_hand()
    with pytest.raises(SaveFailed, match=r"tall were written outside of training .*writing\("):
        run.saver.wait()
    run.train()  # which goes on
    run.saver.save()
    assert_equal(run.restored(), run.tables())
