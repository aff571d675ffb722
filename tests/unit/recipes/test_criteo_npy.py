"""Read Criteo files that TorchRec's own scripts have preprocessed."""

from __future__ import annotations

from math import log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from torchrec.datasets.criteo import BinaryCriteoUtils, InMemoryBinaryCriteoIterDataPipe

from recipes.dlrm_criteo.criteo_npy import CriteoNpy
from recipes.dlrm_criteo.criteo_tsv import CriteoFormatError
from recipes.dlrm_criteo.samples import Samples
from tests.unit.streams import SIZES, Row, assert_equal, expected, join, random_rows

ROOT = Path(__file__).parents[3]


def preprocess(rows: list[Row], folder: Path, name: str) -> None:
    """Preprocess a file as torchrec.datasets.scripts.npy_preproc_criteo does."""
    source = folder / f"{name}.tsv"
    source.write_bytes(b"".join(row.line() + b"\n" for row in rows))
    outputs = [str(folder / f"{name}_{part}.npy") for part in ("dense", "sparse", "labels")]
    BinaryCriteoUtils.tsv_to_npys(str(source), *outputs)


def save(folder: Path, name: str, **changes: Any) -> None:
    """Save six samples; `changes` replace arrays."""
    arrays = {
        "dense": np.ones((6, 13), np.float32),
        "sparse": np.ones((6, 26), np.int32),
        "labels": np.ones((6, 1), np.int32),
        **changes,
    }
    for part, array in arrays.items():
        np.save(folder / f"{name}_{part}.npy", array)


def read_all(folder: Path, **options: Any) -> Samples:
    dataset = CriteoNpy(SIZES, str(folder), **{"holdout_every": 0, **options})
    return join(list(dataset.read(0, 1, 0, 1)))


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    # TorchRec's script keeps 32-bit integers and shifts each file so that its minimum becomes 2.
    return [Row(r.label, [(v or 0) % 10**6 - 2 for v in r.dense], r.ids) for r in random_rows(60)]


def test_reads_what_torchrecs_script_wrote(tmp_path: Path, rows: list[Row]) -> None:
    for day, part in ((2, rows[:20]), (10, rows[20:])):
        preprocess(part, tmp_path, f"day_{day}")
    samples = read_all(tmp_path)
    assert_equal(samples, samples._replace(**expected(rows)._asdict() | {"dense": samples.dense}))
    for part, got in ((rows[:20], samples.dense[:20]), (rows[20:], samples.dense[20:])):
        least = min(v or 0 for row in part for v in row.dense)
        wanted = [[log((v or 0) - least + 2) for v in row.dense] for row in part]
        np.testing.assert_allclose(got, wanted, rtol=1e-6)
    assert [a.dtype for a in samples] == [np.float32, np.int64, np.float32]


def test_same_samples_as_torchrecs_datapipe(tmp_path: Path, rows: list[Row]) -> None:
    preprocess(rows, tmp_path, "train")
    paths = [[str(tmp_path / f"train_{part}.npy")] for part in ("dense", "sparse", "labels")]
    pipe = InMemoryBinaryCriteoIterDataPipe(
        "train", *paths, batch_size=10, rank=0, world_size=1, hashes=SIZES
    )
    dataset = CriteoNpy(SIZES, str(tmp_path), holdout_every=0)
    batches = list(dataset.read(0, 10, 0, 1))
    for got, theirs in zip(batches, pipe, strict=True):
        wanted = theirs.sparse_features.values().reshape(26, 10).T
        assert np.array_equal(got.sparse, wanted.numpy())
        assert np.array_equal(got.dense, theirs.dense_features.numpy())
        assert np.array_equal(got.labels, theirs.labels.numpy())


def test_files_are_mapped_not_loaded(tmp_path: Path) -> None:
    save(tmp_path, "day_0")
    (chunk,) = CriteoNpy(SIZES, str(tmp_path))._chunks
    for array in (chunk.dense, chunk.sparse, chunk.labels):
        assert isinstance(array, np.memmap)
        assert not array.flags.writeable


def test_negative_32_bit_ids_are_mapped_into_the_tables(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(-(2**31), 2**31, (6, 26)).astype(np.int32)
    save(tmp_path, "day_0", sparse=ids)
    wanted = [[int(v) % n for v, n in zip(row, SIZES, strict=True)] for row in ids]
    assert read_all(tmp_path).sparse.tolist() == wanted


def test_names_and_suffixes_can_be_chosen(tmp_path: Path) -> None:
    save(tmp_path, "train")
    save(tmp_path, "test", labels=np.full((6, 1), -1, np.int32))
    np.save(tmp_path / "train_sparse_contig_freq.npy", np.full((6, 26), 2))
    assert len(read_all(tmp_path, files="train").labels) == 6
    chosen = read_all(tmp_path, files="train", sparse_suffix="sparse_contig_freq")
    assert (chosen.sparse == 2).all()
    # Kaggle's test set carries -1 for labels.
    with pytest.raises(CriteoFormatError, match=r"test_labels\.npy, row 0: .* -1; .*files=train"):
        read_all(tmp_path)


def test_eval_path_is_evaluated_and_all_of_path_trained(tmp_path: Path) -> None:
    for name, value in (("train", 1), ("eval", 2)):
        (tmp_path / name).mkdir()
        save(tmp_path / name, "day_0", sparse=np.full((6, 26), value))
    dataset = CriteoNpy(SIZES, str(tmp_path / "train"), eval_path=str(tmp_path / "eval"))
    trained = join(list(dataset.read(0, 2, 0, 1)))
    evaluated = join(list(dataset.read_eval(100, 2, 0, 1)))
    assert len(trained.labels) == len(evaluated.labels) == 6
    assert (trained.sparse == 1).all()
    assert (evaluated.sparse == 2).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dense": np.ones((6, 12))}, r"dense\.npy has shape \(6, 12\); expected \(rows, 13\)"),
        ({"sparse": np.ones((6, 27), int)}, r"sparse\.npy has shape \(6, 27\); expected"),
        ({"labels": np.ones(6, int)}, r"labels\.npy has shape \(6,\); expected \(rows, 1\)"),
        ({"labels": np.ones((5, 1), int)}, "equally many rows, but have .*day_0_labels.npy': 5"),
        ({"labels": np.full((6, 1), 2)}, r"labels\.npy, row 0: the label is 2; expected 0 or 1"),
        ({"labels": np.full((6, 1), "1", object)}, r"labels\.npy cannot be mapped"),
    ],
)
def test_wrong_arrays_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    save(tmp_path, "day_0", **changes)
    with pytest.raises(CriteoFormatError, match=message):
        read_all(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"1\t2\t3\n", "is not a numpy file"),
        (b"", "is not a numpy file"),
        (None, "cannot be mapped"),
    ],
    ids=["text", "empty", "cut off"],
)
def test_damaged_files_are_named(tmp_path: Path, content: bytes | None, message: str) -> None:
    save(tmp_path, "day_0")
    path = tmp_path / "day_0_dense.npy"
    path.write_bytes(path.read_bytes()[:-50] if content is None else content)
    with pytest.raises(CriteoFormatError, match=rf"day_0_dense\.npy {message}"):
        read_all(tmp_path)


def test_missing_files_say_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"dataset\.path: no file matches .*\*_dense\.npy"):
        CriteoNpy(SIZES, str(tmp_path))
    save(tmp_path, "day_0")
    (tmp_path / "day_0_labels.npy").unlink()
    with pytest.raises(FileNotFoundError, match=r"day_0_labels\.npy is missing; each "):
        CriteoNpy(SIZES, str(tmp_path))


def test_hydra_makes_it_from_its_config(tmp_path: Path) -> None:
    save(tmp_path, "day_0")
    with initialize_config_dir(str(ROOT / "configs" / "dataset"), version_base="1.3"):
        cfg = compose("criteo_npy", overrides=[f"path={tmp_path}"])
    dataset = instantiate(cfg, num_embeddings_per_feature=SIZES)
    assert isinstance(dataset, CriteoNpy)
    assert len(next(dataset.read(0, 6, 0, 2)).labels) == 3
