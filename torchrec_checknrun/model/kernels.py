"""Find the FBGEMM kernels (table-batched embedding modules) of a model, and the shards in them.

Only this file knows how TorchRec arranges tables in kernels; the rest sees ``LocalShard``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torchrec.distributed.batched_embedding_kernel import (
    BatchedDenseEmbedding,
    BatchedDenseEmbeddingBag,
    BatchedFusedEmbedding,
    BatchedFusedEmbeddingBag,
)
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.types import ShardingEnv2D

from torchrec_checknrun.dense.optimizers import DenseOptimizers, row_states, state_of
from torchrec_checknrun.errors import UnsupportedTable
from torchrec_checknrun.model.module_tree import embedding_collections, find_modules
from torchrec_checknrun.shards import LocalShard, Rectangle, TableShape

FUSED = (BatchedFusedEmbeddingBag, BatchedFusedEmbedding)
"""TorchRec's modules around a kernel that contains its tables' optimizer."""
_TOUCHES_LOOKED_UP_ROWS_ONLY = frozenset(
    {
        EmbOptimType.SGD,
        EmbOptimType.EXACT_SGD,
        EmbOptimType.EXACT_ADAGRAD,
        EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        EmbOptimType.ROWWISE_ADAGRAD,
        EmbOptimType.LARS_SGD,
        EmbOptimType.ADAM,
        EmbOptimType.PARTIAL_ROWWISE_ADAM,
        EmbOptimType.LAMB,
        EmbOptimType.PARTIAL_ROWWISE_LAMB,
    }
)
"""Fused optimizers whose update changes no row that was not looked up."""


class KernelMemory:
    """The tables' weights and fused optimizer states in one kernel, at one address.

    Args:
        tbe: FBGEMM's module.

    Attributes:
        weights, states: by table; a table's states by name.
        tensors: all of these.
        places: addresses of ``tensors``.
    """

    def __init__(self, tbe: Any, weights: list[torch.Tensor]) -> None:
        self.weights = weights
        self.states = _optimizer_states(tbe, weights, ())
        self.tensors = [
            *weights,
            *(state for of_table in self.states for state in of_table.values()),
        ]
        self.places = [tensor.data_ptr() for tensor in self.tensors]
        self._bases = _bases(tbe)
        memory = set(map(_storage, self.tensors))
        self._holding = [base for base in self._bases if _storage(base) in memory]
        """Few of dozens, and looked at often."""
        self._addresses = [base.data_ptr() for base in self._holding]
        self._have_versions = not any(tensor.is_inference() for tensor in self.tensors)

    def holds(self, tbe: Any) -> bool:
        """Return whether the module still has just these tensors, at these addresses.

        All memory that these views show is kept, so that no other takes its address.
        """
        bases = _bases(tbe)
        return (
            len(bases) == len(self._bases)
            and all(map(operator.is_, bases, self._bases))
            and self._addresses == [base.data_ptr() for base in self._holding]
        )

    def versions(self) -> list[int]:
        """Return the tensors' version counters; none for inference tensors."""
        if self._have_versions:
            return [tensor._version for tensor in self.tensors]
        return [-1 if tensor.is_inference() else tensor._version for tensor in self.tensors]


def _bases(tbe: Any) -> list[Any]:
    """Return the tensors of FBGEMM's module, of which some hold tables and optimizer states."""
    found = chain(tbe._parameters.values(), tbe._buffers.values())
    return [base for base in found if base is not None]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@dataclass
class Kernel:
    """One table-batched embedding module, its tables, and the features that feed them.

    Attributes:
        module: TorchRec's kernel module; its forward gets a KeyedJaggedTensor of shard-local ids.
        shards: the tables' local shards, in the kernel's order.
        feature_to_shard: for each key of that KeyedJaggedTensor, by position, the index in
            ``shards`` (a feature's *name* is ambiguous: two tables may share it).
        touches_other_rows: why the update may change rows that were not looked up; empty: it
            changes none.
        data_parallel: every rank has these tables, and a dense optimizer updates them.
        optimizers: the known dense optimizers, for data-parallel tables' state.
        parameters: returns, of data-parallel tables, the model's own parameters.
        other_states: whether rows of optimizer state have got other names, since last set to False,
            than those that the tables had before.
        moves: grows whenever memory is found elsewhere, or ``shards`` are made to refer to it.
    """

    module: Any
    shards: list[LocalShard]
    feature_to_shard: list[int]
    touches_other_rows: str
    data_parallel: bool = False
    optimizers: DenseOptimizers = field(default_factory=lambda: DenseOptimizers(()))
    parameters: Callable[[], list[torch.Tensor]] = field(default=list, repr=False, compare=False)
    other_states: bool = field(default=False, init=False, compare=False)
    moves: int = field(default=0, init=False, compare=False)
    _memory: KernelMemory | None = field(default=None, init=False, repr=False, compare=False)
    _in_shards: KernelMemory | None = field(default=None, init=False, repr=False, compare=False)
    """The memory that ``shards`` refer to; None while unknown."""

    def flush(self) -> None:
        """Write rows in a GPU cache back to memory, and find the memory again.

        The memory may have moved (``model.to``, say).
        """
        self.module.flush()
        if not self.data_parallel:
            memory = self.memory()
            if memory is not self._in_shards:
                self._set(memory.weights, memory.states)
                self._in_shards = memory
            return
        weights = self.module.split_embedding_weights()
        self._set(weights, _optimizer_states(self.module._emb_module, weights, self.optimizers))

    def _set(self, weights: list[torch.Tensor], states: list[dict[str, torch.Tensor]]) -> None:
        self.moves += 1
        for shard, weight, state in zip(self.shards, weights, states, strict=True):
            self.other_states |= bool(shard.optimizer) and shard.optimizer.keys() != state.keys()
            shard.weight, shard.optimizer = weight.detach(), state

    def memory(self) -> KernelMemory:
        """Return a fused kernel's weights and optimizer states at their present address.

        All are views of the kernel's memory, the same ones until that moves; GPU caches are not
        included.
        """
        tbe = self.module._emb_module
        if self._memory is None or not self._memory.holds(tbe):
            self._memory = KernelMemory(tbe, self.module.split_embedding_weights())
            self.moves += 1
        return self._memory

    def require_own_memory(self) -> None:
        """Refuse data-parallel tables whose parameter in the model is not the kernel's memory.

        Lookups read the kernel's rows, while an optimizer steps the parameter, and the model's
        state dict shows it: no rows would be the right ones to save.

        Raises:
            UnsupportedTable: names the tables.
        """
        parameters = self.parameters()
        if not parameters:
            return
        weights = self.module.split_embedding_weights()
        strayed = [
            shard.table
            for shard, parameter, weight in zip(self.shards, parameters, weights, strict=True)
            if parameter.data_ptr() != weight.data_ptr()
        ]
        if strayed:
            raise UnsupportedTable(
                f"the parameters of the data-parallel tables {strayed} are no longer their "
                "kernel's memory, as if a parameter or its .data had been replaced: lookups go on "
                "with the kernel's rows, optimizers and state dicts with the others, and a "
                "checkpoint can hold only one of them. Put the earlier tensor back, and write "
                "values into it (with torch.no_grad(): parameter.copy_(values))"
            )

    @property
    def changes_in_backward_only(self) -> bool:
        """Return whether training changes the tables' memory in the fused update alone: no other
        optimizer, no moving average, no cache that is written back.
        """
        cache = getattr(self.module._emb_module, "lxu_cache_weights", None)
        cached = cache is not None and cache.numel() > 0
        return not (self.data_parallel or self.touches_other_rows or cached)

    def purge(self) -> None:
        """Drop cached rows after the shards' memory was written, lest stale ones win."""
        self.module.purge()


def find_kernels(
    model: nn.Module,
    optimizers: DenseOptimizers | None = None,
    known: Iterable[Kernel] = (),
    collections: Sequence[tuple[str, Any]] | None = None,
) -> tuple[list[Kernel], dict[str, TableShape]]:
    """Find all kernels under ``model`` on this rank, and the model's tables.

    Args:
        optimizers: dense optimizers that may hold data-parallel tables' state.
        known: kernels found before; those still in the model are returned again.
        collections: the model's ``embedding_collections``, if just found.

    Returns:
        The kernels, and every table's shape by name, the same on all ranks.

    Raises:
        UnsupportedTable: a table is in no collection, or its rows can't be read and written.
    """
    for path, _ in find_modules(model, FUSED):  # those of collections are in plain lists
        raise UnsupportedTable(
            f"the table of {path.partition('._lookup')[0]!r} is sharded without a collection, so "
            "that its optimizer's state would be lost: put it into an EmbeddingBagCollection"
        )
    found = {id(kernel.module): kernel for kernel in known}
    optimizers = optimizers or DenseOptimizers(())
    kernels: list[Kernel] = []
    tables: dict[str, TableShape] = {}
    for prefix, module in embedding_collections(model) if collections is None else collections:
        for name in module.module_sharding_plan:
            config = module._table_name_to_config[name]
            tables[prefix + name] = TableShape(config.num_embeddings, config.embedding_dim)
        for lookup in module._lookups:
            while isinstance(lookup, DistributedDataParallel):
                lookup = lookup.module
            kernels += [
                found.get(id(kernel)) or _kernel(kernel, prefix, module, optimizers)
                for kernel in lookup._emb_modules
            ]
    return kernels, tables


def _kernel(module: Any, prefix: str, collection: Any, optimizers: DenseOptimizers) -> Kernel:
    names = [table.name for table in module._config.embedding_tables]
    data_parallel = type(module) in (BatchedDenseEmbedding, BatchedDenseEmbeddingBag) and all(
        table.local_metadata is None for table in module._config.embedding_tables
    )
    if not data_parallel and type(module) not in FUSED:
        raise UnsupportedTable(
            f"tables {[prefix + name for name in names]} are held by {type(module).__name__}, "
            "whose rows can't be tracked, read and written in place: shard them with compute "
            "kernel 'fused', 'fused_uvm' or 'fused_uvm_caching', which needs a fused optimizer "
            "(apply_optimizer_in_backward; for frozen tables torch.optim.SGD with lr 0)"
        )
    averaged = _is_averaged(collection, prefix)
    tbe = module._emb_module
    weights = module.split_embedding_weights()
    states = _optimizer_states(tbe, weights, optimizers)
    shards = []
    for table, weight, state in zip(module._config.embedding_tables, weights, states, strict=True):
        if not weight.dtype.is_floating_point:
            raise UnsupportedTable(
                f"table {prefix + table.name} is trained in {weight.dtype}: its rows can't be "
                "stored yet; use fp32, fp16 or bf16"
            )
        row, col = (0, 0) if data_parallel else table.local_metadata.shard_offsets
        shards.append(
            LocalShard(
                table=prefix + table.name,
                shape=TableShape(table.num_embeddings, table.embedding_dim),
                rectangle=Rectangle(row, row + weight.shape[0], col, col + weight.shape[1]),
                weight=weight.detach(),
                optimizer=state,
                replicated=data_parallel,
                averaged=averaged and not data_parallel,
            )
        )
    return Kernel(
        module=module,
        shards=shards,
        feature_to_shard=list(module._feature_table_map),
        touches_other_rows="" if data_parallel else _why_other_rows(tbe, shards),
        data_parallel=data_parallel,
        optimizers=optimizers,
        parameters=partial(_parameters, collection, names) if data_parallel else list,
    )


def _why_other_rows(tbe: Any, shards: list[LocalShard]) -> str:
    """Return why a fused kernel's update may change rows that were not looked up."""
    if tbe.optimizer not in _TOUCHES_LOOKED_UP_ROWS_ONLY:
        return f"optimizer {tbe.optimizer} may change rows that were not looked up"
    if not tbe.use_cpu:
        return ""
    if large := [shards[number].table for number in _behind_4_gib(tbe, shards)]:
        return (
            f"FBGEMM's CPU kernel of row-wise Adagrad trains other rows than were looked up in "
            f"{large}, where fp32 rows begin more than 4 GiB behind their table's first: it "
            "updates the weights that are 4 GiB before them (with or without checkpoints: shard "
            "the table over more ranks or by columns, train it in fp16, or by Adagrad)"
        )
    # FBGEMM's CPU kernels tell tables apart by where their rows begin, all rows counted: a table
    # without rows and the one behind it are one table to them, of the first one's columns.
    empty: list[LocalShard] = []
    for shard in shards:
        if shard.rectangle.rows == 0:
            empty.append(shard)
            continue
        others = [before.table for before in empty if before.rectangle.cols != shard.rectangle.cols]
        if others:
            return (
                f"FBGEMM's CPU kernel trains other rows than were looked up, or crashes, where "
                f"{others}, without a row on this rank, come before {shard.table}, which has "
                "another number of columns (with or without checkpoints: shard the former "
                "table_wise, or give them at least as many rows as there are ranks)"
            )
        empty = []
    return ""


def _behind_4_gib(tbe: Any, shards: list[LocalShard]) -> Iterator[int]:
    """Yield the tables of which FBGEMM's CPU kernel counts bytes in 32 bits, by number.

    FBGEMM has other code for sequences, for fp16, and for tables that several features look up.
    """
    if (
        tbe.optimizer != EmbOptimType.EXACT_ROWWISE_ADAGRAD
        or tbe.pooling_mode is PoolingMode.NONE
        or getattr(tbe, "_used_rowwise_adagrad_with_counter", False)
    ):
        return
    for number, weight in enumerate(shard.weight for shard in shards):
        last_row_begins = weight.nbytes - weight[:1].nbytes
        if (
            weight.dtype == torch.float32
            and last_row_begins >= 1 << 32
            and list(tbe.feature_table_map).count(number) == 1
        ):
            yield number


def _is_averaged(collection: Any, prefix: str) -> bool:
    """Return whether a collection's tables have replicas in other sharding groups.

    Raises:
        UnsupportedTable: these share out the memory of the tables among them.
    """
    env = getattr(collection, "_env", None)
    if not isinstance(env, ShardingEnv2D):
        return False
    strategy = getattr(getattr(env, "sharding_strategy", None), "name", "DEFAULT")
    if strategy == "FULLY_SHARDED":
        raise UnsupportedTable(
            f"the tables of {prefix.removesuffix('.')} are fully sharded (DMPCollection), so that "
            "their memory comes and goes within a step: use ShardingStrategy.DEFAULT or PER_MODULE"
        )
    return True


def _parameters(collection: Any, names: list[str]) -> list[torch.Tensor]:
    """Return a sharded collection's own parameters of some tables, as they are now."""
    is_bag = isinstance(collection, ShardedEmbeddingBagCollection)
    tables = collection.embedding_bags if is_bag else collection.embeddings
    return [tables[name].weight for name in names]


def _optimizer_states(
    tbe: Any, weights: list[torch.Tensor], optimizers: Iterable[Optimizer]
) -> list[dict[str, torch.Tensor]]:
    """Return views of each table's state, under the names of TorchRec's fused optimizer."""
    if not isinstance(tbe, SplitTableBatchedEmbeddingBagsCodegen):
        return [row_states(state_of(optimizers, weight), weight) for weight in weights]
    per_table = [] if tbe.optimizer == EmbOptimType.NONE else tbe.split_optimizer_states()
    if not per_table:
        return [{} for _ in weights]
    names = list(tbe.get_optimizer_state()[0])
    names[0] = "momentum1"  # TorchRec's name for every optimizer's first state
    return [dict(zip(names, states, strict=False)) for states in per_table]
