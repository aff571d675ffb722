"""Release everything that was made before another rank failed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.unit.run.jobs import checkpointer, make_job
from torchrec_checknrun import Checkpointer, Quantization
from torchrec_checknrun.ranks import Ranks
from torchrec_checknrun.run import assembly
from torchrec_checknrun.save.background import Background


def test_a_background_that_another_rank_could_not_make(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Background] = []
    closed: list[Background] = []
    real = Ranks.on_all_ranks
    init, close = Background.__init__, Background.close

    def on_all_ranks(self: Ranks, act: Callable[[], Any]) -> list[Any]:
        before = len(made)
        found = real(self, act)
        if len(made) > before:
            raise MemoryError("of rank 1")
        return found

    def noted(self: Background, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        made.append(self)

    def closing(self: Background) -> None:
        closed.append(self)
        close(self)

    monkeypatch.setattr(Ranks, "on_all_ranks", on_all_ranks)
    monkeypatch.setattr(Background, "__init__", noted)
    monkeypatch.setattr(Background, "close", closing)
    with pytest.raises(MemoryError, match="of rank 1"):
        Checkpointer(str(tmp_path), model=nn.Linear(1, 1))
    assert len(made) == 1
    assert closed == made


@pytest.mark.usefixtures("one_rank")
def test_of_thousands_of_tables_without_room_the_first_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    names = [f"table_{number:04d}" for number in range(3000)]
    monkeypatch.setattr(assembly, "too_large", lambda *_: names)
    with checkpointer(tmp_path, make_job(), quantization=Quantization(method="delta")):
        pass
    (said,) = (line for line in caplog.messages if "instead of 'delta'" in line)
    assert said.startswith("table_0000, table_0001, ")
    assert len(said) < 1000
