"""Quantize with k-means codebooks: the quality that codecs of the same width are measured against.

Meant as a reference, and slow: tens to hundreds of microseconds a row, a thousand times as long as
the other codecs. The bytes do not pay off either: a row's centroids cost more than another bit per
value. Only encoding needs the library (an exact 1-D k-means); checkpoints are read without it.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import torch

from torchrec_checknrun.codecs.base import (
    NO_CONTEXT,
    WIDTHS,
    Codec,
    CodecSpec,
    Encoded,
    Parameters,
    RowContext,
    output,
    require_size,
)
from torchrec_checknrun.codecs.plain import lost_rows

_FP16_MAX = 65504.0
_INFINITE_HALF = 65520.0
"""The least number that fp16 rounds to infinity."""
_FP16_STEP = 2.0**-10
"""Relative distance of an fp16 number to the next one."""
_TOP_EXPONENT = 13
"""Rows are scaled to below 2**13: a row's range and its refinement fit fp16."""
_MAX_EXPONENT = _TOP_EXPONENT + 1074
"""Exponent for the smallest number of fp64."""
_PART_ROWS = 1024
"""Rows handled at a time with a codebook per row: temporary arrays stay small."""
# A block's values, between its rows' extremes, are counted in bins; k-means runs on a sample that
# holds each bin's mean in proportion to the bin's count, at least once: a level that few rows use
# must be in the sample, or it would be lost when decoded rows are encoded again.
_BINS = 2048
_SAMPLE = 4096
_REFINEMENTS = 3


class KMeans(Codec):
    """A codebook of ``2**bits`` values for every row, or for every ``block_rows`` rows.

    - Per row: the exact k-means of its values (no other codebook has a smaller l2 error), rounded
      to fp16. Rows with at most ``2**bits`` distinct values are exact up to fp16. Stored: per row,
      ``min(2**bits, dim)`` fp16 centroids, then the packed codes.
    - Per block: an fp16 scale and bias per row bring rows to one scale; they are fitted in turns
      with the block's codebook, which runs from 0 to 1. Stored: the codebooks, fp16; then per row
      fp16 scale, fp16 bias, packed codes. The lowest and the highest value of a row take the first
      and the last code, so that encoding decoded rows finds the same scale, bias and codebook.
      Needs some ten times the memory of a block's values: about a thousand rows are a good block.

    All rows are multiplied by one power of two (``exponent``), so that fp16 holds tiny rows as well
    as large ones. Codes are packed densely, low bits first, each row to whole bytes.

    Exceptions: rows with a NaN, an infinity or an element above 65504 in magnitude, rows of fp16
    that a block's codebook would make infinite, and rows so small beside the largest one (about
    2**-27) that fp16 would lose 2**-10 of their norm.

    Args:
        bits: width of a code: 2, 3, 4 or 8.
        block_rows: rows that share a codebook; None: each row has its own.

    Raises:
        ValueError: bits or block_rows are out of range.
    """

    name: ClassVar[str] = "kmeans"
    lossy: ClassVar[bool] = True

    def __init__(self, bits: int, block_rows: int | None = None) -> None:
        if type(bits) is not int or bits not in WIDTHS:
            raise ValueError(f"bits must be one of {WIDTHS}, not {bits!r}")
        if block_rows is not None and (type(block_rows) is not int or block_rows < 1):
            raise ValueError(f"block_rows must be positive, or None, not {block_rows!r}")
        self.bits = bits
        self.block_rows = block_rows

    @property
    def value_bits(self) -> int:
        return self.bits

    def encode(
        self,
        rows: torch.Tensor,
        ids: torch.Tensor | None = None,
        context: RowContext = NO_CONTEXT,
        out: torch.Tensor | None = None,
    ) -> Encoded:
        """Encode as ``Codec.encode`` says, on the CPU wherever the rows are.

        Raises:
            ImportError: kmeans1d is not installed.
        """
        rows = rows.detach()
        if ids is not None:
            rows = rows.index_select(0, ids.to(rows.device))
        rows = rows.cpu()
        n, dim = rows.shape
        exponent = _exponent(rows)
        data = output(self._size(n, dim), out)
        codebooks, coded = self._parts(data.numpy(), n, dim)
        levels, head = self._levels(dim), self._head_bytes(dim)
        exceptions = [torch.empty(0, dtype=torch.int64, device="cpu")]
        for part, (start, stop) in enumerate(self._ranges(0, n)):
            values = rows[start:stop].double().numpy()
            sound = np.abs(values).max(axis=1, initial=0) <= _FP16_MAX  # not with NaN, either
            scaled = np.ldexp(np.where(sound[:, None], values, 0), exponent)
            lost = lost_rows(torch.from_numpy(scaled), torch.from_numpy(scaled).half()).numpy()
            sound[lost] = False
            scaled[lost] = 0
            if self.block_rows is None:
                heads, codes = _encode_rows(scaled, levels)
            else:
                codebook, heads, codes = _encode_block(scaled, levels)
                codebooks[part] = codebook
                if rows.dtype == torch.float16:
                    ends = heads[:, 1:].astype(float) + heads[:, :1].astype(float) * (0.0, 1.0)
                    sound &= np.abs(np.ldexp(ends, -exponent)).max(axis=1) < _INFINITE_HALF
            coded[start:stop, :head] = heads.view(np.uint8)
            coded[start:stop, head:] = _pack(codes, self.bits)
            exceptions.append(torch.from_numpy(np.flatnonzero(~sound) + start))
        return Encoded(data, {"exponent": exponent}, torch.cat(exceptions))

    def decode(
        self, data: torch.Tensor, parameters: Parameters, rows: int, start: int, out: torch.Tensor
    ) -> None:
        dim = out.shape[1]
        exponent = parameters.get("exponent")
        if type(exponent) is not int or abs(exponent) > _MAX_EXPONENT:
            raise ValueError(f"{exponent!r} is no exponent of a block of {self.name}")
        require_size(data, self._size(rows, dim), f"{rows} rows of {dim} values in {self.name}")
        codebooks, coded = self._parts(data.numpy(), rows, dim)
        levels, head = self._levels(dim), self._head_bytes(dim)
        for begin, end in self._parts_of(start, start + out.shape[0]):
            heads = np.ascontiguousarray(coded[begin:end, :head]).view(np.float16).astype(float)
            codes = _unpack(coded[begin:end, head:], self.bits, dim)
            if int(codes.max(initial=0)) >= levels:
                raise ValueError(f"{self.name}: a code beyond the row's {levels} centroids")
            if self.block_rows is None:
                values = np.take_along_axis(heads, codes.astype(np.int64), axis=1)
            else:
                codebook = codebooks[begin // self.block_rows].astype(float)
                values = heads[:, 1:] + heads[:, :1] * codebook[codes]
            part = out[begin - start : end - start]
            part.copy_(torch.from_numpy(np.ldexp(values, -exponent)))

    def row_bytes(self, dim: int) -> int | None:
        return self._row_bytes(dim) if self.block_rows is None else None  # rows share a codebook

    def spec(self) -> CodecSpec:
        spec: CodecSpec = {"name": self.name, "version": self.version, "bits": self.bits}
        return spec if self.block_rows is None else spec | {"block_rows": self.block_rows}

    def _levels(self, dim: int) -> int:
        """Count the values of a codebook; a row's own has no more than the row has elements."""
        return min(2**self.bits, dim) if self.block_rows is None else 2**self.bits

    def _head_bytes(self, dim: int) -> int:
        """Count the bytes before a row's codes: its centroids, or its scale and bias."""
        return 2 * self._levels(dim) if self.block_rows is None else 4

    def _row_bytes(self, dim: int) -> int:
        return self._head_bytes(dim) + -(-dim * self.bits // 8)

    def _codebooks(self, rows: int) -> int:
        return 0 if self.block_rows is None else -(-rows // self.block_rows)

    def _size(self, rows: int, dim: int) -> int:
        return self._codebooks(rows) * 2 * self._levels(dim) + rows * self._row_bytes(dim)

    def _parts(self, data: np.ndarray, rows: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
        """View the codebooks, ``(blocks, levels)`` fp16, and the rows, ``(rows, bytes)`` uint8."""
        split = self._codebooks(rows) * 2 * self._levels(dim)
        codebooks = data[:split].view(np.float16).reshape(-1, self._levels(dim))
        return codebooks, data[split:].reshape(rows, self._row_bytes(dim))

    def _parts_of(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield ranges as ``_ranges``, of no more rows than are decoded at a time."""
        for begin, end in self._ranges(start, stop):
            for first in range(begin, end, _PART_ROWS):
                yield first, min(end, first + _PART_ROWS)

    def _ranges(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield ranges of rows from ``start`` to ``stop``, each within one block."""
        size = self.block_rows or _PART_ROWS
        while start < stop:
            end = min(stop, (start // size + 1) * size)
            yield start, end
            start = end


def require_kmeans1d() -> Any:
    """Import kmeans1d early, so that a missing library fails before the first save.

    Raises:
        ImportError: kmeans1d is not installed.
    """
    try:
        return importlib.import_module("kmeans1d")
    except ImportError as error:
        raise ImportError(
            "encoding with the codec 'kmeans' needs the package kmeans1d, which is not installed: "
            "pip install 'torchrec_checknrun[kmeans]', or choose another codec"
        ) from error


def _exponent(rows: torch.Tensor) -> int:
    """Return the exponent that brings the largest finite row in range to just below 2**13."""
    top = 0.0
    for part in rows.split(_PART_ROWS):
        if part.numel() > 0:
            largest = part.double().abs().amax(dim=1)
            top = max(top, float(torch.where(largest <= _FP16_MAX, largest, 0.0).max()))
    return _TOP_EXPONENT - int(np.frexp(top)[1]) if top > 0 else 0


def _centroids(values: np.ndarray, k: int) -> np.ndarray:
    """Find the at most ``k`` centroids of 1-D values with the least squared error, sorted."""
    distinct = np.unique(values)
    if len(distinct) <= k:
        return distinct
    clustered = require_kmeans1d().cluster(values.tolist(), k)
    return np.unique(np.array(clustered.centroids)[np.unique(clustered.clusters)])


def _filled(codebook: np.ndarray, levels: int) -> np.ndarray:
    """Return the codebook in fp16, its last value repeated up to ``levels``."""
    filled = np.full(levels, codebook[-1], dtype=np.float16)
    filled[: len(codebook)] = codebook
    return filled


def _nearest(values: np.ndarray, codebook: np.ndarray) -> np.ndarray:
    """Return the positions of the nearest values of a sorted codebook, uint8."""
    wide = codebook.astype(float)
    return np.searchsorted((wide[1:] + wide[:-1]) / 2, values).astype(np.uint8)


def _encode_rows(rows: np.ndarray, levels: int) -> tuple[np.ndarray, np.ndarray]:
    """Return every row's codebook (fp16) and codes."""
    codebooks = np.empty((len(rows), levels), dtype=np.float16)
    codes = np.empty(rows.shape, dtype=np.uint8)
    for i, row in enumerate(rows):
        codebooks[i] = _filled(_centroids(row, levels), levels)
        codes[i] = _nearest(row, codebooks[i])
    return codebooks, codes


def _encode_block(rows: np.ndarray, levels: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the block's codebook (fp16, from 0 to 1), each row's fp16 scale and bias, and codes.

    Scale and bias are fitted in turns with the codebook, as in Lloyd's algorithm.
    """
    bias = rows.min(axis=1, keepdims=True)
    scale = rows.max(axis=1, keepdims=True) - bias
    # Rows that vary by less than an fp16 step do not shape the codebook: scaled, their values are
    # noise, and different noise whenever they are encoded again.
    varied = scale[:, 0] > _FP16_STEP * np.abs(rows).max(axis=1)
    codebook = _sampled_centroids(_unit(rows, scale, bias)[varied], levels)
    for _ in range(_REFINEMENTS):
        codes = _codes(rows, scale, bias, codebook)
        scale, bias = _fit(rows, codebook[codes])
        codes = _codes(rows, scale, bias, codebook)
        codebook = _means(_unit(rows, scale, bias)[varied], codes[varied], codebook)
    # Many triples of codebook, scales and biases are equal: always take the one from 0 to 1.
    low, width = codebook[0], codebook[-1] - codebook[0]
    stored = _filled((codebook - low) / width, levels)
    heads = np.concatenate([scale * width, bias + scale * low], axis=1).astype(np.float16)
    scale, bias = heads[:, :1].astype(float), heads[:, 1:].astype(float)
    return stored, heads, _codes(rows, scale, bias, stored)


def _unit(rows: np.ndarray, scale: np.ndarray, bias: np.ndarray) -> np.ndarray:
    return (rows - bias) / np.where(scale > 0, scale, 1.0)


def _sampled_centroids(values: np.ndarray, levels: int) -> np.ndarray:
    """Find centroids of rows' values in [0, 1] on a sample; 0 and 1 where there are no rows."""
    if values.size == 0:
        return np.array([0.0, 1.0])
    flat = values.reshape(-1)
    bins = np.minimum((flat * _BINS).astype(np.int64), _BINS - 1)
    counts = np.bincount(bins, minlength=_BINS)
    used = counts > 0
    means = np.bincount(bins, weights=flat, minlength=_BINS)[used] / counts[used]
    copies = np.maximum(1, counts[used] * _SAMPLE // flat.size)
    return _centroids(np.repeat(means, copies), levels)


def _codes(
    rows: np.ndarray, scale: np.ndarray, bias: np.ndarray, codebook: np.ndarray
) -> np.ndarray:
    """Return the nearest codes; a row's lowest value gets the first, its highest the last."""
    codes = _nearest(_unit(rows, scale, bias), codebook)
    low, high = rows.min(axis=1, keepdims=True), rows.max(axis=1, keepdims=True)
    codes[rows == high] = len(codebook) - 1
    codes[rows == low] = 0
    return codes


def _fit(rows: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Fit every row's scale and bias by least squares: ``rows ≈ bias + scale * targets``."""
    target_mean = targets.mean(axis=1, keepdims=True)
    row_mean = rows.mean(axis=1, keepdims=True)
    spread = targets - target_mean
    variance = (spread**2).sum(axis=1, keepdims=True)
    covariance = (spread * (rows - row_mean)).sum(axis=1, keepdims=True)
    scale = covariance / np.where(variance > 0, variance, 1.0)
    return scale, row_mean - scale * target_mean


def _means(values: np.ndarray, codes: np.ndarray, codebook: np.ndarray) -> np.ndarray:
    """Return every code's mean value, sorted; the old value of a code that isn't used."""
    counts = np.bincount(codes.reshape(-1), minlength=len(codebook))
    sums = np.bincount(codes.reshape(-1), weights=values.reshape(-1), minlength=len(codebook))
    return np.sort(np.where(counts > 0, sums / np.maximum(counts, 1), codebook))


def _pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Pack ``(n, dim)`` codes into ``(n, bytes)``, low bits first."""
    n, dim = codes.shape
    single = np.unpackbits(codes[:, :, None], axis=2, count=bits, bitorder="little")
    return np.packbits(single.reshape(n, dim * bits), axis=1, bitorder="little")


def _unpack(packed: np.ndarray, bits: int, dim: int) -> np.ndarray:
    single = np.unpackbits(packed, axis=1, count=dim * bits, bitorder="little")
    return np.packbits(single.reshape(-1, dim, bits), axis=2, bitorder="little")[:, :, 0]
