"""Find a model's state at every step, whatever parts of it were replaced since the last."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.memory.pieces import joined
from torchrec_checknrun.memory.model_content import ModelContent
from torchrec_checknrun.model.dense_model import DenseModel
from torchrec_checknrun.model.module_tree import ModuleTree
from torchrec_checknrun.model.tracked import TrackedModel


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
        self.register_buffer("average", None)
        self.register_buffer("seen", torch.zeros(9))


def replace_a_layer(model: Any) -> None:
    model.layers[2] = nn.Linear(2, 1)


def add_a_layer(model: Any) -> None:
    model.layers.append(nn.Linear(1, 1))


def make_a_buffer(model: Any) -> None:
    model.average = torch.full((3,), 7.0)


def drop_a_buffer(model: Any) -> None:
    model.seen = None


def cut_a_buffer(model: Any) -> None:
    model.seen.data = model.seen.data[:5]


def replace_memory(model: Any) -> None:
    model.layers[0].weight.data = torch.ones(2, 3)


def replace_a_parameter(model: Any) -> None:
    model.layers[0].weight = nn.Parameter(torch.ones(2, 3))


def write_in_place(model: Any) -> None:
    model.seen.fill_(4.0)
    model.layers(torch.randn(5, 3))


@pytest.fixture
def tracked() -> Iterator[TrackedModel]:
    made = TrackedModel(nn.Module())
    yield made
    made.close()


@pytest.mark.parametrize(
    "change",
    [
        replace_a_layer,
        add_a_layer,
        make_a_buffer,
        drop_a_buffer,
        cut_a_buffer,
        replace_memory,
        replace_a_parameter,
        write_in_place,
    ],
)
def test_the_content_is_the_present_one(
    change: Callable[[Any], None], tracked: TrackedModel
) -> None:
    model = Model()
    content = ModelContent(DenseModel(model, tracked, ModuleTree(model)))
    before = content.pieces()
    old = joined(before)
    assert content.pieces() is before  # nothing was replaced: the model is not asked again
    change(model)
    now = joined(content.pieces())
    anew = DenseModel(model, tracked, ModuleTree(model))
    assert now == joined(ModelContent(anew).pieces())
    assert now != old
