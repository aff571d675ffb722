"""Make a small DLRM and its data for the other examples; nothing here is about checkpoints."""

from collections.abc import Iterator

import torch
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

ROWS = {"user": 5000, "item": 3000}
DEVICE = torch.device("cpu")


def make_model() -> tuple[DistributedModelParallel, torch.optim.Optimizer]:
    """Return a sharded model and the optimizer of the rest: the backward pass trains the tables."""
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(name=name, embedding_dim=16, num_embeddings=rows, feature_names=[name])
        for name, rows in ROWS.items()
    ]
    collection = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    apply_optimizer_in_backward(RowWiseAdagrad, collection.parameters(), {"lr": 0.05})
    net: nn.Module = DLRMTrain(DLRM(collection, 4, [32, 16], [32, 1], dense_device=DEVICE))
    model = DistributedModelParallel(net, device=DEVICE)
    dense = [p for name, p in model.named_parameters() if "embedding_bags" not in name]
    return model, torch.optim.Adagrad(dense, lr=0.05)


def batch(number: int, samples: int = 64) -> Batch:
    """Return the batch of a number, the same in every run."""
    generator = torch.Generator().manual_seed(number)
    ids = [torch.randint(rows, (samples,), generator=generator) for rows in ROWS.values()]
    lengths = torch.ones(len(ROWS) * samples).long()
    features = KeyedJaggedTensor.from_lengths_sync(list(ROWS), torch.cat(ids), lengths)
    dense = torch.rand(samples, 4, generator=generator)
    return Batch(dense, features, labels=(dense.sum(1) > 2).float())


def batches(first: int, stop: int) -> Iterator[Batch]:
    """Yield the batches numbered from ``first`` to before ``stop``."""
    return map(batch, range(first, stop))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, data: Batch) -> float:
    """Do one optimizer step; return the loss."""
    optimizer.zero_grad()
    loss, _ = model(data)
    loss.backward()
    optimizer.step()
    return float(loss)
