"""Find an inference model's tables: their names, the form of their rows, and their memory.

Quantized tables lie in FBGEMM's inference kernels, several in one, in the kernel's order;
everything is looked up in plain attributes that kernels, shards and TorchScript have. A kernel may
hold a range of a table's rows, or of its columns: then each shard has the whole row's scale and
bias. Unquantized tables are weights of the state dict, told from others by the checkpoint's names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from torchrec_checknrun.errors import UnsupportedTable
from torchrec_checknrun.native import try_copy_rows
from torchrec_checknrun.serve.inference.kernels import find_kernels
from torchrec_checknrun.serve.inference.row_form import RowForm

KINDS = ("embedding_bags", "embeddings")
"""Names of the parts of TorchRec's collections that hold tables."""
_FLOATS = {0: torch.float32, 1: torch.float16, 5: torch.bfloat16}
_BITS = {2: 8, 3: 4, 4: 2}
"""FBGEMM's numbers of row types: floating point, and bits of a code."""


@dataclass(frozen=True)
class Part:
    """Consecutive rows of a table, or some of their columns, in one piece of memory.

    Attributes:
        first: the table's row that the part begins with.
        rows: number of the table's rows.
        memory: ``(n, stride)`` uint8.
        remap: by row of the part, the row of ``memory``, or -1 for a row that was pruned; None:
            the same row.
        columns: first and end of the columns; None: all of them.
    """

    first: int
    rows: int
    memory: torch.Tensor
    remap: np.ndarray | None = None
    columns: tuple[int, int] | None = None

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
        if try_copy_rows(rows, len(rows), chosen, self.memory, _run(places)):
            return
        own = rows[chosen] if isinstance(chosen, slice) else rows[torch.from_numpy(chosen)]
        device = self.memory.device
        self.memory.index_copy_(0, torch.from_numpy(places).to(device), own.to(device))

    def copy_from(self, other: Part, ids: np.ndarray) -> None:
        """Overwrite rows with those of the same part in another copy of the model."""
        _, places = self.places(ids)
        if places is None or not len(places):
            return
        run = _run(places)
        if try_copy_rows(other.memory, len(other.memory), run, self.memory, run):
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
        """Return the table's path in the model, for errors."""
        return f"{self.owner}.{self.name}".strip(".")

    @property
    def rows(self) -> int:
        """Return the number of rows that can be looked up."""
        return max(part.first + part.rows for part in self.parts)

    def put(self, ids: np.ndarray, rows: torch.Tensor) -> None:
        """Overwrite rows; those that the model has not are left out.

        Args:
            ids: ``(n,)`` int64, sorted and distinct.
            rows: ``(n, stride)`` uint8, on the CPU.
        """
        for part in self.parts:
            own = rows
            if part.columns is not None:
                own = self.form.cut(rows, part.columns, part.memory.shape[1])
            part.put(ids, own)

    def copy_from(self, other: ServedTable, ids: np.ndarray) -> None:
        """Overwrite rows with those of another copy of the model."""
        for part, source in zip(self.parts, other.parts, strict=True):
            part.copy_from(source, ids)


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
                    "only shards by rows or columns can be followed"
                )
            known.parts += table.parts
    for table in found.values():
        _check_whole(table)
    return list(found.values())


def _check_whole(table: ServedTable) -> None:
    """Sort the parts of a table, and refuse a table of which parts are missing.

    Raises:
        UnsupportedTable: says what is missing.
    """
    table.parts.sort(key=lambda part: (part.columns or (0, 0), part.first))
    by_columns: dict[tuple[int, int], int] = {}
    for part in table.parts:
        columns = part.columns or (0, table.form.dim)
        if part.first != by_columns.setdefault(columns, 0):
            raise UnsupportedTable(
                f"table {table.path!r}: this process holds only some of its rows"
            )
        by_columns[columns] += part.rows
    starts, ends = [start for start, _ in by_columns], [end for _, end in by_columns]
    if starts != [0, *ends[:-1]] or ends[-1] != table.form.dim or len({*by_columns.values()}) > 1:
        raise UnsupportedTable(
            f"table {table.path!r} of {table.form.dim} columns is sharded into the columns "
            f"{sorted(by_columns)}: TorchRec takes the bytes of its rows for columns, unless "
            "quant_prep_enable_quant_state_dict_split_scale_bias_for_types was called before it "
            "was quantized"
        )


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
    if bits is not None and int(kernel.scale_bias_size_in_bytes) != 4:
        raise UnsupportedTable(
            f"table {path!r}: scale and bias take "
            f"{kernel.scale_bias_size_in_bytes} bytes a row, expected 4"
        )
    alignment, scale_first = int(kernel.row_alignment), not getattr(kernel, "reverse_qparam", False)
    form = RowForm(dim, bits, dtype, 0, scale_first)
    form = replace(form, stride=-(-form.width // alignment) * alignment)
    memory = _memory(kernel, number, path, rows * form.stride).view(rows, form.stride)
    remap = _remap(kernel, number, path)
    part = Part(0, rows if remap is None else len(remap), memory, remap)
    if config is not None:
        form, part = _placed(form, part, config.embedding_tables[number])
    return ServedTable(owner, name, form, [part])


def _placed(form: RowForm, part: Part, shard: Any) -> tuple[RowForm, Part]:
    """Return the form of a table's whole rows, and a shard's part with its place in the table.

    Args:
        shard: TorchRec's configuration of the shard.
    """
    if shard.local_metadata is None:
        return form, part
    row, column = map(int, shard.local_metadata.shard_offsets)
    part = replace(part, first=row)
    if shard.embedding_dim == form.dim:
        return form, part
    part = replace(part, columns=(column, column + form.dim))
    form = replace(form, dim=int(shard.embedding_dim))
    return replace(form, stride=form.width), part


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
