"""Convert optimizer state of rows (one value per row, as in row-wise Adagrad) to bytes and back.

Exact by default. ``bf16`` and ``log8`` take fewer bytes: a sum of squared gradients enters an
update through its square root, so a few per cent of error hardly matter, but the values span tens
of powers of two within one table. For that reason fp16 isn't offered: its smallest number is 6e-8,
most rows' sums lie below and would become zero, and the next update of such a row would be as large
as its first one.

A scheme is a class here, listed in ``_SCHEMES``: nothing else has to know of it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch

from torchrec_checknrun.codecs.base import Parameters, require_size


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
            return encoded[0].view(-1), {"scheme": scheme, **encoded[1]}
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


_SCHEMES: dict[str, _Scheme] = {"fp32": _Exact(), "bf16": _Bf16(), "log8": _Log8()}
STATE_SCHEMES = tuple(_SCHEMES)
