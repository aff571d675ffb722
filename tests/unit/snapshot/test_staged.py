"""Gather rows in staging memory as plain indexing does, compiled and not."""

from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from torchrec_checknrun.codecs import Codec, Exact, Rowwise
from torchrec_checknrun.codecs.quantization import TableEncoding
from torchrec_checknrun.native import has_extension
from torchrec_checknrun.shards import LocalShard, Rectangle, TableShape
from torchrec_checknrun.snapshot import staged as module
from torchrec_checknrun.snapshot.staged import StagedRows, rows_size

COMPILED = [False, True] if has_extension() else [False]


@st.composite
def sorted_rows(draw: st.DrawFn, rows: int) -> torch.Tensor:
    if draw(st.booleans()):  # a run of rows
        first = draw(st.integers(0, rows - 1))
        return torch.arange(first, draw(st.integers(first + 1, rows)))
    chosen = draw(st.sets(st.integers(0, rows - 1), min_size=1, max_size=rows))
    return torch.tensor(sorted(chosen))


@settings(max_examples=examples(200), deadline=None)
@given(
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    st.sampled_from([1, 3, 64]),
    st.sampled_from([1, 9, 1000]),
    st.booleans(),
    st.sampled_from(COMPILED),
    st.data(),
)
def test_rows_are_copied_with_their_states(
    dtype: torch.dtype, cols: int, rows: int, in_pieces: bool, compiled: bool, data: st.DataObject
) -> None:
    positions = data.draw(sorted_rows(rows))
    first, n, offset = data.draw(st.integers(0, 7)), len(positions), 64 * data.draw(st.booleans())
    wide = torch.randn(rows, cols + in_pieces).to(dtype)
    states = {"momentum1": torch.rand(rows), "exp_avg": torch.rand(rows, cols)}
    shard = LocalShard(
        "t",
        TableShape(first + rows, 3 + cols),
        Rectangle(first, first + rows, 3, 3 + cols),
        wide[:, :cols],
        states if data.draw(st.booleans()) else {},
    )
    stop = offset + rows_size(shard, n)
    memory = torch.full((stop + 64,), 7, dtype=torch.uint8)
    staged = StagedRows.plan(shard, n, TableEncoding(Rowwise(4)), offset)
    with patch.object(module, "has_extension", lambda: compiled):
        staged.copy(shard, positions, memory)
    assert staged.ids.at(memory).tolist() == [first + row for row in positions.tolist()]
    assert torch.equal(staged.weight.at(memory), shard.weight[positions])
    assert staged.optimizer.keys() == shard.optimizer.keys()
    for name, state in shard.optimizer.items():
        assert torch.equal(staged.optimizer[name].at(memory), state[positions])
    assert (memory[:offset] == 7).all()
    assert (memory[stop:] == 7).all()


@pytest.mark.skipif(not has_extension(), reason="the compiled kernel was not built")
@pytest.mark.parametrize(
    ("positions", "offsets"),
    [
        ([0, 5], [0, 64, 192]),  # a state of fewer rows
        ([-1, 0], [0, 64, 192]),
        ([0, 9], [0, 64, 192]),
        ([0, 1], [-8, 64, 192]),
        ([0, 1], [248, 64, 192]),
        ([0, 1], [0, 225, 192]),
        ([0, 1], [0, 64, 249]),
        ([0, 1], [0, 2**63 - 1, 192]),
        ([0, 1], [0, 64]),
        ([0.0, 1.0], [0, 64, 192]),
        ([[0, 1]], [0, 64, 192]),
    ],
)
def test_the_kernel_leaves_other_memory_alone(positions: list[float], offsets: list[int]) -> None:
    memory = torch.zeros(256, dtype=torch.uint8)
    tensors = [torch.ones(9, 4), torch.ones(5)]
    with pytest.raises((IndexError, ValueError)):
        torch.ops.checknrun.stage_rows(torch.tensor(positions), 0, tensors, memory, offsets)
    assert not memory.any()


@pytest.mark.parametrize(("codec", "copies"), [(Exact(), False), (Rowwise(8), True)])
def test_exact_rows_are_written_from_staging_memory(codec: Codec, copies: bool) -> None:
    rows, cols = 100, 16
    weight = torch.randn(rows, cols)
    shard = LocalShard("t", TableShape(rows, cols), Rectangle(0, rows, 0, cols), weight, {})
    memory = torch.empty(rows_size(shard, rows), dtype=torch.uint8)
    staged = StagedRows.plan(shard, rows, TableEncoding(codec), 0)
    staged.copy(shard, torch.arange(rows), memory)
    chunk = staged.encode(memory)
    pieces = [np.frombuffer(piece, dtype=np.uint8) for piece in chunk.pieces]
    of_weight = max(pieces, key=len)
    assert np.shares_memory(of_weight, memory.numpy()) is not copies
    if not copies:
        assert of_weight.tobytes() == weight.numpy().tobytes()
