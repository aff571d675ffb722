"""Find an inference model's tables: their names, the form of their rows, and their memory.

Quantized tables lie in FBGEMM's inference kernels, several in one, in the kernel's order. The
kernels are found in TorchRec's modules, unsharded or sharded, and in what TorchScript makes of
them; everything is looked up in plain attributes that all of these have. Unquantized tables are
weights of the state dict, told from other weights by the checkpoint's names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from torchrec_checknrun.errors import UnsupportedTable
from torchrec_checknrun.native import can_copy, copy_rows
from torchrec_checknrun.serve.row_form import RowForm

KINDS = ("embedding_bags", "embeddings")
"""Names of the parts of TorchRec's collections that hold tables."""
_KERNELS = (
    "IntNBitTableBatchedEmbeddingBagsCodegen",
    "IntNBitTableBatchedEmbeddingBagsCodegenWithLength",
)
_FLOATS = {0: torch.float32, 1: torch.float16, 5: torch.bfloat16}
_BITS = {2: 8, 3: 4, 4: 2}
"""FBGEMM's numbers of row types: floating point, and bits of a code."""


@dataclass(frozen=True)
class Part:
    """Consecutive rows of a table in one piece of memory.

    Attributes:
        first: the table's row that the part begins with.
        rows: number of the table's rows.
        memory: ``(n, stride)`` uint8.
        remap: by row of the part, the row of ``memory``, or -1 for a row that was pruned; None:
            the same row.
    """

    first: int
    rows: int
    memory: torch.Tensor
    remap: np.ndarray | None = None

    def places(self, ids: np.ndarray) -> tuple[np.ndarray | slice, np.ndarray | None]:
        """Return where the part holds some of the table's rows.

        Args:
            ids: ``(n,)`` int64, sorted and distinct.

        Returns:
            Which of ``ids`` the part holds, and their rows of ``memory``; None: it holds none.
        """
        start, stop = map(int, np.searchsorted(ids, (self.first, self.first + self.rows)))
        if start == stop:
            return slice(0, 0), None
        local = ids[start:stop] - self.first
        if self.remap is None:
            return slice(start, stop), local
        places = self.remap[local]
        kept = np.flatnonzero(places >= 0)
        order = kept[np.argsort(places[kept], kind="stable")]
        return order + start, places[order]

    def put(self, ids: np.ndarray, rows: torch.Tensor) -> None:
        """Overwrite rows with bytes, ``(n, stride)`` uint8 on the CPU."""
        chosen, places = self.places(ids)
        if places is None or not len(places):
            return
        if can_copy(rows, self.memory):
            copy_rows(rows, len(rows), chosen, self.memory, _run(places))
            return
        own = rows[chosen] if isinstance(chosen, slice) else rows[torch.from_numpy(chosen)]
        device = self.memory.device
        self.memory.index_copy_(0, torch.from_numpy(places).to(device), own.to(device))

    def copy_from(self, other: Part, ids: np.ndarray) -> None:
        """Overwrite rows with those of the same part in another copy of the model."""
        _, places = self.places(ids)
        if places is None or not len(places):
            return
        if can_copy(other.memory, self.memory):
            run = _run(places)
            copy_rows(other.memory, len(other.memory), run, self.memory, run)
            return
        at = torch.from_numpy(places).to(self.memory.device)
        self.memory.index_copy_(0, at, other.memory.index_select(0, at))


@dataclass
class ServedTable:
    """A table of an inference model.

    Attributes:
        owner: path of the collection that the table belongs to; of a table that is a weight of
            the state dict the weight's path without ``.weight``.
        name: the table's name in its collection; empty for a weight of the state dict.
        form: of its rows.
        parts: its rows, in order.
        pruned: whether TorchRec has cut off its last rows.
    """

    owner: str
    name: str
    form: RowForm
    parts: list[Part] = field(default_factory=list)
    pruned: bool = False

    @property
    def path(self) -> str:
        """The table's path in the model, for errors."""
        return f"{self.owner}.{self.name}".strip(".")

    @property
    def rows(self) -> int:
        """Number of rows that can be looked up."""
        return sum(part.rows for part in self.parts)

    def put(self, ids: np.ndarray, rows: torch.Tensor) -> None:
        """Overwrite rows; those that the model has not are left out.

        Args:
            ids: ``(n,)`` int64, sorted and distinct.
            rows: ``(n, stride)`` uint8, on the CPU.
        """
        for part in self.parts:
            part.put(ids, rows)

    def copy_from(self, other: ServedTable, ids: np.ndarray) -> None:
        """Overwrite rows with those of another copy of the model."""
        for part, source in zip(self.parts, other.parts, strict=True):
            part.copy_from(source, ids)


def refuse_frozen(model: nn.Module) -> None:
    """Refuse a scripted model whose weights are constants of its code.

    Raises:
        UnsupportedTable: says what to give instead.
    """
    if not isinstance(model, torch.jit.ScriptModule):
        return
    kernels = [m for m in model.modules() if _type_name(m) in _KERNELS]
    if any(not hasattr(kernel, "feature_names") for kernel in kernels) or not model.state_dict():
        raise UnsupportedTable(
            "the model is frozen (torch.jit.freeze, optimize_for_inference): its tables are "
            "constants of the code, which can't be followed. Give the scripted model without that"
        )


def find_kernels(model: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """Yield the inference kernels of a model: the owner's path, the kernel, and the configuration
    of its shards, None if the kernel is not sharded.

    Raises:
        UnsupportedTable: a kernel is of a kind that can't be followed.
    """
    seen: set[int] = set()
    for path, module in model.named_modules():
        configs = getattr(module, "_tbes_configs", None) or {}
        hidden = list(getattr(module, "_emb_modules", None) or ()) + list(configs)
        held = [(path, kernel) for kernel in hidden]
        if _type_name(module) in _KERNELS or _is_other_kernel(module):
            owner = path.rpartition(".")[0]
            held.append((owner.removesuffix("tbes").rstrip("."), module))
        for owner, kernel in held:
            if not (_type_name(kernel) in _KERNELS or _is_other_kernel(kernel)):
                continue
            where = _address(kernel)
            if where in seen:
                continue
            seen.add(where)
            if _type_name(kernel) not in _KERNELS:
                raise UnsupportedTable(
                    f"{owner or 'the model'} has tables in {_type_name(kernel)}, which can't be "
                    "followed: give a model made by quantize_inference_model, or an unsharded one"
                )
            yield owner, kernel, configs.get(kernel)


def quantized_tables(model: nn.Module) -> list[ServedTable]:
    """Return the tables in a model's inference kernels.

    Raises:
        UnsupportedTable: a table can't be followed; names it, and why.
    """
    found: dict[tuple[str, str], ServedTable] = {}
    for owner, kernel, config in find_kernels(model):
        pruned = _pruned(model, owner)
        for number, name in enumerate(kernel.feature_names):
            table = _kernel_table(kernel, number, owner, name, config)
            table.pruned = name in pruned
            known = found.setdefault((owner, name), table)
            if known is table:
                continue
            if known.form != table.form or config is None:
                raise UnsupportedTable(
                    f"table {known.path!r} is in two kernels as {known.form} and {table.form}: "
                    "only shards by rows can be followed"
                )
            known.parts += table.parts
    for table in found.values():
        table.parts.sort(key=lambda part: part.first)
        ends = [part.first + part.rows for part in table.parts]
        if [part.first for part in table.parts] != [0, *ends[:-1]]:
            raise UnsupportedTable(
                f"table {table.path!r}: this process holds only some of its rows"
            )
    return list(found.values())


def float_table(path: str, weight: torch.Tensor) -> ServedTable:
    """Return a table that is a weight of the state dict.

    Raises:
        UnsupportedTable: the weight has no rows of plain numbers.
    """
    plain = weight.dim() == 2 and weight.is_floating_point() and weight.is_contiguous()
    if not plain or weight.is_meta:
        raise UnsupportedTable(
            f"table {path!r} is {weight.dtype} {list(weight.shape)} on {weight.device}: expected "
            "rows of floating point numbers in memory"
        )
    rows, dim = weight.shape
    form = RowForm(dim, None, weight.dtype, dim * weight.element_size())
    memory = weight.detach().view(torch.uint8)
    return ServedTable(path, "", form, [Part(0, rows, memory)])


def _kernel_table(kernel: Any, number: int, owner: str, name: str, config: Any) -> ServedTable:
    """Return one table of a kernel, as far as the kernel holds it."""
    path = f"{owner}.{name}".strip(".")
    feature = list(kernel.feature_table_map).index(number)
    ends = kernel.D_offsets.tolist()
    rows, dim = int(kernel.rows_per_table[feature]), ends[feature + 1] - ends[feature]
    kind = int(kernel.weights_tys[feature])
    if kind not in _BITS and kind not in _FLOATS:
        raise UnsupportedTable(
            f"table {path!r} has rows of FBGEMM's type {kind}, expected int8, "
            "int4, int2, fp16 or fp32"
        )
    bits, dtype = _BITS.get(kind), _FLOATS.get(kind, torch.uint8)
    alignment = int(kernel.row_alignment)
    form = RowForm(dim, bits, dtype, 0, not getattr(kernel, "reverse_qparam", False))
    stride = -(-form.width // alignment) * alignment
    form = RowForm(dim, bits, dtype, stride, form.scale_first)
    if bits is not None and int(kernel.scale_bias_size_in_bytes) != 4:
        raise UnsupportedTable(
            f"table {path!r}: scale and bias take "
            f"{kernel.scale_bias_size_in_bytes} bytes a row, expected 4"
        )
    memory = _memory(kernel, number, path, rows * stride).view(rows, stride)
    remap = _remap(kernel, number, path)
    first = _first_row(config, number, path, dim)
    part = Part(first, rows if remap is None else len(remap), memory, remap)
    return ServedTable(owner, name, form, [part])


def _memory(kernel: Any, number: int, path: str, size: int) -> torch.Tensor:
    """Return a table's bytes in a kernel."""
    offset = int(kernel.weights_physical_offsets[number])
    found = [
        weights
        for place in ("weights_host", "weights_dev", "weights_uvm")
        if (weights := getattr(kernel, place, None)) is not None and weights.numel()
    ]
    if len(found) != 1 or getattr(kernel, "weights_uvm", None) is found[0] or found[0].is_meta:
        raise UnsupportedTable(
            f"table {path!r}: its kernel keeps rows in several places, a cache, or none: expected "
            "host memory, or a device's"
        )
    return found[0].detach().view(-1)[offset : offset + size]


def _remap(kernel: Any, number: int, path: str) -> np.ndarray | None:
    """Return a pruned table's map from looked-up rows to rows in memory; None if there is none."""
    hashed = getattr(kernel, "index_remapping_hash_table", None)
    if getattr(kernel, "index_remapping_hash_table_cpu", None) is not None or (
        hashed is not None and hashed.numel()
    ):
        raise UnsupportedTable(
            f"table {path!r} is pruned by a hash table, of which no row can be told from its id: "
            "prune by an array (use_array_for_index_remapping=True)"
        )
    offsets = getattr(kernel, "index_remappings_array_offsets", None)
    if offsets is None or not offsets.numel():
        return None
    start, stop = int(offsets[number]), int(offsets[number + 1])
    if start == stop:
        return None
    found: np.ndarray = kernel.index_remappings_array[start:stop].cpu().numpy().astype(np.int64)
    return found


def _first_row(config: Any, number: int, path: str, dim: int) -> int:
    """Return the table's row that a kernel's shard begins with."""
    if config is None:
        return 0
    table = config.embedding_tables[number]
    if table.embedding_dim != dim or (table.local_cols or dim) != dim:
        raise UnsupportedTable(
            f"table {path!r} is sharded by columns ({dim} of {table.embedding_dim}), which share "
            "one scale: shard it by rows, or as a whole"
        )
    metadata = table.local_metadata
    return 0 if metadata is None else int(metadata.shard_offsets[0])


def _pruned(model: nn.Module, owner: str) -> set[str]:
    """Return the tables of a collection whose last rows TorchRec has cut off."""
    try:
        module = model.get_submodule(owner)
    except (AttributeError, RuntimeError):  # of TorchScript
        return set()
    configs: Any = []
    for name in ("_embedding_bag_configs", "_embedding_configs"):
        configs = getattr(module, name, None) or configs
    return {
        config.name
        for config in configs
        if getattr(config, "num_embeddings_post_pruning", None) is not None
    }


def _type_name(module: object) -> str:
    return str(getattr(module, "original_name", type(module).__name__))


def _is_other_kernel(module: object) -> bool:
    """Tell whether a module is a kernel of FBGEMM's that holds tables in a way of its own."""
    name = _type_name(module)
    return name.startswith(("SplitTableBatched", "DenseTableBatched", "SSDTableBatched")) or (
        name.startswith(("KVEmbedding", "IntNBit", "SSDIntNBit")) and name not in _KERNELS
    )


def _address(kernel: Any) -> int:
    """Return what two views of one kernel have in common: its memory, or itself."""
    weights = getattr(kernel, "weights_host", None)
    if weights is not None and weights.numel():
        return int(weights.data_ptr())
    return id(kernel)


def _run(places: np.ndarray) -> np.ndarray | slice:
    """Return sorted places as a range, if they are consecutive."""
    first, last = int(places[0]), int(places[-1])
    return slice(first, last + 1) if last - first + 1 == len(places) else places


def memory_of(tables: Mapping[str, ServedTable]) -> set[int]:
    """Return the addresses of the storages that tables lie in."""
    return {
        part.memory.untyped_storage().data_ptr()
        for table in tables.values()
        for part in table.parts
    }
