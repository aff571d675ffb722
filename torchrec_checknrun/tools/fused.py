"""Extract a table's quantized rows as stored, in FBGEMM's fused layout, for serving.

Every row's bytes are its packed codes, then scale and bias (``codecs.rowwise`` has the layout), as
FBGEMM's inference tables take them at 2, 4 and 8 bit. Rows that the codec couldn't hold are zeros
there, and stand in full precision beside them; so do whole chunks that were stored exactly, if
these are less than one row in 16.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from torchrec_checknrun.codecs import Exact, Rowwise
from torchrec_checknrun.format.reader import StoredChunk, read_chunk
from torchrec_checknrun.format.row_chunk import RowsHeader
from torchrec_checknrun.format.row_reader import StoredRows
from torchrec_checknrun.restore.chunks import ChainContent
from torchrec_checknrun.row_sets import DoneRows
from torchrec_checknrun.store.folder import Folder

Columns = tuple[int, int]

_FEW = 16
"""At most one row in so many may be stored exactly."""


@dataclass
class FusedRows:
    """A table's rows as stored.

    Attributes:
        stored: the form of the rows, or why they are not fused.
        tensors: ``weight``, uint8 ``(rows, row_bytes)``; ``exceptions.rows``, int64 ``(n,)``, and
            ``exceptions.weight``, ``(n, dim)``: rows that replace those of ``weight``. A table that
            was split by columns has all three for each range: ``weight.columns_0_64`` and so on.
            Empty if the rows are not all stored in one width.
    """

    stored: str
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


def fused_rows(root: Folder, content: ChainContent, table: str, scratch: Path) -> FusedRows:
    """Extract each row's newest bytes from a chain.

    Args:
        scratch: the folder of the files that hold the rows.

    Raises:
        CorruptCheckpoint, UnsupportedFormat: a chunk can't be read.
    """
    parts: dict[Columns, list[tuple[StoredChunk, RowsHeader]]] = {}
    for chunks in reversed(content.chunks):
        for chunk in chunks:
            header = chunk.header
            if isinstance(header, RowsHeader) and header.table == table:
                columns = header.rectangle.col_start, header.rectangle.col_stop
                parts.setdefault(columns, []).append((chunk, header))
    rows = content.chain.head.tables[table].rows
    counts: dict[str, int] = {}
    codecs: dict[int, Rowwise] = {}
    for _, header in (chunk for chunks in parts.values() for chunk in chunks):
        counts[_kind(header)] = counts.get(_kind(header), 0) + header.count
        if isinstance(header.codec, Rowwise):
            codecs[header.codec.bits] = header.codec
    others = counts.keys() - {f"{bits} bit" for bits in codecs}
    few_exact = others <= {Exact.name} and counts.get(Exact.name, 0) * _FEW <= rows
    if len(codecs) != 1 or not few_exact:
        return FusedRows(f"full: rows are stored as {', '.join(sorted(counts)) or 'nothing'}")
    ends = [0, *(stop for _, stop in sorted(parts))]
    if any(start != end for (start, _), end in zip(sorted(parts), ends, strict=False)):
        return FusedRows(f"full: rows are stored in overlapping columns {sorted(parts)}")
    ((bits, codec),) = codecs.items()
    found = FusedRows(f"fused, {bits} bit")
    for columns, newest_first in parts.items():
        suffix = f".columns_{columns[0]}_{columns[1]}" if len(parts) > 1 else ""
        found.tensors |= {
            name + suffix: tensor
            for name, tensor in _newest(
                root, newest_first, codec, rows, scratch / f"fused{suffix}"
            ).items()
        }
    return found


def _kind(header: RowsHeader) -> str:
    codec = header.codec
    return f"{codec.bits} bit" if isinstance(codec, Rowwise) else codec.name


def _newest(
    root: Folder,
    chunks: list[tuple[StoredChunk, RowsHeader]],
    codec: Rowwise,
    rows: int,
    path: Path,
) -> dict[str, torch.Tensor]:
    header = chunks[0][1]
    size = codec.row_bytes(header.rectangle.cols)
    fused = torch.from_file(str(path), shared=True, size=rows * size, dtype=torch.uint8)
    fused = fused.view(rows, size)
    done = DoneRows(rows)
    ids = [np.empty(0, dtype=np.int64)]
    exact = [torch.empty((0, header.rectangle.cols), dtype=header.dtype, device="cpu")]
    for chunk, header in chunks:
        if done.contains_range(header.rectangle.row_start, header.rectangle.row_stop):
            continue
        stored = StoredRows(header, read_chunk(root, chunk))
        new = done.add(stored.ids)
        chosen = np.arange(header.count) if new is None else new
        if not len(chosen):
            continue
        encoded = stored.select(chosen) if isinstance(header.codec, Rowwise) else None
        if encoded is None or encoded.parameters.get("exponent", 0):
            # Exact, or scaled by a power of two, for which the layout has no field.
            ids.append(stored.ids[chosen])
            exact.append(stored.rows(chosen).weight)
            continue
        own = encoded.data.view(len(chosen), size)
        own[torch.from_numpy(encoded.exceptions)] = 0
        fused[torch.from_numpy(stored.ids[chosen])] = own
        ids.append(stored.ids[chosen][encoded.exceptions])
        exact.append(encoded.exact)
    positions = torch.from_numpy(np.concatenate(ids))
    order = torch.argsort(positions)
    return {
        "weight": fused,
        "exceptions.rows": positions[order],
        "exceptions.weight": torch.cat(exact)[order],
    }
