"""Break, on some ranks, what drawn programs of several ranks watch over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from torchrec_checknrun.marks.marks import Marks

Break = Callable[[pytest.MonkeyPatch], None]


def one_rank_drops_marks(patch: pytest.MonkeyPatch) -> None:
    mark = Marks.mark

    def drop(marks: Marks, ids: torch.Tensor, keep: bool = True) -> None:
        if dist.get_rank() != 1:
            mark(marks, ids, keep)

    patch.setattr(Marks, "mark", drop)


BREAKS: dict[str, Break] = {"one rank drops marks": one_rank_drops_marks}


@contextmanager
def broken(name: str | None) -> Iterator[None]:
    """Break something for a while; None: nothing."""
    with pytest.MonkeyPatch.context() as patch:
        if name is not None:
            BREAKS[name](patch)
        yield
