r"""Train a DLRM on Criteo data with checkpoints, and continue after a restart: the main job.

    torchrun --nproc_per_node 2 -m recipes.dlrm_criteo.train \
        dataset=criteo_tsv dataset.path=train.txt model=dlrm_kaggle checkpoint=check_n_run

Also runs without torchrun, as one process. `configs/train.yaml` and the groups it names list
everything that can be set.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import hydra
import torch
import torch.distributed as dist
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec.distributed.model_parallel import (
    DefaultDataParallelWrapper,
    DistributedModelParallel,
)
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from recipes.dlrm_criteo import final_state
from recipes.dlrm_criteo.distributed import Worker, process_group
from recipes.dlrm_criteo.evaluate import evaluate
from recipes.dlrm_criteo.gate import Gate, GatedDataset
from recipes.dlrm_criteo.model import Architecture, initialise_dense, initialise_tables
from recipes.dlrm_criteo.pipeline import make_pipeline, outputs
from recipes.dlrm_criteo.reader import Reader, to_batch
from recipes.dlrm_criteo.runlog import LoggedDataset, RunLog
from recipes.dlrm_criteo.samples import Dataset, require_whole
from recipes.dlrm_criteo.sharding import Sharder

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
_LEAST = {"batch_size": 1, "log_every": 1, "eval_every": 1, "steps": 1, "eval_samples": 0}
_OPTIONAL = ("eval_every", "steps")
logger = logging.getLogger("recipes.dlrm_criteo.train")  # __name__ is __main__ here


@hydra.main(version_base=None, config_path=str(CONFIGS), config_name="train")
def main(cfg: DictConfig) -> None:
    """Train in the process group that the environment describes."""
    with process_group(cfg.trainer.timeout_seconds) as worker:
        if worker.rank != 0:
            logging.disable(logging.INFO)
        # Concerns TorchRec's own calls, on every rank.
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
        warnings.filterwarnings("ignore", "Please use DTensor instead", FutureWarning)
        Training(cfg, worker).run()


def build(
    cfg: DictConfig, architecture: Architecture, device: torch.device
) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """Build the sharded model and its optimizer in their starting state."""
    model = architecture.build(device)
    return shard(cfg, model, model.model.sparse_arch, device)


def shard(
    cfg: DictConfig, model: nn.Module, tables: nn.Module, device: torch.device
) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """Shard a model and initialise it.

    Args:
        tables: the part of the model that holds all tables, on the meta device.
    """
    initialise_dense(model, cfg.seed)
    # Only the class and the settings of the tables' optimizer: FBGEMM runs it in their backward.
    of_tables: partial[torch.optim.Optimizer] = instantiate(cfg.optimizer.tables)
    apply_optimizer_in_backward(of_tables.func, tables.parameters(), dict(of_tables.keywords))
    plan = instantiate(cfg.sharding)(model, device)
    sharded = DistributedModelParallel(
        model,
        device=device,
        plan=plan,
        sharders=[Sharder()],
        data_parallel_wrapper=DefaultDataParallelWrapper(
            static_graph=False,
            # Otherwise DDP reorders its buckets after an attempt's first step, and so changes the
            # order in which more than two ranks' gradients are added up: a resumed run would not
            # repeat the bits of an uninterrupted one.
            find_unused_parameters=dist.get_world_size() > 2,
        ),
    )
    initialise_tables(sharded, cfg.seed)
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(sharded.named_parameters())),
        instantiate(cfg.optimizer.dense),
    )
    return sharded, CombinedOptimizer([sharded.fused_optimizer, dense])


def check(settings: DictConfig) -> None:
    """Refuse a `trainer` group that no run can obey, before it has trained."""
    for name, least in _LEAST.items():
        if name not in _OPTIONAL or settings[name] is not None:
            require_whole(f"trainer.{name}", settings[name], least)


class Training:
    """An attempt at the job: from the newest checkpoint, or the start, to the last step."""

    def __init__(self, cfg: DictConfig, worker: Worker) -> None:
        check(cfg.trainer)
        torch.manual_seed(cfg.seed)
        self.cfg = cfg
        self.worker = worker
        self.run_dir = Path(cfg.run_dir)
        architecture: Architecture = instantiate(cfg.model)
        self.dataset: Dataset = instantiate(
            cfg.dataset,
            num_embeddings_per_feature=architecture.num_embeddings_per_feature,
            _convert_="all",
        )
        if cfg.trainer.gate is not None:
            gate = Gate(cfg.trainer.gate)
            self.dataset = GatedDataset(self.dataset, gate, cfg.trainer.timeout_seconds)
        self.log = RunLog(self.run_dir, worker.rank)
        self.logged_dataset: LoggedDataset | None = None
        if cfg.trainer.log_samples:
            self.dataset = self.logged_dataset = LoggedDataset(
                self.dataset, self.run_dir, worker.rank, worker.attempt
            )
        # On the CPU: the pipeline moves a batch to the GPU while the previous one is being trained.
        self.reader = Reader(
            self.dataset, cfg.trainer.batch_size, worker.rank, worker.world_size, "cpu"
        )
        self.model, self.optimizer = build(cfg, architecture, worker.device)
        self.pipeline = make_pipeline(
            cfg.trainer.pipeline, self.model, self.optimizer, worker.device
        )

    def run(self) -> None:
        """Restore, train, evaluate, and write the final state if requested."""
        with self.log:
            if self.worker.rank == 0:
                OmegaConf.save(self.cfg, self.run_dir / "config.yaml", resolve=True)
            # A partial: instantiate() would turn the model and the state into nodes of a config.
            checkpointer_of = instantiate(self.cfg.checkpoint, _partial_=True)
            with checkpointer_of(
                model=self.model,
                state={"optimizer": self.optimizer, "reader": self.reader},
                callbacks=[self.log.checkpoint],
            ) as checkpointer:
                self._start(checkpointer, checkpointer.restore())
                self._train(checkpointer)
                step = checkpointer.steps
            self._evaluate(step, final=True)
            if self.cfg.trainer.final_state is not None:
                final_state.save(
                    Path(self.cfg.trainer.final_state),
                    self.model,
                    self.optimizer,
                    progress={"step": step, "samples": self.reader.position},
                )
            self.log.end(step, self.reader.position)

    def _start(self, checkpointer: Any, restored: Any) -> None:
        step, samples = checkpointer.steps, self.reader.position
        if restored is None:
            logger.info("starting from the beginning")
        else:
            logger.info("restored step %d: continuing at sample %d", step, samples)
        pids = [0] * self.worker.world_size
        dist.all_gather_object(pids, os.getpid())
        self.log.start(pids, self.worker.attempt, restored, step, self.cfg.trainer.steps, samples)

    def _train(self, checkpointer: Any) -> None:
        """Train until `trainer.steps` steps are done, over all attempts, or the dataset ends."""
        last = sys.maxsize if self.cfg.trainer.steps is None else self.cfg.trainer.steps
        batches = iter(self.reader)
        while checkpointer.steps < last:
            # The pipeline runs dry before an evaluation, which uses it too.
            until = min(last, self._next_evaluation(checkpointer.steps))
            for output in outputs(self.pipeline, islice(batches, until - checkpointer.steps)):
                self.reader.trained()
                # Log before the checkpointer can make the step durable: a kill must not hide the
                # step.
                self._log_step(checkpointer.steps + 1, output.loss)
                checkpointer.step()
            if checkpointer.steps < until:
                logger.info("the dataset ends after %d samples", self.reader.position)
                return
            if until < last:
                self._evaluate(until, final=False)

    def _next_evaluation(self, step: int) -> int:
        every = self.cfg.trainer.eval_every
        return sys.maxsize if every is None else (step // every + 1) * every

    def _log_step(self, step: int, loss: torch.Tensor) -> None:
        if self.logged_dataset is not None:
            self.logged_dataset.trained(step)
        if step % self.cfg.trainer.log_every == 0:
            mean = loss.detach().double()
            dist.all_reduce(mean)
            self.log.step(step, self.reader.position, mean.item() / self.worker.world_size)

    def _evaluate(self, step: int, final: bool) -> None:
        settings, worker = self.cfg.trainer, self.worker
        samples = self.dataset.read_eval(
            settings.eval_samples,
            settings.batch_size // worker.world_size,
            worker.rank,
            worker.world_size,
        )
        batches = (to_batch(s, torch.device("cpu")) for s in samples)
        score = evaluate(self.model, self.pipeline, batches)
        if score is not None:
            logger.info(
                "after step %d: logloss %.5f, AUC %s on %d held-out samples",
                step,
                score.logloss,
                "undefined" if score.auc is None else f"{score.auc:.5f}",
                score.eval_samples,
            )
            self.log.evaluated(step, self.reader.position, score, final)


if __name__ == "__main__":
    main()
