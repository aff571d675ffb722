"""Store rows as ``fisher`` rounds them, as differences to what the checkpoint before restores."""

from __future__ import annotations

import copy
from functools import partial
from typing import ClassVar

import numpy as np
import torch

from torchrec_checknrun.codecs.base import Codec, Parameters, RowContext
from torchrec_checknrun.codecs.chained import Chained
from torchrec_checknrun.codecs.fisher import Fisher
from torchrec_checknrun.delta import rows as grids
from torchrec_checknrun.delta.grid import Grid
from torchrec_checknrun.delta.grid_references import GridReferences
from torchrec_checknrun.delta.link import encode_upon
from torchrec_checknrun.delta.references import References, Restored


class Delta(Fisher, Chained):
    """Rows as ``Fisher`` rounds them, stored as differences to what the checkpoint before restores.

    A restore adds integers up: in any grouping the result is the same.
    """

    name: ClassVar[str] = "delta"
    references: ClassVar[type[References]] = GridReferences

    def with_constant(self, constant: float | None) -> Delta:
        """Return the codec with the constant of its base, unless it has one."""
        found = copy.copy(self)
        if found.constant is None:
            found.constant = constant
        return found

    def adopt(self, settled: Codec) -> Codec:
        assert isinstance(settled, Delta)
        return self.with_constant(settled.constant)

    def apply(
        self,
        data: torch.Tensor,
        parameters: Parameters,
        rows: int,
        before: Grid | None,
        chosen: np.ndarray,
        dim: int,
    ) -> Grid:
        return grids.apply(data, rows, dim, before, None if len(chosen) == rows else chosen)

    def verbatim_rows(
        self, data: torch.Tensor, rows: int, dim: int
    ) -> tuple[np.ndarray, np.ndarray]:
        return grids.verbatim(data, rows, dim)

    def alone(self, rows: Grid, dtype: torch.dtype) -> tuple[torch.Tensor, Parameters]:
        return grids.encode_grid(rows), {}

    def _encoded(
        self, weight: torch.Tensor, wanted: np.ndarray, context: RowContext
    ) -> tuple[torch.Tensor, Restored]:
        if self._recorder is None:
            return super()._encoded(weight, wanted, context)
        assert context.ids is not None, "rows are encoded upon predecessors by their ids"
        return self._recorder.encode(
            context.ids, partial(encode_upon, weight=weight, wanted=wanted)
        )

    def _parameters(self) -> Parameters:
        return self._link_parameters() if self._upon_others else {}
