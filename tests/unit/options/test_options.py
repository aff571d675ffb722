"""A Checkpointer's arguments are compared between the ranks as what they say."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from torchrec_checknrun import Checkpointer, Publish, Quantization
from torchrec_checknrun.codecs import Codec, Rowwise
from torchrec_checknrun.options.agreement import require_agreement
from torchrec_checknrun.options.options import Options


def described(root: Path, **given: Any) -> dict[str, str]:
    """Describe arguments as a Checkpointer does."""
    parameters = inspect.signature(Checkpointer.__init__).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    arguments = {**defaults, "root": root, "model": nn.Linear(1, 1), **given}
    return Options.of(arguments, {}).described()


@pytest.mark.parametrize("other", [Rowwise(4), Rowwise(8, "symmetric"), None])
def test_codecs_are_compared_by_what_they_do(other: Codec | None, tmp_path: Path) -> None:
    one = described(tmp_path, quantization=Quantization(codec=Rowwise(8)))
    require_agreement([one, described(tmp_path, quantization=Quantization(codec=Rowwise(8)))])
    with pytest.raises(ValueError, match="quantization differs between the ranks"):
        require_agreement([one, described(tmp_path, quantization=Quantization(codec=other))])


@pytest.mark.parametrize("patterns", [[1], {1: sum}, b"x", 7, None])
def test_patterns_of_buffers_are_text(patterns: object, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="per_rank_buffers must be patterns over names"):
        described(tmp_path, per_rank_buffers=patterns)


def test_paths_are_compared(tmp_path: Path) -> None:
    ranks = [described(tmp_path / "run", publish=Publish(tmp_path / name)) for name in "ab"]
    with pytest.raises(ValueError, match=r"publish differs between the ranks: .*/a.* on rank 0"):
        require_agreement(ranks)
