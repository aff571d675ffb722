"""Let programs swap the tensors of parameters, as PyTorch's conversions may; save the new ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel

from tests.unit.tracked_model import Model, batch
from torchrec_checknrun import Checkpointer, Images


class Net(nn.Module):
    """Tables and two layers, which aren't wrapped."""

    def __init__(self) -> None:
        super().__init__()
        self.sparse, self.hidden, self.out = Model(), nn.Linear(32, 4), nn.Linear(4, 1)

    def forward(self, **bags: list[list[int]]) -> torch.Tensor:
        out: torch.Tensor = self.out(self.hidden(self.sparse(batch(**bags)))).square().sum()
        return out


@pytest.fixture(autouse=True)
def swapping() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def swap_one(net: Net) -> None:
    other = nn.Parameter(net.out.weight.detach() + 1)
    torch.utils.swap_tensors(net.out.weight, other)


def load(net: Net) -> None:
    net.hidden.load_state_dict({k: v + 1 for k, v in net.hidden.state_dict().items()})


WAYS: dict[str, Callable[[Net], object]] = {
    "one tensor": swap_one,
    "load_state_dict": load,
    "another dtype and back": lambda net: (net.out.double(), net.out.float()),
}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("images", [False, True], ids=["heap", "images"])
@pytest.mark.parametrize("way", WAYS)
def test_new_values_are_saved(tmp_path: Path, way: str, images: bool) -> None:
    def make(folder: str, images: bool) -> tuple[Any, Any, Checkpointer]:
        torch.manual_seed(0)
        model: Any = DistributedModelParallel(
            Net(), device=torch.device("cpu"), init_data_parallel=False
        )
        net = model.module
        layers = [*net.hidden.parameters(), *net.out.parameters()]
        optimizer = torch.optim.Adam(layers, lr=0.1)
        survive = Images(folder=str(tmp_path)) if images else None
        root = tmp_path / folder
        saver = Checkpointer(root, model=model, state={"dense": optimizer}, survive=survive)
        return model, optimizer, saver

    def train(model: Any, optimizer: Any, saver: Checkpointer) -> None:
        optimizer.zero_grad()
        model(a=[[1, 2]], shared=[[3]], b=[[4]]).backward()
        optimizer.step()
        saver.step()

    one = make("root", images)
    with one[2] as saver:
        saver.restore()
        train(*one)
        saver.save()
        train(*one)
        one[1].zero_grad()  # a gradient's node holds its parameter
        WAYS[way](one[0].module)
        train(*one)
        saver.save()
    other = make("root", images=False)
    with other[2] as saver:
        assert saver.restore() is not None
        train(*one[:2], saver=saver)
        train(*other)
    for left, right in zip(one[0].parameters(), other[0].parameters(), strict=True):
        assert torch.equal(left, right)
