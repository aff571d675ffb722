"""Run the main job in this process, a few steps at a time, for the figures.

The same model, samples and optimizers as `recipes.dlrm_criteo.train`, without its checkpoints and
logs; instead its state can be kept and put back, so that one state can be continued in several
ways.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import DictConfig
from torchrec.datasets.utils import Batch

from recipes.dlrm_criteo.distributed import Worker, process_group
from recipes.dlrm_criteo.evaluate import Score, evaluate
from recipes.dlrm_criteo.model import Architecture
from recipes.dlrm_criteo.pipeline import make_pipeline, outputs
from recipes.dlrm_criteo.reader import Reader, to_batch
from recipes.dlrm_criteo.samples import Dataset
from recipes.dlrm_criteo.train import CONFIGS, build
from torchrec_checknrun.model.kernels import find_kernels
from torchrec_checknrun.shards import LocalShard


@dataclass(frozen=True)
class State:
    """A copy of everything that training changes."""

    tables: list[torch.Tensor]
    """Weights and fused optimizer states, in the order of ``SmallJob.shards``."""
    dense: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    position: int


class SmallJob:
    """A model in training; one rank."""

    def __init__(self, cfg: DictConfig, worker: Worker) -> None:
        torch.manual_seed(cfg.seed)
        architecture: Architecture = instantiate(cfg.model)
        dataset: Dataset = instantiate(
            cfg.dataset,
            num_embeddings_per_feature=architecture.num_embeddings_per_feature,
            _convert_="all",
        )
        batch = cfg.trainer.batch_size
        self.reader = Reader(dataset, batch, worker.rank, worker.world_size, "cpu")
        self.model, self.optimizer = build(cfg, architecture, worker.device)
        self._pipeline = make_pipeline("base", self.model, self.optimizer, worker.device)
        self._held_out = [
            to_batch(samples, torch.device("cpu"))
            for samples in dataset.read_eval(cfg.trainer.eval_samples, batch, 0, 1)
        ]
        kernels, _ = find_kernels(self.model)
        self.shards: list[LocalShard] = [shard for kernel in kernels for shard in kernel.shards]
        tables = {name for name, _ in self.model.named_parameters() if ".embedding_bags." in name}
        self._dense = {n: p for n, p in self.model.named_parameters() if n not in tables}

    def batches(self, count: int) -> list[Batch]:
        """Return the next batches, to be trained once or several times."""
        return list(islice(iter(self.reader), count))

    def train(self, batches: Sequence[Batch], each: Callable[[], object] = lambda: None) -> None:
        """Train these batches; ``each`` is called after every step."""
        for _ in outputs(self._pipeline, iter(batches)):
            self.reader.trained()
            each()

    def evaluate(self) -> Score:
        """Return logloss and AUC on the held-out samples."""
        score = evaluate(self.model, self._pipeline, iter(self._held_out))
        assert score is not None, "no held-out samples"
        return score

    @torch.no_grad()
    def keep(self) -> State:
        """Copy the present state."""
        return State(
            tables=[tensor.clone() for shard in self.shards for tensor in shard.tensors],
            dense={name: parameter.clone() for name, parameter in self._dense.items()},
            optimizer=copy.deepcopy(self._dense_optimizer.state_dict()),
            position=self.reader.position,
        )

    @torch.no_grad()
    def put_back(self, state: State) -> None:
        """Continue from a kept state."""
        own = [tensor for shard in self.shards for tensor in shard.tensors]
        for tensor, kept in zip(own, state.tables, strict=True):
            # Unnoticed by trackers: rows that differ were trained since, and so are marked already.
            tensor.data.copy_(kept)
        for name, parameter in self._dense.items():
            parameter.copy_(state.dense[name])
        self._dense_optimizer.load_state_dict(copy.deepcopy(state.optimizer))
        self.reader.position = state.position

    @property
    def _dense_optimizer(self) -> torch.optim.Optimizer:
        # The tables' own optimizer has no state outside of the shards (row-wise Adagrad and SGD).
        return self.optimizer.optimizers[1][1]


@contextmanager
def small_job(overrides: Sequence[str]) -> Iterator[SmallJob]:
    """Make the job with changed settings (`configs/train.yaml`), in a process group of its own.

    One thread of torch: on such small steps more threads cost more than they gain, and the bits of
    a run don't depend on the machine's number of cores.
    """
    with initialize_config_dir(str(CONFIGS), version_base=None):
        cfg = compose("train", list(overrides))
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    warnings.filterwarnings("ignore", "Please use DTensor instead", FutureWarning)
    # Hides warnings that TorchRec traces the model
    logging.getLogger("torch.fx").setLevel(logging.ERROR)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with process_group(cfg.trainer.timeout_seconds) as worker:
            yield SmallJob(cfg, worker)
    finally:
        torch.set_num_threads(threads)
