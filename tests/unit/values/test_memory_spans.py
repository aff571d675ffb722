"""Know tensors whose bytes are all taken by others."""

from __future__ import annotations

import torch

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
