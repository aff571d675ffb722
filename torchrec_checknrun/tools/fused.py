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
from torchrec_checknrun.format.reader import Read, StoredChunk
from torchrec_checknrun.format.row_chunk import RowsHeader
from torchrec_checknrun.format.row_reader import StoredRows
from torchrec_checknrun.restore.chunks import ChainContent, overlap
from torchrec_checknrun.row_sets import DoneRows
from torchrec_checknrun.tools.tables import scratch_tensor

_FEW = 16
"""At most one row in so many may be stored exactly."""
_INFERENCE = (2, 4, 8)
"""Widths of inference tables."""
_SCALE_BYTES = 4
"""Bytes of an inference row's scale and bias."""
_WORD_BITS = 16
"""FBGEMM has scale and bias of an inference row begin at such a word's address."""
_BLOCK = 1 << 16
"""Rows that are laid out at a time."""


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


def fused_rows(read: Read, content: ChainContent, table: str, scratch: Path) -> FusedRows:
    """Extract each row's newest bytes from a chain.

    Args:
        read: reads a chunk's bytes, verified.
        scratch: the folder of the files that hold the rows.

    Raises:
        CorruptCheckpoint, UnsupportedFormat: a chunk can't be read.
    """
    codec, stored = _one_width(content, table)
    if codec is None:
        return FusedRows(stored)
    found = FusedRows(stored)
    parts, rows = content.rows_by_columns[table], content.chain.head.tables[table].rows
    for columns, newest_first in parts.items():
        suffix = f".columns_{columns[0]}_{columns[1]}" if len(parts) > 1 else ""
        tensors = _newest(read, newest_first, codec, rows, scratch)
        found.tensors |= {name + suffix: tensor for name, tensor in tensors.items()}
    return found


def inference_rows(
    content: ChainContent, table: str, weight: torch.Tensor, scratch: Path
) -> FusedRows:
    """Lay a table's rows out as TorchRec's inference tables hold them, but for the padding: scale
    and bias in fp16, then the codes.

    Rows of 4 and 2 bits have the codes that are stored; quantized again are those of 8 bits, since
    their scale is stored in fp32, and those of the symmetric method, which don't reach the ends of
    their range.

    Args:
        weight: the restored table, ``(rows, dim)``.
        scratch: the folder of the file that holds the rows.
    """
    import fbgemm_gpu  # noqa: F401 - registers torch.ops.fbgemm; late, since it takes seconds

    codec, stored = _one_width(content, table)
    if codec is None:
        return FusedRows(stored)
    if codec.bits not in _INFERENCE:
        return FusedRows(f"full: rows are stored in {codec.bits} bits, a width of no inference")
    dim = weight.shape[1]
    if dim * codec.bits % _WORD_BITS:
        words = f"{_WORD_BITS}-bit words, as rows of inference must"
        return FusedRows(f"full: {dim} columns of {codec.bits} bits don't fill {words}")
    codes = dim * codec.bits // 8
    laid = scratch_tensor(scratch, (len(weight), codes + _SCALE_BYTES), torch.uint8)
    for start in range(0, len(weight), _BLOCK):
        block = weight[start : start + _BLOCK].to(torch.float32)
        quantize = torch.ops.fbgemm.FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf
        fused = quantize(block.contiguous(), codec.bits)
        laid[start : start + _BLOCK, :_SCALE_BYTES] = fused[:, codes:]
        laid[start : start + _BLOCK, _SCALE_BYTES:] = fused[:, :codes]
    return FusedRows(f"inference, {codec.bits} bit", {"weight": laid})


def _one_width(content: ChainContent, table: str) -> tuple[Rowwise | None, str]:
    """Return the codec of a table whose rows are all stored at one width, and what to call that;
    or None, and the reason why the table is written in full.
    """
    parts = content.rows_by_columns.get(table, {})
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
        return None, f"full: rows are stored as {', '.join(sorted(counts)) or 'nothing'}"
    if overlap(parts):
        return None, f"full: rows are stored in overlapping columns {sorted(parts)}"
    ((bits, codec),) = codecs.items()
    return codec, f"fused, {bits} bit"


def _kind(header: RowsHeader) -> str:
    codec = header.codec
    return f"{codec.bits} bit" if isinstance(codec, Rowwise) else codec.name


def _newest(
    read: Read,
    chunks: list[tuple[StoredChunk, RowsHeader]],
    codec: Rowwise,
    rows: int,
    scratch: Path,
) -> dict[str, torch.Tensor]:
    header = chunks[0][1]
    size = codec.row_bytes(header.rectangle.cols)
    fused = scratch_tensor(scratch, (rows, size), torch.uint8)
    done = DoneRows(rows)
    ids = [np.empty(0, dtype=np.int64)]
    exact = [torch.empty((0, header.rectangle.cols), dtype=header.dtype, device="cpu")]
    for chunk, header in chunks:
        if done.contains_range(header.rectangle.row_start, header.rectangle.row_stop):
            continue
        stored = StoredRows(header, read(chunk))
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
