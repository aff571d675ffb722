"""Read Criteo data preprocessed to numpy files by TorchRec's scripts (torchrec.datasets.scripts).

Per day (or per Kaggle file) there are <name>_dense.npy, log-transformed, <name>_sparse.npy with ids
not yet taken modulo the table sizes, and <name>_labels.npy. TorchRec's own
InMemoryBinaryCriteoIterDataPipe divides the rows by rank before batching, so the order depends on
the number of ranks and reading can't start in the middle. Only the pipe's mapped access to rows is
used here.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence

import numpy as np
from torchrec.datasets.criteo import CAT_FEATURE_COUNT, INT_FEATURE_COUNT, BinaryCriteoUtils

from recipes.dlrm_criteo.criteo_tsv import CriteoFormatError, natural_order
from recipes.dlrm_criteo.samples import Chunk, ChunkedDataset, Samples


class NpyChunk:
    """The three files of a day, memory-mapped."""

    def __init__(self, dense: str, sparse: str, labels: str, num_embeddings: np.ndarray) -> None:
        self.labels_path = labels
        self.dense = _map(dense, INT_FEATURE_COUNT)
        self.sparse = _map(sparse, CAT_FEATURE_COUNT)
        self.labels = _map(labels, 1)
        self.num_embeddings = num_embeddings
        rows = {
            path: len(a) for path, a in zip((dense, sparse, labels), self._arrays(), strict=True)
        }
        if len(set(rows.values())) > 1:
            raise CriteoFormatError(
                f"these files should have equally many rows, but have {rows}; preprocess them again"
            )

    def _arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.dense, self.sparse, self.labels

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: np.ndarray) -> Samples:
        labels = self.labels[rows, 0]
        wrong = np.flatnonzero((labels != 0) & (labels != 1))
        if len(wrong):
            raise CriteoFormatError(
                f"{self.labels_path}, row {rows[wrong[0]]}: the label is {labels[wrong[0]]}; "
                "expected 0 or 1. (Kaggle's test set has no labels: TorchRec's script writes -1.) "
                "Choose other files with dataset.files, e.g. dataset.files=train"
            )
        # Ids that TorchRec's script stored in 32 bits may be negative: modulo makes them valid.
        return Samples(
            dense=self.dense[rows].astype(np.float32),
            sparse=self.sparse[rows].astype(np.int64) % self.num_embeddings,
            labels=labels.astype(np.float32),
        )


def _map(path: str, columns: int) -> np.ndarray:
    if not os.path.isfile(path):
        raise FileNotFoundError(
            f"{path} is missing; each <name>_dense.npy needs its <name>_sparse.npy and "
            "<name>_labels.npy beside it (other suffix of the ids: dataset.sparse_suffix)"
        )
    try:
        shape = BinaryCriteoUtils.get_shape_from_npy(path)
    except ValueError as error:
        raise CriteoFormatError(f"{path} is not a numpy file ({error}); write it again") from error
    if len(shape) != 2 or shape[1] != columns:
        raise CriteoFormatError(
            f"{path} has shape {shape}; expected (rows, {columns}) as TorchRec's scripts write"
        )
    if shape[0] == 0:
        return np.empty(shape, np.int64)
    try:
        return BinaryCriteoUtils.load_npy_range(path, 0, shape[0], mmap_mode=True)
    except (ValueError, OSError) as error:
        raise CriteoFormatError(f"{path} cannot be mapped ({error}); write it again") from error


class CriteoNpy(ChunkedDataset):
    """The preprocessed Criteo files of a directory, in natural order (day_2 before day_10)."""

    def __init__(
        self,
        num_embeddings_per_feature: Sequence[int],
        path: str,
        eval_path: str | None = None,
        files: str = "*",
        sparse_suffix: str = "sparse",
        holdout_every: int = 10,
        epochs: int = 1,
    ) -> None:
        super().__init__(
            num_embeddings_per_feature, 0 if eval_path is not None else holdout_every, epochs
        )
        self.path = path
        self._chunks = self._open(path, files, sparse_suffix, "dataset.path")
        self._eval_chunks = (
            None
            if eval_path is None
            else self._open(eval_path, files, sparse_suffix, "dataset.eval_path")
        )

    def _open(self, path: str, files: str, sparse_suffix: str, option: str) -> list[NpyChunk]:
        pattern = os.path.join(glob.escape(os.path.expanduser(path)), f"{files}_dense.npy")
        dense_files = sorted(glob.glob(pattern), key=natural_order)
        if not dense_files:
            raise FileNotFoundError(
                f"{option}: no file matches {pattern!r} (searched from {os.getcwd()}); give the "
                "directory that torchrec.datasets.scripts.npy_preproc_criteo wrote its files to"
            )
        names = [file.removesuffix("_dense.npy") for file in dense_files]
        return [
            NpyChunk(
                f"{name}_dense.npy",
                f"{name}_{sparse_suffix}.npy",
                f"{name}_labels.npy",
                self.num_embeddings,
            )
            for name in names
        ]

    def chunks(self) -> Iterator[Chunk]:
        return iter(self._chunks)

    def eval_chunks(self) -> Iterator[Chunk] | None:
        return None if self._eval_chunks is None else iter(self._eval_chunks)

    def describe(self) -> str:
        return f"dataset.path ({self.path})"
