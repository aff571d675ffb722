"""Define codecs whose rows may be differences to what the checkpoint before restores.

All chunks of such a table are of one codec, and are read in the chain's order into references,
which also are what the next link is encoded upon.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from functools import partial
from typing import ClassVar, Protocol, TypeVar

import numpy as np
import torch

from torchrec_checknrun.codecs.base import Codec, Parameters
from torchrec_checknrun.codecs.row_state import LOGDELTA
from torchrec_checknrun.delta import log_levels
from torchrec_checknrun.delta.grid import Grid
from torchrec_checknrun.delta.references import References, Upon, encode_state_upon

_T = TypeVar("_T")
_LINK = "link"
"""The parameter of a block that tells a link from rows that stand alone."""


class Recorder(Protocol):
    """Has rows encoded upon their predecessors, by global ids; a codec is given one at a cut."""

    @property
    def base(self) -> bool:
        """Return whether all rows stand alone."""

    def encode(self, ids: torch.Tensor, upon: Upon[_T]) -> _T:
        """Have rows, or their state, encoded, and note what they restore to."""


class Chained(Codec):
    """A codec whose blocks may hold differences to the checkpoint before.

    Without a recorder, which a Checkpointer gives it at a cut, rows stand alone.
    """

    chained: ClassVar[bool] = True
    references: ClassVar[type[References]]
    """The references that the codec's links are built upon."""
    _recorder: Recorder | None = None

    def upon(self, recorder: Recorder) -> Chained:
        """Return the codec that encodes upon predecessors."""
        found = copy.copy(self)
        found._recorder = recorder
        return found

    def needs_base(self, parameters: Parameters) -> bool:
        return parameters.get(_LINK) is True

    def encode_state(
        self, name: str, state: torch.Tensor, ids: torch.Tensor
    ) -> tuple[torch.Tensor, Parameters]:
        """Encode a row-wise state as logarithmic differences, see ``row_state.LOGDELTA``.

        Args:
            name: the state's.
            state: ``(n,)`` float32, on any device.
            ids: the rows' global ids, ``(n,)`` int64.

        Returns:
            The payload, 1-D uint8 on the CPU, and its parameters.
        """
        parameters: Parameters = {"scheme": LOGDELTA}
        if self._recorder is None:
            return log_levels.encode(log_levels.codes_of(state)), parameters
        payload = self._recorder.encode(ids, partial(encode_state_upon, name=name, state=state))
        return payload, parameters | (self._link_parameters() if self._upon_others else {})

    @abstractmethod
    def apply(
        self,
        data: torch.Tensor,
        parameters: Parameters,
        rows: int,
        before: Grid | None,
        chosen: np.ndarray,
        dim: int,
    ) -> Grid:
        """Decode chosen rows of a block upon their predecessors.

        Args:
            data: 1-D uint8 on the CPU, as ``encode`` returned it.
            parameters: the block's.
            rows: number of rows of the whole block.
            before: the predecessors of the chosen rows, as references gather them; None for a block
                whose rows stand alone.
            chosen: ``(n,)`` int64, sorted: positions of rows.
            dim: columns of a row.

        Raises:
            ValueError: no encoder writes such a block, or not upon these predecessors.
        """

    @abstractmethod
    def verbatim_rows(
        self, data: torch.Tensor, rows: int, dim: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of a block that are stored bit for bit, and whose bits references don't
        keep.

        Returns:
            Their positions, ``(n,)`` int64 sorted, and the bits of fp32, ``(n, dim)`` int32.

        Raises:
            ValueError: no encoder writes such a block.
        """

    @abstractmethod
    def alone(self, rows: Grid, dtype: torch.dtype) -> tuple[torch.Tensor, Parameters]:
        """Encode what rows restore to as a block that stands alone.

        Args:
            dtype: of the table.
        """

    @property
    def _upon_others(self) -> bool:
        """Return whether rows are encoded upon predecessors now."""
        return self._recorder is not None and not self._recorder.base

    def _link_parameters(self) -> Parameters:
        """Return the parameters of a block that holds differences."""
        return {_LINK: True}
