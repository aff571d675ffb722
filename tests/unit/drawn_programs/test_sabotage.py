"""Break what drawn programs watch over: a program must differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.examples import some_of
from tests.unit.drawn_programs import running
from tests.unit.drawn_programs.programs import Program
from tests.unit.drawn_programs.running import run_in
from torchrec_checknrun import Checkpointer
from torchrec_checknrun.dense import wrappers
from torchrec_checknrun.integrations import rng
from torchrec_checknrun.marks.marks import Marks
from torchrec_checknrun.memory.held_states import Taker
from torchrec_checknrun.memory.step_journal import StepJournal
from torchrec_checknrun.model.hooks import KernelHook

Break = Callable[[pytest.MonkeyPatch], None]


def a_wrappers_count_is_not_saved(patch: pytest.MonkeyPatch) -> None:
    attributes = wrappers._attributes

    def without_count(node: Any) -> Iterator[tuple[str, Any]]:
        return (item for item in attributes(node) if item[0] != "eased")

    patch.setattr(wrappers, "_attributes", without_count)


def marked_rows_are_dropped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Checkpointer, "mark", lambda *_: None)


def a_looked_up_row_is_not_marked(patch: pytest.MonkeyPatch) -> None:
    mark = Marks.mark

    def all_but_the_last(marks: Marks, ids: torch.Tensor, keep: bool = True) -> None:
        mark(marks, ids[ids != ids.max()] if len(ids) else ids, keep)

    patch.setattr(Marks, "mark", all_but_the_last)


def a_schedule_is_left_out(patch: pytest.MonkeyPatch) -> None:
    def without_schedule(root: Path, *, state: dict[str, Any], **options: Any) -> Checkpointer:
        kept = {name: each for name, each in state.items() if name != "schedule0"}
        return Checkpointer(root, state=kept, **options)

    patch.setattr(running, "Checkpointer", without_schedule)


def images_are_a_step_behind(patch: pytest.MonkeyPatch) -> None:
    take = Taker.take
    before: list[Any] = []

    def take_older(taker: Taker) -> Any:
        before.append([bytes(piece) for piece in take(taker)])
        return before[-2] if len(before) > 1 else before[-1]

    patch.setattr(Taker, "take", take_older)


def a_torn_step_is_not_undone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepJournal, "append", lambda *_: None)


def a_forward_pass_comes_first(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KernelHook, "_before_forward", lambda *_: None)


def generators_stay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rng, "set_generators", lambda _: None)


TORN = Program(survive="images", ways=("images",), torn=True)
CASES: list[tuple[Break, Program]] = [
    (a_wrappers_count_is_not_saved, Program(wrapper="own")),
    (marked_rows_are_dropped, Program(by_hand="marked", kill=6)),
    (a_looked_up_row_is_not_marked, Program()),
    (a_schedule_is_left_out, Program(schedule="lambda")),
    (images_are_a_step_behind, Program(survive="images", ways=("images",))),
    (a_torn_step_is_not_undone, TORN),
    (a_forward_pass_comes_first, replace(TORN, fused="ema", kill=3)),
    (generators_stay, Program(extra="dropout")),
]


@pytest.mark.parametrize(("broken", "program"), some_of(CASES, 0, 3))
def test_what_is_broken_is_found(tmp_path: Path, broken: Break, program: Program) -> None:
    sound = run_in(tmp_path / "sound", program)
    assert (sound.invalid, sound.refused, sound.lost) == (None, None, []), sound
    with pytest.MonkeyPatch.context() as patch:
        broken(patch)
        found = run_in(tmp_path / "broken", program)
    assert found.lost, found
