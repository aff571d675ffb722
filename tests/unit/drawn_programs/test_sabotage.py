"""Break what drawn programs watch over: a program must differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
from torchrec_checknrun.memory.held_states import Taker
from torchrec_checknrun.memory.step_journal import StepJournal
from torchrec_checknrun.restore import restore

Break = Callable[[pytest.MonkeyPatch], None]


def a_wrappers_count_is_not_saved(patch: pytest.MonkeyPatch) -> None:
    attributes = wrappers._attributes

    def without_count(node: Any) -> Iterator[tuple[str, Any]]:
        return (item for item in attributes(node) if item[0] != "eased")

    patch.setattr(wrappers, "_attributes", without_count)


def a_marked_row_is_dropped(patch: pytest.MonkeyPatch) -> None:
    mark = Checkpointer.mark

    def all_but_the_last(saver: Checkpointer, table: str, rows: Any) -> None:
        mark(saver, table, rows[:-1])

    patch.setattr(Checkpointer, "mark", all_but_the_last)


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
    def append(journal: StepJournal, values: torch.Tensor, *_: Any) -> None:
        journal.end_step if False else None

    patch.setattr(StepJournal, "append", append)


def generators_stay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(restore, "set_generators", lambda *_: None, raising=False)


CASES: list[tuple[Break, Program]] = [
    (a_wrappers_count_is_not_saved, Program(wrapper="own")),
    (a_marked_row_is_dropped, Program(by_hand="marked", kill=6)),
    (a_schedule_is_left_out, Program(schedule="lambda")),
    (images_are_a_step_behind, Program(survive="images", ways=("images",))),
    (a_torn_step_is_not_undone, Program(survive="images", ways=("images",), torn=True)),
]


@pytest.mark.parametrize(("broken", "program"), some_of(CASES, 0, 3))
def test_what_is_broken_is_found(tmp_path: Path, broken: Break, program: Program) -> None:
    sound = run_in(tmp_path / "sound", program)
    assert (sound.invalid, sound.refused, sound.lost) == (None, None, []), sound
    with pytest.MonkeyPatch.context() as patch:
        broken(patch)
        found = run_in(tmp_path / "broken", program)
    assert found.lost, found
