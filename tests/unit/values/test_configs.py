"""Configs of OmegaConf, as Hydra hands them to optimizers, are stored as lists and dicts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import ListConfig, OmegaConf

from torchrec_checknrun import Checkpointer
from torchrec_checknrun.errors import UnsupportedState
from torchrec_checknrun.values.state import decode_state, encode_state

CONFIG = OmegaConf.create(
    {
        "optimizer": {"betas": [0.9, "${low}"], "eps": None},
        "low": 0.5,
        "wanted": "???",
        "text": r"\${low}",
    }
)


def test_the_content_comes_back_plain() -> None:
    tree, pieces = encode_state([CONFIG, {"betas": CONFIG.optimizer.betas}], "state")
    found, of_list = decode_state(tree, b"".join(pieces))
    optimizer = {"betas": [0.9, 0.5], "eps": None}
    assert found == {"optimizer": optimizer, "low": 0.5, "wanted": "???", "text": "${low}"}
    assert of_list == {"betas": [0.9, 0.5]}
    assert {type(found), type(found["optimizer"])} == {dict}
    assert type(of_list["betas"]) is list


def test_a_config_that_can_t_be_resolved_is_named() -> None:
    config = OmegaConf.create({"betas": [0.9, "${high}"]})
    with pytest.raises(UnsupportedState, match=r"state\.options.*ListConfig.*high.*to_container"):
        encode_state({"options": config.betas}, "state")


def made(layer: torch.nn.Linear, betas: list[float]) -> torch.optim.RAdam:
    config = {"_target_": "torch.optim.RAdam", "_partial_": True, "betas": betas}
    optimizer: torch.optim.RAdam = instantiate(OmegaConf.create(config))(layer.parameters())
    assert type(optimizer.param_groups[0]["betas"]) is ListConfig
    return optimizer


@pytest.mark.usefixtures("one_rank")
def test_an_optimizer_that_hydra_made_comes_back(tmp_path: Path) -> None:
    layer = torch.nn.Linear(2, 2)
    optimizer = made(layer, [0.9, 0.5])
    with Checkpointer(tmp_path, model=layer, state={"optimizer": optimizer}) as saver:
        layer(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        saver.save()
    other = torch.nn.Linear(2, 2)
    restored = made(other, [0.1, 0.2])
    with Checkpointer(tmp_path, model=other, state={"optimizer": restored}) as saver:
        saver.restore()
    assert restored.param_groups[0]["betas"] == [0.9, 0.5]
    assert torch.equal(
        restored.state[other.weight]["exp_avg"], optimizer.state[layer.weight]["exp_avg"]
    )
