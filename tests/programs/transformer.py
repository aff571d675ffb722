"""Train a transformer over item histories: StepLR, dropout, masking at random.

Modelled on TorchRec's BERT4Rec example: an EmbeddingCollection sharded with a fused optimizer, Adam
with weight decay for all else, one StepLR for both on the wrapped optimizers, epochs that are
shuffled by a sampler, validation after each. Dropout and masks draw from the process's generators.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.programs.live import generators
from tests.programs.session import INTERVAL, AfterStep, Ended, run
from torchrec_checknrun import Checkpointer, CheckpointReport, Consecutive, PerRank

ITEMS, LENGTH, DIM, RATE = 60, 6, 16, 0.01
EPOCHS, BATCH = 4, 8
MASK = ITEMS - 1


class History(nn.Module):
    """A net that predicts masked items in users' histories."""

    def __init__(self) -> None:
        super().__init__()
        table = EmbeddingConfig(
            name="item", embedding_dim=DIM, num_embeddings=ITEMS, feature_names=["item"]
        )
        self.items = EmbeddingCollection(tables=[table], device=torch.device("meta"))
        self.positions = nn.Parameter(torch.randn(LENGTH, DIM))
        layer = nn.TransformerEncoderLayer(DIM, 2, 32, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(DIM, ITEMS)

    def forward(self, histories: KeyedJaggedTensor) -> torch.Tensor:
        items = self.items(histories)["item"].values().view(-1, LENGTH, DIM)
        logits: torch.Tensor = self.out(self.encoder(items + self.positions))
        return logits


class Generators:
    """The process's random number generators."""

    def state_dict(self) -> dict[str, Any]:
        return {
            "torch": torch.get_rng_state(),
            "numpy": np.random.get_state(),
            "python": random.getstate(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["torch"])
        np.random.set_state(state["numpy"])
        random.setstate(state["python"])


def main(root: str, after_step: AfterStep) -> Ended:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(3)
    sharder = EmbeddingCollectionSharder(
        fused_params={
            "optimizer": EmbOptimType.EXACT_ADAGRAD,
            "learning_rate": RATE,
            "weight_decay": 0.01,
        }
    )
    model = DistributedModelParallel(History(), device=torch.device("cpu"), sharders=[sharder])
    tables = set(model.fused_optimizer.params)
    dense = KeyedOptimizerWrapper(
        {name: p for name, p in model.named_parameters() if name not in tables},
        lambda parameters: torch.optim.Adam(parameters, lr=RATE, weight_decay=0.01),
    )
    optimizer = CombinedOptimizer([model.fused_optimizer, dense])
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(20 + dist.get_rank())  # each rank masks and drops on its own

    reports: list[CheckpointReport] = []
    checkpointer = Checkpointer(
        root,
        model=model,
        state={
            "optimizer": optimizer,
            "schedule": schedule,
            "random": PerRank(Generators()),
        },
        policy=Consecutive(),
        every_steps=INTERVAL,
        when_busy="wait",
        callbacks=[reports.append],
    )
    checkpointer.restore()
    resumed_from = checkpointer.steps

    histories = torch.randint(1, MASK, (64, LENGTH), generator=torch.Generator().manual_seed(1))
    data = TensorDataset(histories)
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    # A generator of its own: otherwise each new iterator draws from the one that drops and masks.
    loader = DataLoader(data, BATCH, sampler=sampler, generator=torch.Generator())
    done = resumed_from
    for epoch in range(done // len(loader), EPOCHS):
        sampler.set_epoch(epoch)
        for batch in skip(iter(loader), done % len(loader)):
            optimizer.zero_grad()
            items, labels = mask(batch[0])
            loss = nn.functional.cross_entropy(
                model(jagged(items)).flatten(0, 1), labels.flatten(), ignore_index=0
            )
            loss.backward()
            optimizer.step()
            done += 1
            if done % len(loader) == 0:  # gives a checkpoint between epochs the new rate
                validate(model, histories[:BATCH])
                schedule.step()
            checkpointer.step()
            after_step(done)
    checkpointer.close()
    objects = {
        "model": model,
        "optimizer": optimizer,
        "schedule": schedule,
        "random": generators(),
    }
    return Ended(objects, reports, resumed_from)


def skip(batches: Iterator[Any], count: int) -> Iterator[Any]:
    """Leave out the batches that this epoch has trained already."""
    for _ in range(count):
        next(batches)
    return batches


def mask(histories: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Hide some items, by all three generators; return them as labels, 0 elsewhere."""
    hidden = torch.from_numpy(np.random.rand(*histories.shape) < 0.2)
    hidden[:, random.randrange(LENGTH)] = True
    return histories.masked_fill(hidden, MASK), histories.masked_fill(~hidden, 0)


def jagged(items: torch.Tensor) -> KeyedJaggedTensor:
    lengths = torch.full((len(items),), LENGTH)
    return KeyedJaggedTensor(keys=["item"], values=items.flatten(), lengths=lengths)


def validate(model: nn.Module, histories: torch.Tensor) -> None:
    model.eval()
    with torch.no_grad():
        model(jagged(histories))
    model.train()


if __name__ == "__main__":
    run(main)
