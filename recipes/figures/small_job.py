"""Run a job in this process, a few steps at a time, for the figures.

The main job has the same model, samples and optimizers as `recipes.dlrm_criteo.train`, without its
checkpoints and logs; instead its state can be kept and put back, so that one state can be continued
in several ways.
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
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.optim.keyed import CombinedOptimizer

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
    """A model in training; one rank.

    Args:
        model: its output is a loss, and a loss, logits and labels without gradients.
        optimizer: a ``CombinedOptimizer`` of the fused one and the dense one.
        held_out: batches to evaluate on.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: CombinedOptimizer,
        reader: Reader,
        held_out: Sequence[Batch],
        device: torch.device,
    ) -> None:
        self.reader, self.model, self.optimizer = reader, model, optimizer
        self.held_out = held_out
        self._pipeline = make_pipeline("base", model, optimizer, device)
        kernels, _ = find_kernels(model)
        self.shards: list[LocalShard] = [shard for kernel in kernels for shard in kernel.shards]
        tables = {name for name, _ in model.named_parameters() if ".embedding_bags." in name}
        self._dense = {n: p for n, p in model.named_parameters() if n not in tables}

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
        score = evaluate(self.model, self._pipeline, iter(self.held_out))
        assert score is not None, "no held-out samples"
        return score

    @torch.no_grad()
    def predict(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits and labels of the held-out samples, float64 on the CPU."""
        self.model.eval()
        found = [
            (output.logits.cpu().double().view(-1), output.labels.cpu().double().view(-1))
            for output in outputs(self._pipeline, iter(self.held_out))
        ]
        self.model.train()
        logits, labels = zip(*found, strict=True)
        return torch.cat(logits), torch.cat(labels)

    @torch.no_grad()
    def loss(self) -> float:
        """Return the loss that is trained, of the held-out samples."""
        self.model.eval()
        found = [float(output.loss) for output in outputs(self._pipeline, iter(self.held_out))]
        self.model.train()
        return sum(found) / len(found)

    @torch.no_grad()
    def disturb(self, level: float, generator: torch.Generator) -> None:
        """Change every table value by a random part of about ``level``."""
        for shard in self.shards:
            size, device = shard.weight.shape, shard.weight.device
            noise = torch.randn(size, generator=generator, device=device)
            shard.weight.mul_(noise.mul_(level).add_(1))

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


def relative(score: Score, control: Score) -> tuple[float, float]:
    """Return the relative changes of logloss and AUC."""
    assert score.auc is not None, "held-out labels are all the same"
    assert control.auc is not None
    return score.logloss / control.logloss - 1, score.auc / control.auc - 1


@contextmanager
def process(overrides: Sequence[str]) -> Iterator[tuple[DictConfig, Worker]]:
    """Read the settings (`configs/train.yaml`) with some changed, in a process group of its own.

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
            torch.manual_seed(cfg.seed)
            yield cfg, worker
    finally:
        torch.set_num_threads(threads)


@contextmanager
def small_job(overrides: Sequence[str]) -> Iterator[SmallJob]:
    """Make the main job with changed settings, in a ``process`` of its own."""
    with process(overrides) as (cfg, worker):
        architecture: Architecture = instantiate(cfg.model)
        dataset: Dataset = instantiate(
            cfg.dataset,
            num_embeddings_per_feature=architecture.num_embeddings_per_feature,
            _convert_="all",
        )
        batch = cfg.trainer.batch_size
        reader = Reader(dataset, batch, worker.rank, worker.world_size, "cpu")
        model, optimizer = build(cfg, architecture, worker.device)
        held_out = [
            to_batch(samples, torch.device("cpu"))
            for samples in dataset.read_eval(cfg.trainer.eval_samples, batch, 0, 1)
        ]
        yield SmallJob(model, optimizer, reader, held_out, worker.device)
