"""Break, on one rank, what drawn programs of several ranks watch over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from torchrec_checknrun.marks.marks import Marks
from torchrec_checknrun.memory.step_journal import StepJournal
from torchrec_checknrun.restore.collisions import CollisionRestore
from torchrec_checknrun.restore.states import StateRestore
from torchrec_checknrun.run.checkpointer import Checkpointer

Break = Callable[[pytest.MonkeyPatch], None]


def _only_on_rank_1(kind: type, name: str, act: Callable[..., Any]) -> Break:
    """Make a break that takes the place of a method on rank 1.

    Args:
        act: called with the method and its arguments.
    """

    def broken(patch: pytest.MonkeyPatch) -> None:
        own = getattr(kind, name)

        def instead(*arguments: Any, **more: Any) -> Any:
            if dist.get_world_size() > 1 and dist.get_rank() == 1:
                return act(own, *arguments, **more)
            return own(*arguments, **more)

        patch.setattr(kind, name, instead)

    return broken


def _all_but_the_last(
    mark: Callable[..., None], marks: Marks, ids: torch.Tensor, **more: Any
) -> None:
    mark(marks, ids[ids != ids.max()] if len(ids) else ids, **more)


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _of_rank_0(plan: Callable[..., Any], states: StateRestore, *more: Any) -> Any:
    states._rank = 0
    return plan(states, *more)


BREAKS: dict[str, Break] = {
    "a row is not marked": _only_on_rank_1(Marks, "mark", _all_but_the_last),
    "rows by hand are not marked": _only_on_rank_1(Checkpointer, "mark", _nothing),
    "states are restored from rank 0's": _only_on_rank_1(StateRestore, "plan", _of_rank_0),
    "ids since the last eviction are lost": _only_on_rank_1(CollisionRestore, "finish", _nothing),
    "a torn step is not undone": _only_on_rank_1(StepJournal, "append", _nothing),
}


@contextmanager
def broken(name: str | None) -> Iterator[None]:
    """Break something for a while; None: nothing."""
    with pytest.MonkeyPatch.context() as patch:
        if name is not None:
            BREAKS[name](patch)
        yield
