"""Quantize rows uniformly, each on its own, in FBGEMM's fused layouts (Check-N-Run, section 4.2).

A row is ``value = code * scale + bias`` with codes of 2, 3, 4 or 8 bits. At 8, 4 and 2 bits the
bytes are laid out as by ``torch.ops.fbgemm``, so that inference can use them unchanged: packed
codes, then scale and bias, in fp32 at 8 bits and in fp16 otherwise; the method ``asymmetric`` gives
exactly FBGEMM's bytes. Where FBGEMM refuses a dim, zero codes fill the last 16-bit word. At 3 bits,
which FBGEMM doesn't know, 8 codes take 3 bytes.

Three silent faults of FBGEMM are fixed here. A row that is not finite, or beyond fp16's range, or
that its rounded scale would make infinite, is an exception that the caller stores exactly. Rows so
small that a fp16 scale loses bits are multiplied by a power of two, the same for the whole block,
before they are encoded (the few of an otherwise normal block are stored exactly). Too small is also
a row of small values with a range below which rounding the scale (at 8 bits, FBGEMM's 1e-8) would
change codes at every pass.

The greedy search's options, unless given, are chosen per block on a sample of rows (section 4.2.3):
a sweep over few rows shows the mean error of all, and the search's time grows with both options, so
the smallest of each is taken after which the error stays flat.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, TypeVar

import torch

from torchrec_checknrun.bitwidth import row_bytes
from torchrec_checknrun.codecs.base import (
    NO_CONTEXT,
    WIDTHS,
    Codec,
    CodecSpec,
    Encoded,
    Method,
    Parameters,
    Refusal,
    RowContext,
    output,
    require_size,
)
from torchrec_checknrun.codecs.kernels.dispatch import decode_rows, encode_rows

T = TypeVar("T", bound=float)

BINS = (5, 10, 15, 20, 25, 30, 35, 40, 45, 50)
"""Numbers of steps that the greedy search is tried with."""
RATIOS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Shares of the range that the greedy search may cut away, likewise."""
SAMPLE_ROWS = 256
"""Rows of a block that the greedy search's options are chosen on."""
FLAT = 0.01
"""A gain below this part of the whole sweep's gain counts as flat."""
_KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_MOST_BINS = 1 << 20
_FEW = 64
"""One row in so many may be stored exactly before the whole block is scaled for them."""


class Rowwise(Codec):
    """Uniform quantization of every row to 2, 3, 4 or 8 bits a value.

    Error of an element, asymmetric and symmetric: at most half a step, ``range / (2**bits - 1) /
    2``, plus the rounding of scale and bias (fp32 and 1e-8 at 8 bits, otherwise fp16). Greedy and
    adaptive: a row's l2 error is at most the asymmetric one. Encoding decoded rows gives the same
    values again; but for a last bit at 8 bits (of fp32) and of rows in fp16 or bf16 (their own),
    and for blocks of rows around 1e-5, which are scaled in one pass and perhaps not in the next:
    there scale and bias may be rounded once more.

    Args:
        bits: width of a code.
        method: a ``Method`` or its name in lower case; ``adaptive`` gains nothing at 8 bits and is
            asymmetric there.
        num_bins: greedy: steps that the range is cut into; None: chosen on a sample of each block.
        ratio: greedy: share of the range that may be cut away; None: likewise.

    Raises:
        ValueError: an argument is out of range.
    """

    name: ClassVar[str] = "fbgemm_rowwise"
    version: ClassVar[int] = 2
    lossy: ClassVar[bool] = True

    def __init__(
        self,
        bits: int,
        method: Method | str = Method.ADAPTIVE,
        num_bins: int | None = None,
        ratio: float | None = None,
    ) -> None:
        if type(bits) is not int or bits not in WIDTHS:
            raise ValueError(f"bits must be one of {WIDTHS}, not {bits!r}")
        name = method.name.lower() if isinstance(method, Method) else method
        names = [known.name.lower() for known in Method]
        if name not in names:
            raise ValueError(f"method must be one of {names}, not {method!r}")
        if num_bins is not None and (type(num_bins) is not int or not 1 <= num_bins <= _MOST_BINS):
            raise ValueError(f"num_bins must be from 1 to {_MOST_BINS}, not {num_bins!r}")
        if ratio is not None and (type(ratio) not in (int, float) or not 0 <= ratio <= 1):
            raise ValueError(f"ratio must be between 0 and 1, not {ratio!r}")
        self.bits = bits
        self.method = Method[name.upper()]
        self.num_bins = num_bins
        self.ratio = ratio

    @classmethod
    def from_spec(cls, spec: CodecSpec) -> Codec:
        return super().from_spec({"method": "asymmetric"} | spec)  # all that version 1 had

    @property
    def value_bits(self) -> int:
        return self.bits

    def row_bytes(self, dim: int) -> int:
        """Return the bytes of an encoded row."""
        return row_bytes(dim, self.bits)

    def encode(
        self,
        rows: torch.Tensor,
        ids: torch.Tensor | None = None,
        context: RowContext = NO_CONTEXT,
        out: torch.Tensor | None = None,
    ) -> Encoded:
        rows = rows.detach()
        if ids is not None:
            ids = ids.to(rows.device).contiguous()
        if rows.dtype not in _KERNEL_DTYPES:
            rows, ids = (rows if ids is None else rows[ids]).to(torch.float32), None
        if rows.shape[1] > 1 and rows.stride(1) != 1:
            rows = rows.contiguous()
        n = len(rows) if ids is None else len(ids)
        size = row_bytes(rows.shape[1], self.bits)
        data = output(n * size, out).view(n, size)
        if not n:
            return Encoded(data, {}, torch.empty(0, dtype=torch.int64, device="cpu"))
        parameters: Parameters = {}
        num_bins, ratio = self.num_bins or 1, self.ratio or 0.0
        searches = self.method == Method.GREEDY and self.bits < 8
        if searches and (self.num_bins is None or self.ratio is None):
            num_bins, ratio = choose_greedy(rows, ids, self.bits, self.num_bins, self.ratio)
            parameters |= {"num_bins": num_bins, "ratio": ratio}

        def attempt(factor: float, into: torch.Tensor) -> torch.Tensor:
            return encode_rows(rows, ids, self.bits, self.method, num_bins, ratio, factor, into)

        refused = attempt(1.0, data)
        outside = int((refused > Refusal.NOT_FINITE).sum())
        if outside * _FEW > n:
            exponent = _exponent(rows if ids is None else rows[ids], refused)
            scaled = torch.empty_like(data)
            still_refused = attempt(2.0**exponent, scaled)
            if int((still_refused > 0).sum()) < int((refused > 0).sum()):
                data.copy_(scaled)
                refused = still_refused
                parameters["exponent"] = exponent
        # All others are far from infinity, or have a scale of too many bits to get there.
        if "exponent" in parameters or (rows.dtype == torch.float16 and self.bits < 8):
            refused[_overflowing(data, self.bits, parameters, rows.dtype)] = Refusal.TOO_LARGE
        return Encoded(data, parameters, refused.nonzero().view(-1))

    def decode(
        self, data: torch.Tensor, parameters: Parameters, rows: int, start: int, out: torch.Tensor
    ) -> None:
        part = self._part(data, parameters, rows, start, len(out), out.shape[1])
        if out.dtype in _KERNEL_DTYPES and out.device.type == "cpu":
            decode_rows(part, self.bits, decoding_factor(parameters), out)
        else:
            narrow = out.dtype if out.dtype in _KERNEL_DTYPES else torch.float32
            values = torch.empty(out.shape, dtype=narrow, device="cpu")
            decode_rows(part, self.bits, decoding_factor(parameters), values)
            out.copy_(values)

    def scatter(
        self,
        data: torch.Tensor,
        parameters: Parameters,
        rows: int,
        positions: torch.Tensor,
        ids: torch.Tensor,
        out: torch.Tensor,
    ) -> bool:
        if out.dtype not in _KERNEL_DTYPES or out.device.type != "cpu" or out.stride(1) != 1:
            return False
        part = self._part(data, parameters, rows, 0, rows, out.shape[1])
        decode_rows(part, self.bits, decoding_factor(parameters), out, ids, positions)
        return True

    def family(self, parameters: Parameters, dim: int) -> tuple[str, int, float]:
        return self.name, self.bits, decoding_factor(parameters)  # whatever found scale and bias

    def join(
        self,
        blocks: Sequence[tuple[torch.Tensor, Parameters, int]],
        places: Sequence[torch.Tensor],
        dim: int,
    ) -> tuple[torch.Tensor, Parameters]:
        data, parameters = super().join(blocks, places, dim)
        exponent = parameters.get("exponent")
        return data, {"exponent": exponent} if exponent else {}

    def _part(
        self, data: torch.Tensor, parameters: Parameters, rows: int, start: int, n: int, dim: int
    ) -> torch.Tensor:
        size = row_bytes(dim, self.bits)
        require_size(data, rows * size, f"{rows} rows of {dim} × {self.bits} bits")
        return data.view(rows, size)[start : start + n]

    def spec(self) -> CodecSpec:
        spec: CodecSpec = {
            "name": self.name,
            "version": self.version,
            "bits": self.bits,
            "method": self.method.name.lower(),
        }
        if self.num_bins is not None:
            spec = {**spec, "num_bins": self.num_bins}
        if self.ratio is not None:
            spec = {**spec, "ratio": self.ratio}
        return spec


def decoding_factor(parameters: Parameters) -> float:
    """Return the power of two that decoded rows are multiplied by."""
    exponent = parameters.get("exponent", 0)
    if type(exponent) is not int or abs(exponent) > 126:
        raise ValueError(f"exponent must be an integer from -126 to 126, not {exponent!r}")
    return 2.0**-exponent


def _overflowing(
    data: torch.Tensor, bits: int, parameters: Parameters, dtype: torch.dtype
) -> torch.Tensor:
    """Find the rows, sorted positions, whose lowest or highest code decodes to infinity."""
    top, factor, width = 2**bits - 1, decoding_factor(parameters), 4 if bits == 8 else 2
    codes = f"V{data.shape[1] - 2 * width}"
    rows = data.numpy().view([("codes", codes), ("scale", f"<u{width}"), ("bias", f"<u{width}")])
    tails = rows[:, 0]["scale"], rows[:, 0]["bias"]
    sign = 1 << (8 * width - 1)
    # Numbers of one sign are in the order of their bits, which are compared many times as fast.
    scale, bias = (float((t & (sign - 1)).max().view(f"<f{width}")) for t in tails)
    if (scale * top + bias) * factor < torch.finfo(dtype).max:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    scales, biases = (torch.from_numpy(t.copy().view(f"<f{width}")).double() for t in tails)
    ends = torch.stack((biases, biases + scales * top)).float() * factor
    return (~ends.to(dtype).isfinite().all(dim=0)).nonzero().view(-1)


def _exponent(rows: torch.Tensor, refused: torch.Tensor) -> int:
    """Return the exponent that brings a block's largest magnitude to between 2**14 and 2**15.

    Rows too large for fp16 count only if they are more than half of the block.
    """
    magnitude = rows.to(torch.float32).abs().amax(dim=1).cpu()
    large = refused == Refusal.TOO_LARGE
    counted = magnitude.isfinite() & (refused != Refusal.NOT_FINITE)
    if int(large.sum()) * 2 <= len(rows):
        counted &= ~large
    largest = float(magnitude[counted].max()) if bool(counted.any()) else 0.0
    if largest == 0.0:
        return 0
    return max(-126, min(126, 15 - math.frexp(largest)[1]))


def choose_greedy(
    rows: torch.Tensor,
    ids: torch.Tensor | None,
    bits: int,
    num_bins: int | None = None,
    ratio: float | None = None,
) -> tuple[int, float]:
    """Choose ``num_bins`` and ``ratio`` for a block of rows; a given one is kept.

    The sweep of Check-N-Run, section 4.2.3: the smallest number of bins, then the smallest ratio,
    whose error is flat.

    Args:
        rows: ``(m, dim)`` floating point.
        ids: ``(n,)`` int64, the block's rows; None: all.
        bits: width of a code.
    """
    if ids is None:
        ids = torch.arange(len(rows), device=rows.device)
    sample = rows.index_select(0, ids[:: max(1, -(-len(ids) // SAMPLE_ROWS))]).to(torch.float64)
    magnitude = sample.abs().amax(dim=1)
    magnitude = magnitude[magnitude.isfinite() & (magnitude > 0)]
    if len(magnitude):  # a block of tiny or huge rows is scaled before it is encoded, too
        sample *= 2.0 ** -torch.frexp(magnitude.median()).exponent
    sample = sample.to(torch.float32)
    bins = BINS if num_bins is None else (num_bins,)
    ratios = RATIOS if ratio is None else (ratio,)
    chosen = _knee(bins, [mean_error(sample, bits, n, ratios[-1]) for n in bins])
    return chosen, _knee(ratios, [mean_error(sample, bits, chosen, r) for r in ratios])


def mean_error(rows: torch.Tensor, bits: int, num_bins: int, ratio: float) -> float:
    """Return the greedy search's mean l2 error over the rows that can be quantized.

    Args:
        rows: ``(n, dim)`` float32.
    """
    encoded = torch.empty(
        (len(rows), row_bytes(rows.shape[1], bits)), dtype=torch.uint8, device="cpu"
    )
    refused = encode_rows(rows, None, bits, Method.GREEDY, num_bins, ratio, 1.0, encoded)
    decoded = torch.empty_like(rows, device="cpu")
    decode_rows(encoded, bits, 1.0, decoded)
    error = (decoded - rows.cpu())[refused == Refusal.NONE].norm(dim=1)
    return float(error.mean()) if len(error) else 0.0


def _knee(values: tuple[T, ...], errors: list[float]) -> T:
    """Return the smallest value whose error is within ``FLAT`` of the best one's."""
    best, worst = min(errors), max(errors)
    allowed = best + FLAT * (worst - best)
    return next(v for v, error in zip(values, errors, strict=True) if error <= allowed)
