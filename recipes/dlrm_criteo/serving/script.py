"""Turn the job's model into TorchScript, which predicts without Python's lock.

An eager forward takes and leaves the lock at each of its operations; predictions beside each other,
and a follower that applies a version, then wait for one another. A script takes it once.
"""

from __future__ import annotations

import torch
from torch import nn
from torchrec.fx import Tracer
from torchrec.models.dlrm import InteractionArch

_WHOLE = ("IntNBitTableBatchedEmbeddingBagsCodegen", "ComputeJTDictToKJT")
"""Modules that TorchScript reads themselves, since they can't be traced."""


class Interaction(nn.Module):
    """Products of all pairs of embeddings, as TorchRec's ``InteractionArch``.

    That one holds the pairs' numbers in a tensor, which TorchScript makes a buffer: one that no
    checkpoint has.
    """

    def forward(self, dense_features: torch.Tensor, sparse_features: torch.Tensor) -> torch.Tensor:
        """Return dense features, ``(B, D)``, and after them the products, ``(B, pairs)``.

        Args:
            sparse_features: ``(B, F, D)``, an embedding of each feature.
        """
        every = torch.cat((dense_features.unsqueeze(1), sparse_features), dim=1)
        products = torch.bmm(every, every.transpose(1, 2))
        first, second = torch.triu_indices(every.size(1), every.size(1), 1).unbind()
        return torch.cat((dense_features, products[:, first, second]), dim=1)


def script(model: nn.Module) -> torch.jit.ScriptModule:
    """Return a model of ``inference_model`` as TorchScript; its predictions are the same bits."""
    for name, part in model.named_children():
        if isinstance(part, InteractionArch):
            setattr(model, name, Interaction())
    graph = Tracer(leaf_modules=[*_WHOLE, Interaction.__name__]).trace(model)
    scripted: torch.jit.ScriptModule = torch.jit.script(torch.fx.GraphModule(model, graph))
    return scripted
