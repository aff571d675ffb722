"""Give the recipe's models the published sizes, and initial values that only the seed decides."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import DictConfig
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist
from torchrec.models.dlrm import DLRM_DCN

from recipes.dlrm_criteo.evaluate import score
from recipes.dlrm_criteo.model import CHUNK_ROWS, Architecture, initialise_dense, table_values
from recipes.dlrm_criteo.pipeline import make_pipeline
from recipes.dlrm_criteo.train import CONFIGS, check

CPU = torch.device("cpu")
META = torch.device("meta")


def configured(*overrides: str) -> DictConfig:
    with initialize_config_dir(config_dir=str(CONFIGS), version_base=None):
        return compose("train", overrides=list(overrides))


def architecture(name: str, *overrides: str) -> Architecture:
    built = instantiate(configured(f"model={name}", *overrides).model)
    assert isinstance(built, Architecture)
    return built


@pytest.mark.parametrize(
    ("name", "rows", "largest", "gigabytes", "bottom", "top"),
    [
        (
            "dlrm_kaggle",
            33_762_577,
            10_131_227,
            2.16,
            [(512, 13), (256, 512), (64, 256), (16, 64)],
            [(512, 367), (256, 512), (1, 256)],
        ),
        (
            "dlrm_terabyte",
            187_767_399,
            39_979_771,
            96.1,
            [(512, 13), (256, 512), (128, 256)],
            [(1024, 479), (1024, 1024), (512, 1024), (256, 512), (1, 256)],
        ),
        (
            "dlrm_dcnv2",
            204_184_588,
            40_000_000,
            104.54,
            [(512, 13), (256, 512), (128, 256)],
            [(1024, 27 * 128), (1024, 1024), (512, 1024), (256, 512), (1, 256)],
        ),
    ],
)
def test_models_have_the_published_sizes(
    name: str,
    rows: int,
    largest: int,
    gigabytes: float,
    bottom: list[tuple[int, int]],
    top: list[tuple[int, int]],
) -> None:
    model = architecture(name).build(META)
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters() if p.is_meta}
    assert len(shapes) == len(list(model.parameters()))  # on the meta device
    tables = [shape for n, shape in shapes.items() if ".embedding_bags." in n]
    assert len(tables) == 26
    assert sum(shape[0] for shape in tables) == rows
    assert max(shape[0] for shape in tables) == largest
    assert sum(4 * r * d for r, d in tables) / 1e9 == pytest.approx(gigabytes, rel=0.002)
    for arch, expected in (("dense_arch", bottom), ("over_arch", top)):
        assert [s for n, s in shapes.items() if arch in n and len(s) == 2] == expected


def test_dcnv2_has_three_cross_layers_of_rank_512() -> None:
    model = architecture("dlrm_dcnv2").build(META)
    assert isinstance(model.model, DLRM_DCN)
    shapes = [tuple(p.shape) for n, p in model.named_parameters() if "crossnet" in n]
    assert shapes == [(3456, 512)] * 3 + [(512, 3456)] * 3 + [(3456,)] * 3


def test_tiny_is_kaggle_scaled_down() -> None:
    tiny, kaggle = architecture("dlrm_tiny"), architecture("dlrm_kaggle")
    sizes = list(
        zip(tiny.num_embeddings_per_feature, kaggle.num_embeddings_per_feature, strict=True)
    )
    assert 100_000 < sum(small for small, _ in sizes) < 300_000
    assert all(small == max(3, round(large * tiny.scale)) for small, large in sizes)


@pytest.mark.parametrize("name", ["dlrm_tiny", "dlrm_kaggle", "dlrm_terabyte", "dlrm_dcnv2"])
def test_scale_keeps_three_rows(name: str) -> None:
    assert architecture(name, "model.scale=1e-9").num_embeddings_per_feature == [3] * 26


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.scale=0", "model.scale is 0"),
        ("model.cardinalities=[3,4]", "expected 26 numbers"),
        ("model.bottom_mlp=[64,32]", "model.embedding_dim, 16"),
        ("model.top_mlp=[64,2]", "model.top_mlp is"),
        ("model.top_mlp=[1]", "at least two layers"),
    ],
)
def test_impossible_models_are_refused(override: str, message: str) -> None:
    with pytest.raises(Exception, match=message):
        architecture("dlrm_tiny", override)


@pytest.mark.parametrize("override", ["trainer.stepz=1", "model.dims=8", "shardings=row_wise"])
def test_a_misspelt_setting_fails(override: str) -> None:
    with pytest.raises(Exception, match="Could not override"):
        configured(override)


@pytest.mark.parametrize("name", ["batch_size", "log_every", "eval_every", "steps"])
def test_settings_below_one_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"trainer.{name} is 0; expected a whole number, 1 or"):
        check(configured(f"trainer.{name}=0").trainer)


@pytest.mark.parametrize(
    "setting", ["eval_samples=null", "eval_samples=-1", "log_every=null", "steps=1e3"]
)
def test_settings_that_training_would_end_with_are_refused(setting: str) -> None:
    """Refuse at the start what the first step, or the evaluation after the last, would fail on."""
    with pytest.raises(ValueError, match=r"trainer\.\w+ is [\w.-]+; expected a whole number"):
        check(configured(f"trainer.{setting}").trainer)
    check(configured("trainer.eval_samples=0", "trainer.steps=null").trainer)


def test_dense_starting_values_follow_the_reference() -> None:
    models = [architecture("dlrm_kaggle").build(CPU) for _ in range(2)]
    for model in models:
        initialise_dense(model, seed=7)
    dense = {n: p for n, p in models[0].named_parameters() if not p.is_meta}
    assert len(dense) == 14
    for name, parameter in models[1].named_parameters():
        if not parameter.is_meta:
            assert torch.equal(parameter, dense[name])
    for parameter in dense.values():
        if parameter.numel() > 1000:
            spread = math.sqrt(2 / sum(parameter.shape))
            assert parameter.std().item() == pytest.approx(spread, rel=0.1)
    name = "model.dense_arch.model._mlp.0._linear.bias"
    bias = dense[name]
    assert bias.std().item() == pytest.approx(math.sqrt(1 / 512), rel=0.2)
    initialise_dense(models[1], seed=8)
    assert not torch.equal(dict(models[1].named_parameters())[name], bias)


def test_a_cross_network_starts_without_bias() -> None:
    model = architecture("dlrm_dcnv2", "model.scale=1e-6", "model.cross.rank=8").build(CPU)
    initialise_dense(model, seed=0)
    for name, parameter in model.named_parameters():
        if "crossnet" in name:
            assert (parameter == 0).all() == (parameter.dim() == 1)


def values(seed: int, name: str, row: int, rows: int) -> np.ndarray:
    shape = (CHUNK_ROWS + 100, 4)
    pieces = list(table_values(seed, name, shape, row, rows))
    assert [first for first, _ in pieces] == [row, *(CHUNK_ROWS for _ in pieces[1:])]
    return np.concatenate([piece for _, piece in pieces])


def test_a_row_starts_the_same_in_every_shard() -> None:
    whole = values(0, "t", 0, CHUNK_ROWS + 100)
    bound = 1 / math.sqrt(CHUNK_ROWS + 100)
    assert np.abs(whole).max() <= bound * (1 + 1e-6)
    assert whole.std() == pytest.approx(bound / math.sqrt(3), rel=0.01)
    assert abs(whole.mean()) < bound * 0.01
    for row, rows in ((0, 10), (5, CHUNK_ROWS), (CHUNK_ROWS - 1, 2), (CHUNK_ROWS, 100)):
        np.testing.assert_array_equal(values(0, "t", row, rows), whole[row : row + rows])
    assert list(table_values(0, "t", (9, 4), 9, 0)) == []  # a rank without rows


def test_tables_seeds_and_chunks_start_differently() -> None:
    first = values(0, "t", 0, 100)
    others = [values(1, "t", 0, 100), values(0, "u", 0, 100), values(0, "t", CHUNK_ROWS, 100)]
    assert all(abs(np.corrcoef(first.ravel(), o.ravel())[0, 1]) < 0.2 for o in others)


def test_pipeline_by_name() -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    assert isinstance(make_pipeline("auto", model, optimizer, CPU), TrainPipelineBase)
    pipeline = make_pipeline("sparse_dist", model, optimizer, CPU)
    assert isinstance(pipeline, TrainPipelineSparseDist)
    with pytest.raises(ValueError, match="expected auto, base or sparse_dist"):
        make_pipeline("fast", model, optimizer, CPU)


def test_score_against_pairs_counted_one_by_one() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(300, generator=generator, dtype=torch.float64).round(decimals=1)
    labels = (torch.rand(300, generator=generator) < logits.sigmoid()).double()
    ahead = logits[labels == 1][:, None] - logits[labels == 0][None, :]
    result = score(logits, labels)
    assert result.eval_samples == 300
    assert result.auc == pytest.approx(((ahead > 0) + 0.5 * (ahead == 0)).double().mean().item())
    chance = logits.sigmoid()
    loss = -(labels * chance.log() + (1 - labels) * (1 - chance).log()).mean().item()
    assert result.logloss == pytest.approx(loss)
    assert score(logits, torch.ones(300, dtype=torch.float64)).auc is None


def test_configs_name_no_place_of_this_machine(tmp_path: Path) -> None:
    config = configured()
    assert config.run_dir == "runs/dlrm"
    assert config.checkpoint.root == "runs/dlrm/checkpoints"
    moved = configured(f"run_dir={tmp_path}", "checkpoint=check_n_run")
    assert moved.checkpoint.root == f"{tmp_path}/checkpoints"
