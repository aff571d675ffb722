"""Ask optimizers for their state dicts, without the part that is stored with the tables.

TorchRec's usual optimizer combines those of all fused tables, of which nothing is stored here, with
one for the dense part. To list hundreds of tables in a state dict, only to drop them again, would
take most of a cut's time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from torch.optim import Optimizer
from torchrec.optim.fused import FusedOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer

from torchrec_checknrun.dense.tree import names_table
from torchrec_checknrun.format.state import SHARDED


def state_dict_of(optimizer: Optimizer, tables: Collection[str]) -> Any:
    """Return an optimizer's state dict; that of TorchRec's ``CombinedOptimizer`` without parts that
    hold nothing but the sharded state of fused tables.

    Args:
        tables: names of the model's tables in fused kernels.
    """
    if type(optimizer) is not CombinedOptimizer or "state_dict" in vars(optimizer):
        return optimizer.state_dict()
    parts = list(_parts(optimizer, ""))
    left = [part for part in parts if not _is_of_tables(*part, tables)]
    if len(left) == len(parts):
        return optimizer.state_dict()
    names = {
        parameter: _key(name, prefix)
        for prefix, part in left
        for name, parameter in part.params.items()
    }
    return {
        "state": {
            names[parameter]: KeyedOptimizer._extract_state_dict_content(state)
            for _, part in left
            for parameter, state in part.state.items()
        }
    }


def _parts(optimizer: CombinedOptimizer, prefix: str) -> Iterator[tuple[str, KeyedOptimizer]]:
    """Yield the parts that are not combined themselves, each with the prefix of its names."""
    for key, part in optimizer.optimizers:
        within = _key(key, prefix)
        if type(part) is CombinedOptimizer:
            yield from _parts(part, within)
        else:
            yield within, part


def _is_of_tables(prefix: str, part: KeyedOptimizer, tables: Collection[str]) -> bool:
    """Return whether a part's state is nothing but sharded state of these tables."""
    return (
        isinstance(part, FusedOptimizer)
        and all(names_table(_key(name, prefix), tables) for name in part.params)
        and all(
            isinstance(value, SHARDED) for state in part.state.values() for value in state.values()
        )
    )


def _key(name: str, prefix: str) -> str:
    return CombinedOptimizer.prepend_opt_key(name, prefix)
