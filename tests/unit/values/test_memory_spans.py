"""Know tensors whose bytes are all taken by others."""

from __future__ import annotations

import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from torchrec_checknrun.values.memory_spans import MemorySpans


def test_views_of_what_is_held_are_covered() -> None:
    flat = torch.zeros(12)
    spans = MemorySpans([flat[2:6], flat[6:8], flat[10:]])
    assert spans.cover(flat[2:8])
    assert spans.cover(flat[3:7:2])
    assert spans.cover(flat[2:8].view(2, 3).t())
    assert spans.cover(flat[11:])


def test_neighbours_in_the_same_storage_are_not() -> None:
    flat = torch.zeros(12)
    spans = MemorySpans([flat[2:6], flat[8:10]])
    assert flat.untyped_storage().data_ptr() in spans.storages
    for other in (flat, flat[:2], flat[6:8], flat[5:9], flat[1:3], flat[10:], torch.zeros(4)):
        assert not spans.cover(other)


def test_columns_and_empty_tensors() -> None:
    table = torch.zeros(3, 8)
    spans = MemorySpans([table[:, 4:], table[:0]])
    assert spans.cover(table[:, 4:])
    assert spans.cover(table[2, 6:])
    assert not spans.cover(table[0, :4])
    assert torch.zeros(0).untyped_storage().data_ptr() not in MemorySpans([torch.zeros(0)]).storages


def test_columns_beside_held_ones_are_not_theirs() -> None:
    table = torch.zeros(4, 8)
    spans = MemorySpans([table[:, 0:2], table[:3, 5:]])
    assert spans.cover(table[1, 0:2])
    assert spans.cover(table[::2, 1:2]) is False  # Of another period: told safely, as not held.
    assert spans.cover(table[1:3, 6:8])
    for other in (table[1, 2:4], table[:, 2:5], table[:, 1:3], table[1:, 5:], table[0:2], table):
        assert not spans.cover(other)


@given(st.data())
def test_no_byte_of_another_tensor_is_taken_for_held(data: st.DataObject) -> None:
    buffer = torch.zeros(48, dtype=torch.int16)
    held = [_view(data, buffer) for _ in range(data.draw(st.integers(1, 3)))]
    other = _view(data, buffer)
    for tensor in held:
        tensor.fill_(1)
    if MemorySpans(held).cover(other):
        assert bool((other == 1).all())
    assert MemorySpans([other]).cover(other) or other.dim() > 1


def _view(data: st.DataObject, buffer: torch.Tensor) -> torch.Tensor:
    """Draw a strided view of a buffer, not empty, of up to three dimensions."""
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    strides = [data.draw(st.integers(0, 10)) for _ in shape]
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    assume(last < buffer.numel())
    offset = data.draw(st.integers(0, buffer.numel() - 1 - last))
    return buffer.as_strided(shape, strides, offset)
