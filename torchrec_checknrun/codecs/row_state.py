"""Convert optimizer state of rows to bytes and back.

Exact by default. ``bf16`` and ``log8`` are for row-wise state (one value per row, as in row-wise
Adagrad), ``rowlog8`` is for pointwise state as well (one per weight, as Adam's moments). A sum
of squared gradients enters an update through its square root, so a few per cent of error hardly
matter, but the values span tens of powers of two within one table. For that reason fp16 isn't
offered: its smallest number is 6e-8, most rows' sums lie below and would become zero, and the next
update of such a row would be as large as its first one.

A scheme is a class here, listed in ``_SCHEMES``: nothing else has to know of it. But ``logdelta``,
whose rows may be differences to those of the checkpoint before: codecs that build on it
(``chained``) encode such state, and references hold what it restores to.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Hashable

import numpy as np
import torch

from torchrec_checknrun.codecs.base import Parameters, require_size

_STEPS = frozenset({"prev_iter"})
"""States of rows that are the step of the last update: FBGEMM takes the difference to the present
one, so that a small part of it, or more steps than were made, is a wrong state.
"""
LOGDELTA = "logdelta"
"""The scheme of row-wise state whose rows are ``log_levels``, or differences of these."""
_STEP = 8 / 63
"""The logarithm, to base 2, of the ratio of two levels of rowlog8; 126 make 16 powers of two."""
_LEAST_SCALE = 2.0**-93
"""The least scale of rowlog8: the lowest level of such a row is still a normal number."""
_KEY_BITS = 15
"""Low bits of a ratio to the row's scale that its code in rowlog8 doesn't depend on."""
_BLOCK_VALUES = 2**15
"""Values that rowlog8 encodes at a time: they stay in the processor's cache."""


def encode_row_state(state: torch.Tensor, scheme: str) -> tuple[torch.Tensor, Parameters]:
    """Encode a chunk's optimizer state.

    State that its scheme would destroy is stored exactly, and so are integers. The parameters name
    the scheme that was used.

    Args:
        state: ``(n,)`` (row-wise) or ``(n, cols)`` (pointwise), on any device.
        scheme: one of ``STATE_SCHEMES``.

    Returns:
        The bytes (1-D uint8, on the CPU; for ``fp32`` maybe the values' own memory) and the
        parameters for ``decode_row_state``: ``scheme`` and the scheme's own.

    Raises:
        ValueError: the scheme is unknown.
    """
    if scheme not in _SCHEMES:
        raise ValueError(f"optimizer state is stored as {_names()}, not as {scheme!r}")
    state = state.detach().contiguous()
    if state.is_floating_point() and state.numel() > 0:
        encoded = _SCHEMES[scheme].encode(state)
        if encoded is not None:
            return encoded[0].view(-1), {"scheme": scheme} | encoded[1]
    return _bytes(state).view(-1), {"scheme": "fp32"}


def decode_row_state(
    data: torch.Tensor, parameters: Parameters, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Decode the state of rows, on the CPU.

    Each row has its own ``state_row_bytes`` of the data: any run of rows can be decoded alone.

    Args:
        data: 1-D uint8 on the CPU.
        parameters: as ``encode_row_state`` returned them.
        shape: ``(n,)`` or ``(n, cols)``.
        dtype: dtype of the encoded values.

    Raises:
        ValueError: data or parameters do not belong to such values.
    """
    size = state_row_bytes(parameters, shape, dtype)
    require_size(data, shape[0] * size, f"state of {shape} stored as {parameters['scheme']}")
    scheme = _SCHEMES[str(parameters["scheme"])]
    return scheme.decode(data.view(shape[0], size), parameters, dtype).view(shape)


def state_row_bytes(parameters: Parameters, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the bytes of a row of state.

    Args:
        shape: ``(n,)`` or ``(n, cols)``.

    Raises:
        ValueError: the parameters name no scheme, or one that can't hold the dtype.
    """
    name, cols = parameters.get("scheme"), math.prod(shape[1:])
    if name == "fp32":
        return cols * dtype.itemsize
    if name not in STATE_SCHEMES or not dtype.is_floating_point:
        raise ValueError(f"{dtype} is not stored as {name!r}; schemes: {_names()}")
    return _SCHEMES[str(name)].row_bytes(cols, dtype)


def family(parameters: Parameters) -> Hashable:
    """Return what chunks' state has in common that is stored together.

    State of one family whose parameters differ, in the range of its values, is decoded for that.
    """
    scheme = parameters.get("scheme")
    return scheme if scheme == "log8" else tuple(sorted(parameters.items()))


def is_log_link(parameters: Parameters) -> bool:
    """Return whether rows stored by ``LOGDELTA`` may be differences to those before.

    Raises:
        ValueError: these are no parameters of the scheme.
    """
    if parameters not in ({"scheme": LOGDELTA}, {"scheme": LOGDELTA, "link": True}):
        raise ValueError(f"{parameters} are not of {LOGDELTA}")
    return len(parameters) > 1


def is_log(name: str, state: torch.Tensor) -> bool:
    """Return whether state can be stored by ``LOGDELTA``: row-wise, in float32."""
    return state.dim() == 1 and state.dtype == torch.float32 and name not in _STEPS


def scheme_of(name: str, scheme: str) -> str:
    """Return the scheme for a state of this name, given the one for optimizer state."""
    return "fp32" if name in _STEPS else scheme


class _Scheme(ABC):
    """A way to store a chunk's state; every row takes as many bytes."""

    @abstractmethod
    def encode(self, state: torch.Tensor) -> tuple[torch.Tensor, Parameters] | None:
        """Encode floating-point state, ``(n,)`` or ``(n, cols)``; None if that would destroy it."""

    @abstractmethod
    def decode(self, rows: torch.Tensor, options: Parameters, dtype: torch.dtype) -> torch.Tensor:
        """Decode rows, ``(n, row_bytes)`` uint8, given what ``encode`` returned beside them."""

    @abstractmethod
    def row_bytes(self, cols: int, dtype: torch.dtype) -> int:
        """Return the bytes of a row of ``cols`` values."""


class _Exact(_Scheme):
    """The values' own bytes, whatever their dtype."""

    def encode(self, state: torch.Tensor) -> tuple[torch.Tensor, Parameters]:
        return _bytes(state), {}

    def decode(self, rows: torch.Tensor, options: Parameters, dtype: torch.dtype) -> torch.Tensor:
        return rows.clone().view(dtype)  # a copy: the rows may begin at an odd address

    def row_bytes(self, cols: int, dtype: torch.dtype) -> int:
        return cols * dtype.itemsize


class _Bf16(_Scheme):
    """Row-wise state rounded to 2 bytes; relative error at most 2**-8 (from 1.2e-38 on).

    State with a NaN, an infinity, or a value that would become infinity or zero is left alone.
    """

    def encode(self, state: torch.Tensor) -> tuple[torch.Tensor, Parameters] | None:
        if state.dim() > 1:
            return None
        rounded = state.to(torch.bfloat16)
        kept = torch.isfinite(rounded) & ((rounded != 0) == (state != 0))
        return (_bytes(rounded), {}) if bool(kept.all()) else None

    def decode(self, rows: torch.Tensor, options: Parameters, dtype: torch.dtype) -> torch.Tensor:
        return rows.clone().view(torch.bfloat16).to(dtype)

    def row_bytes(self, cols: int, dtype: torch.dtype) -> int:
        return 2 * cols


class _Log8(_Scheme):
    """Row-wise state in 1 byte; 0 is exactly zero, 1 to 255 are levels at equal ratios from the
    chunk's smallest positive value to its largest, both of which are exact.

    Relative error at most ``(high / low) ** (1 / 508) - 1`` (half the distance of two levels; 7 %
    if high is 2**50 times low), plus the dtype's own rounding. Encoding decoded values changes
    nothing. State with a NaN, an infinity or a negative value is left alone.
    """

    def encode(self, state: torch.Tensor) -> tuple[torch.Tensor, Parameters] | None:
        # One pass: a NaN anywhere makes both extremes NaN.
        lowest, highest = torch.aminmax(state)
        if state.dim() > 1 or not bool((lowest >= 0) & torch.isfinite(highest)):
            return None
        wide = state if state.dtype in (torch.float32, torch.float64) else state.float()
        positive = wide > 0
        high = float(highest)
        low = float(torch.where(positive, wide, torch.inf).min()) if high > 0 else 0.0
        levels = _levels(low, high, state.dtype)[1:]
        # Levels are separated at their geometric mean. Levels that are adjacent numbers of their
        # dtype must not be confused, so a boundary is at least the level below and less than the
        # one above.
        below, above = levels[:-1], levels[1:]
        middle = (below.double().sqrt() * above.double().sqrt()).to(levels.dtype)
        boundaries = torch.maximum(torch.minimum(middle, torch.nextafter(above, below)), below)
        codes = torch.bucketize(wide, boundaries.to(wide.device), out_int32=True).add_(1)
        codes = torch.where(positive, codes, 0).to(torch.uint8)
        return codes.cpu(), {"low": low, "high": high}

    def decode(self, rows: torch.Tensor, options: Parameters, dtype: torch.dtype) -> torch.Tensor:
        return _levels(*_range(options, dtype), dtype)[rows.int()].to(dtype)

    def row_bytes(self, cols: int, dtype: torch.dtype) -> int:
        return cols


class _RowLog8(_Log8):
    """Pointwise state in 1 byte a value and 4 a row: levels at equal ratios below the row's largest
    magnitude, which is the row's scale and exact; row-wise state as log8.

    Chunks without a negative value have 255 levels over 32 powers of two, and nothing but zero
    becomes zero: values below take the lowest level, since an update divides by such state. Other
    chunks have 127 levels a sign over 16 powers of two; values below become zero. The relative
    error of values within that range is at most 4.8 % (half the distance of two levels, rounded),
    the error of others at most 2**-32 or 2**-16 of the scale, which is 2**-93 or more. Encoding
    decoded values changes nothing. State with a NaN or an infinity, or that isn't float32, is left
    alone.
    """

    def encode(self, state: torch.Tensor) -> tuple[torch.Tensor, Parameters] | None:
        if state.dim() == 1:
            encoded = super().encode(state)
            return encoded and (encoded[0], {"scheme": "log8", **encoded[1]})
        if state.dtype != torch.float32 or state.shape[1] < 2:
            return None
        values = state.cpu().numpy()
        lowest, highest = values.min(), values.max()  # a NaN anywhere makes both NaN
        if not np.isfinite(lowest) or not np.isfinite(highest):
            return None
        signed, (n, cols) = bool(lowest < 0), values.shape
        rows, table = np.empty((n, cols + 4), np.uint8), _codes_by_key()
        size = max(1, _BLOCK_VALUES // cols)
        for start in range(0, n, size):
            block, into = values[start : start + size], rows[start : start + size]
            magnitude = np.abs(block)
            scale = magnitude.max(axis=1, keepdims=True, initial=_LEAST_SCALE)
            into[:, cols:] = scale.view(np.uint8)
            magnitude /= scale
            codes = table.take(magnitude.view(np.int32) >> _KEY_BITS)
            if signed:
                np.maximum(codes, 128, out=codes)
                codes -= 128 - (np.signbit(block).view(np.uint8) << 7)
            else:
                codes *= block != 0
            into[:, :cols] = codes
        return torch.from_numpy(rows), {"signed": signed}

    def decode(self, rows: torch.Tensor, options: Parameters, dtype: torch.dtype) -> torch.Tensor:
        signed, cols = options.get("signed"), rows.shape[1] - 4
        scale = np.ascontiguousarray(rows.numpy()[:, cols:]).view(np.float32)
        sound = np.all((scale >= _LEAST_SCALE) & np.isfinite(scale))
        if type(signed) is not bool or dtype != torch.float32 or not sound:
            raise ValueError(f"no rowlog8 of {dtype}: signed is {signed!r}, or a scale is unsound")
        levels = np.exp2(np.arange(-254, 1) * _STEP).astype(np.float32)  # of codes 1 to 255
        zero = np.zeros(1, np.float32)
        positive = np.concatenate((zero, levels[-127:] if signed else levels))
        levels = np.concatenate((positive, -positive)) if signed else positive
        values = levels.take(rows.numpy()[:, :cols])
        values *= scale
        return torch.from_numpy(values)

    def row_bytes(self, cols: int, dtype: torch.dtype) -> int:
        return cols + 4


@functools.cache
def _codes_by_key() -> np.ndarray:
    """Return rowlog8's unsigned codes of all ratios from 0 to 1, by their upper bits."""
    one = np.float32(1).view(np.int32) >> _KEY_BITS
    middle = (np.arange(one + 1, dtype=np.int32) << _KEY_BITS) + (1 << (_KEY_BITS - 1))
    codes = 255 + np.log2(middle.view(np.float32).astype(float)) / _STEP
    found: np.ndarray = np.rint(codes).clip(1, 255).astype(np.uint8)
    return found


def _levels(low: float, high: float, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of log8's 256 codes: numbers of ``dtype``, held in float32 or wider."""
    levels = torch.zeros(256, dtype=torch.float64, device="cpu")
    if high > 0:
        start, stop = torch.tensor([low, high], dtype=torch.float64, device="cpu").log().tolist()
        levels[1:] = torch.linspace(start, stop, 255, dtype=torch.float64, device="cpu")
        levels[1:].exp_().clamp_(low, high)
        levels[1], levels[-1] = low, high  # exp(log()) rounds them
    return levels.to(dtype).to(torch.promote_types(dtype, torch.float32))


def _range(parameters: Parameters, dtype: torch.dtype) -> tuple[float, float]:
    """Return log8's smallest and largest value, checked."""
    low, high = parameters.get("low"), parameters.get("high")
    if (
        not isinstance(low, float)
        or not isinstance(high, float)
        or not (low == high == 0 or 0 < low <= high <= torch.finfo(dtype).max)
    ):
        raise ValueError(f"log8 of {dtype} can't range from {low!r} to {high!r}")
    return low, high


def _bytes(values: torch.Tensor) -> torch.Tensor:
    return values.cpu().view(torch.uint8)


def _names() -> str:
    return ", ".join(STATE_SCHEMES)


_SCHEMES: dict[str, _Scheme] = {
    "fp32": _Exact(),
    "bf16": _Bf16(),
    "log8": _Log8(),
    "rowlog8": _RowLog8(),
}
STATE_SCHEMES = tuple(_SCHEMES)
