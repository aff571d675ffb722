"""Recognize references by identity, but never equal numbers."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from torchrec_checknrun.dense.references import References


def test_numbers_are_no_references() -> None:
    """Python keeps one object for all equal small numbers: a step and a wrapper's counter, say."""
    held = References([1, "text", None, 2.0])
    assert not [value for value in (1, "text", None, 2.0) if value in held]


def test_objects_and_their_memory_are_references() -> None:
    tensor, other = torch.arange(4), torch.arange(4)
    things: list[object] = []
    held = References([tensor, things])
    assert things in held
    assert tensor[1:] in held
    assert [] not in held
    assert other not in held


def test_values_are_looked_for_only_if_asked() -> None:
    asked: list[object] = []

    def find() -> Iterator[object]:
        asked.append(None)
        yield things

    things: list[object] = []
    held = References(find())
    assert 3 not in held
    assert torch.optim.SGD([torch.zeros(1)]) in held  # TorchRec's wrappers hold one, at each save
    assert not asked
    assert things in held
    assert [] not in held
    assert len(asked) == 1
