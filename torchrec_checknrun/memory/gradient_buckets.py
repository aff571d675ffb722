"""Sum gradients in the same order before and after a restart.

DistributedDataParallel lays its parameters out in buckets anew after its first backward pass, by
the order in which gradients came. Of more than two ranks, gloo sums an element in an order that
depends on its place in the bucket; and vector units sum up a parameter's gradient (for a norm, say)
in an order that depends on where it lies. So the first step after a restart, in the first layout,
would differ in the last bits from the same step of a run that has gone on. Where images are kept
the layout is settled before the first step, in the parameters' own order.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchrec_checknrun.model.module_tree import embedding_collections


def settle_buckets(model: nn.Module) -> None:
    """Give all buckets of a model their last layout, before its first step; a collective.

    Does nothing where they have it, as with ``find_unused_parameters``.
    """
    for module in _data_parallel(model):
        module.reducer._push_all_rebuilt_params()
        module.reducer._rebuild_buckets()


def _data_parallel(model: nn.Module) -> Iterator[DistributedDataParallel]:
    """Yield the modules whose gradients are summed, also those of data-parallel tables."""
    lookups = [m for _, c in embedding_collections(model) for m in c._lookups]
    for module in dict.fromkeys([*model.modules(), *lookups]):
        if isinstance(module, DistributedDataParallel):
            yield module
