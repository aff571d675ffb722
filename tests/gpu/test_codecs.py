"""Encode rows of tables on a GPU into the same checkpoint as from the CPU."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.models import DEVICE, ON_A_GPU
from tests.unit.codecs.test_codecs import CODECS, context
from tests.unit.quantized_rows import random_rows, relative_errors, spoil
from torchrec_checknrun.codecs import Codec, Encoded, RowContext, Rowwise

pytestmark = ON_A_GPU

ROWS, CHOSEN = 900, 500


def table(dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows on the CPU, some of which can't be quantized, and ids of some in any order."""
    rows = spoil(random_rows(dim, ROWS, dim), dim).to(dtype)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(dim))
    return rows, order[:CHOSEN]


def on_device(context: RowContext) -> RowContext:
    return RowContext({name: state.to(DEVICE) for name, state in context.optimizer.items()})


def read(codec: Codec, encoded: Encoded, dim: int, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty((CHOSEN, dim), dtype=dtype)
    codec.decode(encoded.data.view(-1), encoded.parameters, CHOSEN, 0, out)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("dim", [1, 13, 64, 200])
@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: str(codec.spec()))
def test_the_same_rows_as_on_the_cpu(codec: Codec, dim: int, dtype: torch.dtype) -> None:
    """Compare to the byte; but a search adds up in another order, and may find another grid."""
    rows, ids = table(dim, dtype)
    here = codec.encode(rows, ids, context(CHOSEN))
    there = codec.encode(rows.to(DEVICE), ids.to(DEVICE), on_device(context(CHOSEN)))
    assert there.data.device.type == "cpu"
    assert torch.equal(there.exceptions, here.exceptions)
    searches = not isinstance(codec, Rowwise) or codec.method.name in ("GREEDY", "ADAPTIVE")
    if codec.lossy and searches:
        held = torch.ones(CHOSEN, dtype=torch.bool)
        held[here.exceptions] = False
        values = rows[ids][held]
        error = relative_errors(read(codec, there, dim, dtype)[held], values)
        expected = relative_errors(read(codec, here, dim, dtype)[held], values)
        assert float(error.mean()) <= float(expected.mean()) * 1.001 + 1e-6
    else:
        assert there.parameters == here.parameters
        assert torch.equal(there.data, here.data)


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: str(codec.spec()))
def test_decoded_to_the_device(codec: Codec) -> None:
    rows, ids = table(24, torch.float32)
    encoded = codec.encode(rows, ids, context(CHOSEN))
    out = torch.empty((CHOSEN, 24), device=DEVICE)
    codec.decode(encoded.data.view(-1), encoded.parameters, CHOSEN, 0, out)
    assert torch.equal(out.cpu(), read(codec, encoded, 24, torch.float32))


def test_memory_for_the_bytes() -> None:
    """Copy to the host into a pinned buffer."""
    rows = torch.randn(CHOSEN, 64, device=DEVICE)
    codec = Rowwise(4)
    memory = torch.empty(codec.row_bytes(64) * CHOSEN, dtype=torch.uint8, pin_memory=True)
    encoded = codec.encode(rows, out=memory)
    assert encoded.data.data_ptr() == memory.data_ptr()
    assert torch.equal(encoded.data, codec.encode(rows).data)
