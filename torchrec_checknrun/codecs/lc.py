"""Store how rows have changed, in a few buckets: LC-Checkpoint (ICML 2020) for tables.

``delta.lc`` has the encoding. A link's buckets are those of its chunk. A base holds whole rows.
"""

from __future__ import annotations

import json
from collections.abc import Hashable
from functools import partial
from typing import ClassVar

import numpy as np
import torch

from torchrec_checknrun.codecs.base import (
    NO_CONTEXT,
    CodecSpec,
    Encoded,
    Parameters,
    RowContext,
    select_rows,
)
from torchrec_checknrun.codecs.chained import Chained
from torchrec_checknrun.delta.grid import Grid
from torchrec_checknrun.delta.lc import rows as lc_rows
from torchrec_checknrun.delta.lc.references import ValueReferences
from torchrec_checknrun.delta.references import References
from torchrec_checknrun.delta.rows import values_of

BITS = (2, 3, 4)
"""The paper's x that tables may have."""
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_VALUES = "values"
"""The parameter that names the type of the values of rows that stand alone; fp32 without."""


class LcCheckpoint(Chained):
    """Rows as changes since the checkpoint before, in ``2**bits - 1`` buckets of a chunk.

    Args:
        bits: the paper's x.

    Raises:
        ValueError: bits is out of range.
    """

    name: ClassVar[str] = "lc"
    lossy: ClassVar[bool] = True
    at_once: ClassVar[bool] = True
    references: ClassVar[type[References]] = ValueReferences

    def __init__(self, bits: int) -> None:
        if type(bits) is not int or bits not in BITS:
            raise ValueError(f"bits of LC-Checkpoint must be one of {BITS}, not {bits!r}")
        self.bits = bits

    def spec(self) -> CodecSpec:
        return {"name": self.name, "version": self.version, "bits": self.bits}

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
        weight = rows.detach() if ids is None else rows.detach().index_select(0, ids)
        none = torch.empty(0, dtype=torch.int64, device="cpu")
        if self._recorder is None:
            payload, parameters = self._alone(weight.cpu().float(), rows.dtype)
            return Encoded(payload, parameters, none)
        assert context.ids is not None, "rows are encoded upon predecessors by their ids"
        if self._upon_others:
            parameters = self._link_parameters()
            act = partial(lc_rows.encode_upon, weight=weight, bits=self.bits)
        else:
            values = weight.cpu().float()
            payload, parameters = self._alone(values, rows.dtype)
            act = partial(lc_rows.keep, values=values, payload=payload)
        payload, after = self._recorder.encode(context.ids, act)

        def restored(positions: torch.Tensor) -> torch.Tensor:
            return values_of(after(positions.numpy()), rows.dtype)

        return Encoded(payload, parameters, none, restored)

    def decode(
        self, data: torch.Tensor, parameters: Parameters, rows: int, start: int, out: torch.Tensor
    ) -> None:
        chosen = np.arange(start, start + len(out))
        found = self.apply(data, parameters, rows, None, chosen, out.shape[1])
        out.copy_(values_of(found, out.dtype))

    def scatter(
        self,
        data: torch.Tensor,
        parameters: Parameters,
        rows: int,
        positions: torch.Tensor,
        ids: torch.Tensor,
        out: torch.Tensor,
    ) -> bool:
        found = self.apply(data, parameters, rows, None, positions.numpy(), out.shape[1])
        out.index_copy_(0, ids.to(out.device), values_of(found, out.dtype).to(out.device))
        return True

    def select(
        self,
        data: torch.Tensor,
        parameters: Parameters,
        rows: int,
        dim: int,
        positions: torch.Tensor,
    ) -> tuple[torch.Tensor, Parameters] | None:
        if self.needs_base(parameters):
            return None
        size = dim * _dtype(parameters).itemsize
        return select_rows(data, rows, size, positions), parameters

    def family(self, parameters: Parameters, dim: int) -> Hashable | None:
        """Join rows that stand alone and have values of one type."""
        if self.needs_base(parameters):
            return None
        return json.dumps([self.spec(), parameters], sort_keys=True)

    def apply(
        self,
        data: torch.Tensor,
        parameters: Parameters,
        rows: int,
        before: Grid | None,
        chosen: np.ndarray,
        dim: int,
    ) -> Grid:
        if not self.needs_base(parameters):
            return lc_rows.chosen_rows(data, _dtype(parameters), rows, dim, chosen)
        if before is None:
            raise ValueError("changes without predecessors")
        return lc_rows.apply(data, rows, self.bits, before, chosen)

    def verbatim_rows(
        self, data: torch.Tensor, rows: int, dim: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return no rows: references keep the bits of all."""
        return np.empty(0, np.int64), np.empty((0, dim), np.int32)

    def alone(self, rows: Grid, dtype: torch.dtype) -> tuple[torch.Tensor, Parameters]:
        return self._alone(values_of(rows, torch.float32), dtype)

    def _alone(self, values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, Parameters]:
        payload, kept = lc_rows.alone(values, dtype)
        name = next(name for name, each in _DTYPES.items() if each == kept)
        return payload, {} if name == "fp32" else {_VALUES: name}


def _dtype(parameters: Parameters) -> torch.dtype:
    """Return the type of the values of rows that stand alone.

    Raises:
        ValueError: it is unknown.
    """
    name = parameters.get(_VALUES, "fp32")
    if not isinstance(name, str) or name not in _DTYPES:
        raise ValueError(f"values of type {name!r}, not one of {list(_DTYPES)}")
    return _DTYPES[name]
