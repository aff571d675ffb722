"""Refuse tensors that no block can hold, whether sharded or those of some ranks."""

from __future__ import annotations

import pytest
import torch

from torchrec_checknrun.errors import UnsupportedState
from torchrec_checknrun.model.blocks import whole_block


@pytest.mark.parametrize(
    "tensor", [torch.eye(3).to_sparse(), torch.empty(3, device="meta"), torch.empty(2).to_mkldnn()]
)
def test_only_dense_tensors_with_data(tensor: torch.Tensor) -> None:
    with pytest.raises(UnsupportedState, match=r"model\.own.*only dense tensors with data"):
        whole_block(("model", "own"), tensor)


@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_any_shape(shape: tuple[int, ...]) -> None:
    block = whole_block(("model", "own"), torch.ones(shape))
    assert block.size == shape
    assert block.box.volume == torch.ones(shape).numel()
