"""The server's TorchScript predicts what the model does, bit for bit."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from torch import nn

from recipes.dlrm_criteo.reader import to_batch
from recipes.dlrm_criteo.samples import Samples
from recipes.dlrm_criteo.serve import CONFIGS, inference_model
from recipes.dlrm_criteo.serving.script import script
from tests.examples import some_of
from tests.scripting import SCRIPTS
from torchrec_checknrun.serve.inference.kernels import find_kernels

CROSS = "model.cross={_target_: recipes.dlrm_criteo.model.CrossNetwork, layers: 2, rank: 8}"


def architecture(*overrides: str) -> Any:
    with initialize_config_dir(str(CONFIGS), version_base=None):
        return instantiate(compose("serve", ["root=none", "model.scale=0.001", *overrides]).model)


def fill(model: nn.Module) -> None:
    """Give rows and parameters that tell one from another."""
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -1, 1)
    for _, kernel, _ in find_kernels(model):
        kernel.weights_host.random_(0, 50)


@SCRIPTS
@pytest.mark.parametrize(("cross", "bits"), some_of(product([False, True], [32, 8, 4, 2]), 1, 4, 6))
def test_the_same_predictions(bits: int, cross: bool) -> None:
    built = architecture(*[CROSS] * cross)
    rows = np.array(built.num_embeddings_per_feature)
    model = inference_model(built, bits)
    fill(model)
    draw = np.random.default_rng(0)
    questions = [
        to_batch(
            Samples(
                draw.normal(size=(count, 13)).astype(np.float32),
                draw.integers(0, rows, size=(count, 26)),
                np.zeros(count, np.float32),
            ),
            torch.device("cpu"),
        )
        for count in (1, 7, 7, 2, 40)
    ]
    with torch.inference_mode():
        wanted = [model(each.dense_features, each.sparse_features) for each in questions]
    scripted = script(model)
    with torch.inference_mode(), torch.jit.optimized_execution(False):
        found = [scripted(each.dense_features, each.sparse_features) for each in questions]
    assert all(map(torch.equal, found, wanted))
    assert len({float(answer[0]) for answer in wanted}) > 1
