"""Walk through optimizers that wrap or combine others, from TorchRec or a user.

TorchRec nests them freely, and its state dicts show the innermost ones' state only: warm-up around
a combined optimizer, say, leaves no trace of the warm-up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.optim import Optimizer
from torchrec.optim.fused import FusedOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer


@dataclass(frozen=True)
class Node:
    """One optimizer in a nest.

    Attributes:
        identity: its class with the keys of the combined optimizers around it, and a number where
            that is ambiguous. Wrappers that come or go around it don't change it.
        prefix: what its parameters' names begin with in the outermost state dict.
        keyed: the ``KeyedOptimizer`` that names its parameters: itself, or the wrapper around it.
        fused: whether it updates tables inside kernels, and nothing else.
        steps: whether it keeps parameters' state itself.
    """

    optimizer: Optimizer
    identity: str
    prefix: str
    keyed: KeyedOptimizer | None
    fused: bool
    steps: bool

    def key(self, name: str) -> str:
        """Return the outermost state dict's key of a parameter's name."""
        return CombinedOptimizer.prepend_opt_key(name, self.prefix)


def nodes(optimizer: Optimizer) -> list[Node]:
    """List all optimizers in a nest, the innermost first; of fused ones only the outermost."""
    seen: Counter[str] = Counter()
    found = []
    for node in _walk(optimizer, "", None):
        name = f"{node.prefix}.{node.identity}" if node.prefix else node.identity
        seen[name] += 1
        if seen[name] > 1:
            name = f"{name}#{seen[name]}"
        found.append(Node(node.optimizer, name, node.prefix, node.keyed, node.fused, node.steps))
    return found[::-1]


def is_fused(optimizer: Optimizer) -> bool:
    """Tell whether an optimizer updates tables inside kernels, and nothing else."""
    if isinstance(optimizer, CombinedOptimizer):
        return all(is_fused(part) for _, part in optimizer.optimizers)
    return isinstance(optimizer, FusedOptimizer)


def own_parameters(node: Node) -> dict[str, torch.Tensor]:
    """Return the parameters that a wrapper made for itself, by name: they are in no group.

    ``WarmupOptimizer`` keeps its counters as the state of such a parameter.
    """
    if isinstance(node.optimizer, CombinedOptimizer):
        return {}  # its parts'
    params = getattr(node.optimizer, "params", None)
    if not isinstance(params, Mapping):
        return {}
    stepped = {id(p) for group in node.optimizer.param_groups for p in group["params"]}
    return {name: p for name, p in params.items() if id(p) not in stepped}


def _walk(optimizer: Optimizer, prefix: str, keyed: KeyedOptimizer | None) -> Iterator[Node]:
    name = type(optimizer).__name__
    if isinstance(optimizer, KeyedOptimizer):
        keyed = optimizer
    if is_fused(optimizer):
        yield Node(optimizer, name, prefix, keyed, fused=True, steps=False)
        return
    # A plain optimizer's own state dict is what it keeps, whatever it has inside.
    inner = getattr(optimizer, "_optimizer", None) if keyed is not None else None
    combines = isinstance(optimizer, CombinedOptimizer)
    wraps = not combines and isinstance(inner, Optimizer)
    yield Node(optimizer, name, prefix, keyed, fused=False, steps=not (combines or wraps))
    if isinstance(optimizer, CombinedOptimizer):
        for key, part in optimizer.optimizers:
            yield from _walk(part, CombinedOptimizer.prepend_opt_key(key, prefix), None)
    elif isinstance(inner, Optimizer):
        yield from _walk(inner, prefix, keyed)
