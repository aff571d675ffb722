"""Define the calls of the codec benchmark: our, FBGEMM's and torch's operators on the same rows.

FBGEMM's operators on the CPU use one thread and allocate their results; beside the bare operator
on all rows stand the one that writes into a given buffer, where there is one, and the bare operator
on blocks of rows, whose output the allocator keeps warm.

On a GPU rows are encoded there and the bytes copied to the host; decoding is the CPU's.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import fbgemm_gpu  # noqa: F401  # registers torch.ops.fbgemm
import numpy as np
import torch

from torchrec_checknrun import Quantization
from torchrec_checknrun.bitwidth import row_bytes
from torchrec_checknrun.codecs import (
    Codec,
    ImportanceWeighted,
    Method,
    RowContext,
    Rowwise,
)
from torchrec_checknrun.codecs.base import WIDTHS
from torchrec_checknrun.codecs.kernels import numpy_rows
from torchrec_checknrun.codecs.kmeans import KMeans
from torchrec_checknrun.codecs.row_state import STATE_SCHEMES, decode_row_state, encode_row_state
from torchrec_checknrun.format import row_ids

METHODS = ("asymmetric", "symmetric", "greedy", "adaptive")
GATHERED = ((8, "asymmetric"), (4, "asymmetric"), (2, "asymmetric"), (4, "adaptive"))
DENSITIES = (0.001, 0.01, 0.1, 0.25, 0.5)
GATHER_PART = 4
"""One of so many rows is taken out of the table."""
SAMPLE_ROWS = 16384
"""Rows to measure an error on."""
BLOCK_ROWS = 4096
HAS_KMEANS = importlib.util.find_spec("kmeans1d") is not None
OURS = "this package"
TWO_PASSES = "gather, then encode"
REFERENCES = (
    "memcpy",
    "FBGEMM",
    "FBGEMM out",
    "FBGEMM blocks",
    "torch prepack",
    "torch prepack optimized",
    TWO_PASSES,
    "only gather",
)
"""The calls to compare others with."""
_DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class Case:
    """A call to be timed. ``nbytes``: fp32 bytes that the call reads or returns."""

    part: str
    who: str
    method: str
    bits: int | None
    nbytes: int
    call: Callable[[], object]
    row_bytes: float | None = None
    error: float | None = None
    note: str = ""
    over_entropy: float | None = None
    """Bytes over the entropy of what they hold."""


def gaussian(rows_bytes: int, dim: int) -> torch.Tensor:
    """Draw rows ``(n, dim)`` of ``rows_bytes`` bytes."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows_bytes // (4 * dim), dim, generator=generator).to(_DEVICE)


def error_of(rows: torch.Tensor, decoded: torch.Tensor) -> float:
    """Average over rows the l2 norm of the difference over the row's."""
    rows = rows.cpu()
    return float(((decoded - rows).norm(dim=1) / rows.norm(dim=1)).mean())


def codec_error(codec: Codec, rows: torch.Tensor, context: RowContext) -> tuple[float, str]:
    """Measure the error on a sample of the rows; also return the parameters that the codec has
    chosen.
    """
    sample = rows[:SAMPLE_ROWS]
    sampled = {name: state[: len(sample)] for name, state in context.optimizer.items()}
    encoded = codec.encode(sample, context=RowContext(sampled))
    decoded = torch.empty(sample.shape)
    codec.decode(encoded.data.view(-1), encoded.parameters, len(sample), 0, decoded)
    greedy = [
        f"{encoded.parameters[n]} {n}" for n in ("num_bins", "ratio") if n in encoded.parameters
    ]
    return error_of(sample, decoded), ", ".join(greedy)


def codecs(dim: int, rows: int) -> Iterator[tuple[str, int, Codec, RowContext]]:
    """Yield (method, bits, codec, context of ``rows`` rows) of all codecs that run at memory speed,
    or should.
    """
    for method in METHODS:
        for bits in WIDTHS:
            yield method, bits, Rowwise(bits, method), RowContext()
    spread = torch.randn(rows, generator=torch.Generator().manual_seed(1)).mul_(4).exp_()
    context = RowContext({"momentum1": spread.to(_DEVICE)})
    yield "importance", 4, ImportanceWeighted(mean_bits=4.0), context
    for method in ("fp16", "bf16"):
        yield (
            method,
            16,
            Quantization(method=method).for_table("", rows=1 << 30).codec,
            RowContext(),
        )


def encode_cases(rows: torch.Tensor, slow_rows: int) -> Iterator[Case]:
    """Yield our, FBGEMM's, torch's and the fallback's encoders; k-means if its library is
    installed.
    """
    dim = rows.shape[1]
    case = partial(Case, "encode")
    # Touched, and as large as any result here: fp32 rows for memcpy, or importance's mixture.
    buffer = torch.zeros(len(rows) * (4 * dim + 8), dtype=torch.uint8, pin_memory=rows.is_cuda)
    for method, bits, codec, context in codecs(dim, len(rows)):
        error, note = codec_error(codec, rows, context)
        encode = partial(codec.encode, rows, context=context, out=buffer)
        size = encode().data.numel() / len(rows)
        yield case(OURS, method, bits, rows.nbytes, encode, size, error, note)
    few = rows[: len(rows) // 16]
    slow = rows[:slow_rows].cpu()
    if not rows.is_cuda:
        refused = torch.empty(len(few), dtype=torch.uint8)
        for bits in WIDTHS:
            size = row_bytes(dim, bits)
            out = buffer[: len(few) * size].view(len(few), size)
            search = Method.ASYMMETRIC if bits == 8 else Method.ADAPTIVE
            arguments = (few, None, bits, int(search), 1, 0.0, 1.0, out, refused)
            numpy_rows.encode_rows(*arguments)
            decoded = torch.empty(few.shape)
            numpy_rows.decode_rows(out, bits, 1.0, None, decoded)
            plain = partial(numpy_rows.encode_rows, *arguments)
            error = error_of(few, decoded)
            yield case("fallback", search.name.lower(), bits, few.nbytes, plain, size, error)
        for bits in (2, 4) if HAS_KMEANS else ():
            kmeans = KMeans(bits)
            error, note = codec_error(kmeans, slow, RowContext())
            cluster = partial(kmeans.encode, slow)
            size = cluster().data.numel() / len(slow)
            yield case("k-means", "kmeans", bits, slow.nbytes, cluster, size, error, note)
    yield from _prepack_cases(slow)
    for bits in (2, 4, 8):
        op, size = partial(_fbgemm_encode, bits=bits), row_bytes(dim, bits)
        error = error_of(rows[:SAMPLE_ROWS], _fbgemm_decode(op(rows[:SAMPLE_ROWS]), bits).cpu())
        calls: dict[str, Callable[[], object]]
        if rows.is_cuda:
            calls = {"FBGEMM": partial(_to_host, op, buffer, rows)}
        else:
            calls = {"FBGEMM": partial(op, rows), "FBGEMM blocks": partial(_by_blocks, op, rows)}
        if bits == 8 and not rows.is_cuda:
            into = buffer[: len(rows) * size].view(len(rows), size)
            out_op = torch.ops.fbgemm.FloatToFused8BitRowwiseQuantizedOut
            calls["FBGEMM out"] = partial(out_op, into, rows)
        for who, call in calls.items():
            yield case(who, "asymmetric", bits, rows.nbytes, call, size, error)
    values = buffer[: rows.nbytes].view(torch.float32).view(rows.shape)
    yield case("memcpy", "", None, rows.nbytes, partial(values.copy_, rows))


def _prepack_cases(slow: torch.Tensor) -> Iterator[Case]:
    quantized = torch.ops.quantized
    byte = quantized.embedding_bag_byte_prepack
    four = quantized.embedding_bag_4bit_prepack
    packers: dict[tuple[str, int], Callable[[torch.Tensor], torch.Tensor]] = {
        ("torch prepack", 8): byte,
        ("torch prepack", 4): partial(four, optimized_qparams=False),
        ("torch prepack optimized", 4): partial(four, optimized_qparams=True),
    }
    for (who, bits), pack in packers.items():
        packed = pack(slow)
        error = error_of(slow, _fbgemm_decode(packed, bits))
        size = packed.numel() / len(slow)
        method = "greedy" if "optimized" in who else "asymmetric"
        yield Case("encode", who, method, bits, slow.nbytes, partial(pack, slow), size, error)


def decode_cases(rows: torch.Tensor) -> Iterator[Case]:
    """Yield our, the fallback's and FBGEMM's decoders, on the CPU."""
    rows = rows.cpu()
    values = torch.zeros(rows.shape)
    case = partial(Case, "decode", nbytes=rows.nbytes)
    few = values[: len(rows) // 16]
    for bits in WIDTHS:
        codec = Rowwise(bits, "asymmetric")
        data = codec.encode(rows).data
        call = partial(codec.decode, data, {}, len(rows), 0, values)
        yield case(OURS, "rowwise", bits, call=call)
        part = data[: len(few)]
        slow = partial(numpy_rows.decode_rows, part, bits, 1.0, None, few)
        yield Case("decode", "fallback", "rowwise", bits, few.nbytes, slow)
        if bits == 3:
            continue
        op = partial(_fbgemm_decode, bits=bits)
        yield case("FBGEMM", "rowwise", bits, call=partial(op, data))
        yield case("FBGEMM blocks", "rowwise", bits, call=partial(_by_blocks, op, data))
        if bits == 8:
            into = torch.ops.fbgemm.Fused8BitRowwiseQuantizedToFloatOut
            yield case("FBGEMM out", "rowwise", bits, call=partial(into, values, data))
    yield case("memcpy", "", None, call=partial(values.copy_, rows))


def gather_cases(table: torch.Tensor) -> Iterator[Case]:
    """Encode some of a table's rows in one pass, and gathered first."""
    count, dim = len(table) // GATHER_PART, table.shape[1]
    generator = torch.Generator().manual_seed(2)
    ids = torch.randperm(len(table), generator=generator)[:count].sort().values.to(table.device)
    gathered = torch.zeros((count, dim), device=table.device)
    buffer = torch.zeros(count * row_bytes(dim, 8), dtype=torch.uint8, pin_memory=table.is_cuda)
    case = partial(Case, "gather", nbytes=gathered.nbytes)

    def two_passes(codec: Codec) -> None:
        torch.index_select(table, 0, ids, out=gathered)
        codec.encode(gathered, out=buffer)

    for bits, method in GATHERED:
        codec = Rowwise(bits, method)
        yield case(OURS, method, bits, call=partial(codec.encode, table, ids, out=buffer))
        yield case(TWO_PASSES, method, bits, call=partial(two_passes, codec))
    only = partial(torch.index_select, table, 0, ids, out=gathered)
    yield case("only gather", "", None, call=only)


def row_id_cases(table_ids: int) -> Iterator[Case]:
    """Encode row ids at several densities; ``row_bytes`` are an id's."""
    for density in DENSITIES:
        count = round(table_ids * density)
        ids = np.sort(np.random.default_rng(0).choice(table_ids, count, replace=False))
        copy = np.zeros_like(ids)
        encoding, data = row_ids.encode(ids)
        entropy = -math.log2(density) - (1 - density) / density * math.log2(1 - density)
        note = f"{encoding}; entropy {entropy / 8:.3f} B/row"
        case = partial(Case, method=f"{density:.1%}", bits=None, nbytes=ids.nbytes)
        decode = partial(row_ids.decode, encoding, data, int(ids[0]), int(ids[-1]), count)
        calls: dict[str, Callable[[], object]] = {
            "encode row ids": partial(row_ids.encode, ids),
            "decode row ids": decode,
        }
        for part, call in calls.items():
            yield case(part, OURS, call=call, row_bytes=len(data) / count, note=note)
            yield case(part, "memcpy", call=partial(np.copyto, copy, ids))


def row_state_cases(rows: int) -> Iterator[Case]:
    """Encode row-wise Adagrad's state of ``rows`` rows, over its range of fifty powers of two.

    rowlog8 encodes as many values of pointwise state, those of a row alike.
    """
    values = torch.linspace(-53, -4, rows).exp2_()[torch.randperm(rows)]
    copy = torch.zeros_like(values)
    for scheme in STATE_SCHEMES:
        state = values.sort().values.view(-1, 64) if scheme == "rowlog8" else values
        data, parameters = encode_row_state(state, scheme)
        decode = partial(decode_row_state, data, parameters, state.shape, values.dtype)
        error = float(((decode() - state).abs() / state).mean())
        case = partial(Case, method=scheme, bits=None, nbytes=values.nbytes)
        calls: dict[str, Callable[[], object]] = {
            "encode row state": partial(encode_row_state, state, scheme),
            "decode row state": decode,
        }
        for part, call in calls.items():
            yield case(part, OURS, call=call, row_bytes=data.numel() / rows, error=error)
            yield case(part, "memcpy", call=partial(copy.copy_, values))


def _fbgemm_encode(rows: torch.Tensor, bits: int) -> torch.Tensor:
    ops = torch.ops.fbgemm
    if bits == 8:
        return ops.FloatToFused8BitRowwiseQuantized(rows)
    return ops.FloatToFusedNBitRowwiseQuantizedSBHalf(rows, bits)


def _fbgemm_decode(data: torch.Tensor, bits: int) -> torch.Tensor:
    ops = torch.ops.fbgemm
    if bits == 8:
        return ops.Fused8BitRowwiseQuantizedToFloat(data)
    return ops.FusedNBitRowwiseQuantizedSBHalfToFloat(data, bits)


def _by_blocks(op: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> None:
    for block in rows.split(BLOCK_ROWS):
        op(block)


def _to_host(
    op: Callable[[torch.Tensor], torch.Tensor], buffer: torch.Tensor, rows: torch.Tensor
) -> None:
    encoded = op(rows)
    buffer[: encoded.numel()].view(encoded.shape).copy_(encoded)
