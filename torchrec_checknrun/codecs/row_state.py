"""Convert row-wise optimizer state (one value per row, as in row-wise Adagrad) to bytes and back.

Exact by default. ``bf16`` and ``log8`` take fewer bytes: a sum of squared gradients enters an
update through its square root, so a few per cent of error hardly matter, but the values span tens
of powers of two within one table. For that reason fp16 isn't offered: its smallest number is 6e-8,
most rows' sums lie below and would become zero, and the next update of such a row would be as large
as its first one.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch

from torchrec_checknrun.codecs.base import Parameters, require_size

StateScheme = Literal["fp32", "bf16", "log8"]
STATE_SCHEMES: tuple[StateScheme, ...] = get_args(StateScheme)

_LEVELS = 255
"""Levels of log8, beside the code 0."""


def encode_row_state(values: torch.Tensor, scheme: str) -> tuple[torch.Tensor, Parameters]:
    """Encode a chunk's row-wise state.

    - ``fp32``: the values' own bytes, of any dtype; exact.
    - ``bf16``: rounded, 2 bytes; relative error at most 2**-8 (for values from 1.2e-38 on).
    - ``log8``: 1 byte; 0 is exactly zero, 1 to 255 are levels at equal ratios from the chunk's
      smallest positive value to its largest, both of which are exact. Relative error at most
      ``(high / low) ** (1 / 508) - 1`` (half the distance of two levels; 7 % if high is 2**50
      times low), plus the dtype's own rounding. Encoding decoded values changes nothing.

    A chunk that its scheme would destroy is stored exactly: one with a NaN or an infinity, with a
    value that bf16 rounds to infinity or to zero, for log8 with a negative value. Integers are
    stored exactly, too. The parameters name the scheme that was used.

    Args:
        values: ``(n,)``, on any device.
        scheme: one of ``STATE_SCHEMES``.

    Returns:
        The bytes (1-D uint8, on the CPU; for ``fp32`` maybe the values' own memory) and the
        parameters for ``decode_row_state``: ``scheme``, and for log8 ``low`` and ``high``.

    Raises:
        ValueError: the scheme is unknown.
    """
    if scheme not in STATE_SCHEMES:
        raise ValueError(f"row-wise optimizer state is stored as {_names()}, not as {scheme!r}")
    values = values.detach().contiguous()
    if values.is_floating_point() and values.numel() > 0:
        if scheme == "bf16":
            rounded = values.to(torch.bfloat16)
            if bool((torch.isfinite(rounded) & ((rounded != 0) == (values != 0))).all()):
                return _bytes(rounded), {"scheme": "bf16"}
        if scheme == "log8":
            # One pass: a NaN anywhere makes both extremes NaN.
            low, high = torch.aminmax(values)
            if bool((low >= 0) & torch.isfinite(high)):
                return _encode_log8(values)
    return _bytes(values), {"scheme": "fp32"}


def decode_row_state(
    data: torch.Tensor, parameters: Parameters, n: int, dtype: torch.dtype
) -> torch.Tensor:
    """Decode ``n`` values, ``(n,)`` of ``dtype``, on the CPU.

    Each row has its own ``state_row_bytes`` of the data: any run of rows can be decoded alone.

    Args:
        data: 1-D uint8 on the CPU.
        parameters: as ``encode_row_state`` returned them.
        n: number of values.
        dtype: dtype of the encoded values.

    Raises:
        ValueError: data or parameters do not belong to such values.
    """
    size = n * state_row_bytes(parameters, dtype)
    require_size(data, size, f"{n} values stored as {parameters['scheme']}")
    if parameters["scheme"] == "log8":
        levels = _levels(*_range(parameters, dtype), dtype)
        return levels[data.int()].to(dtype)
    stored = torch.bfloat16 if parameters["scheme"] == "bf16" else dtype
    # A copy: the data may begin at an address that is odd for the dtype.
    return data.clone().view(stored).to(dtype)


def state_row_bytes(parameters: Parameters, dtype: torch.dtype) -> int:
    """Return the bytes of one value.

    Raises:
        ValueError: the parameters name no scheme, or one that can't hold the dtype.
    """
    scheme = parameters.get("scheme")
    if scheme == "fp32":
        return dtype.itemsize
    if scheme not in STATE_SCHEMES or not dtype.is_floating_point:
        raise ValueError(f"{dtype} is not stored as {scheme!r}; schemes: {_names()}")
    return 2 if scheme == "bf16" else 1


def _encode_log8(values: torch.Tensor) -> tuple[torch.Tensor, Parameters]:
    wide = values if values.dtype in (torch.float32, torch.float64) else values.float()
    positive = wide > 0
    low = float(torch.where(positive, wide, torch.inf).min())
    high = float(wide.max())
    if high == 0:
        low = 0.0
    levels = _levels(low, high, values.dtype)[1:]
    # Levels are separated at their geometric mean. Levels that are adjacent numbers of their dtype
    # must not be confused, so a boundary is at least the level below and less than the one above.
    below, above = levels[:-1], levels[1:]
    middle = (below.double().sqrt() * above.double().sqrt()).to(levels.dtype)
    boundaries = torch.maximum(torch.minimum(middle, torch.nextafter(above, below)), below)
    codes = torch.bucketize(wide, boundaries.to(wide.device), out_int32=True).add_(1)
    codes = torch.where(positive, codes, 0).to(torch.uint8)
    return codes.cpu(), {"scheme": "log8", "low": low, "high": high}


def _levels(low: float, high: float, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of codes 0 to 255: numbers of ``dtype``, held in float32 or wider."""
    levels = torch.zeros(1 + _LEVELS, dtype=torch.float64, device="cpu")
    if high > 0:
        ends = torch.tensor([low, high], dtype=torch.float64, device="cpu").log()
        levels[1:] = torch.linspace(
            float(ends[0]), float(ends[1]), _LEVELS, dtype=torch.float64, device="cpu"
        )
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
