"""Check the changed rows that ``track`` reports, on a model sharded over a group of one."""

import gc
import logging
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.unit.tracked_model import (
    DIM,
    ROWS,
    SPLIT,
    TALL,
    WIDE,
    batch,
    make_model,
    modified,
    only,
    table,
    train,
)
from torchrec_checknrun.model import kernels
from torchrec_checknrun.shards import Rectangle, TableShape
from torchrec_checknrun.tracking import Consumer, TrackedModel, track

pytestmark = pytest.mark.usefixtures("group")


def test_what_is_tracked(tracked: TrackedModel) -> None:
    assert tracked.tables == dict.fromkeys((WIDE, TALL, SPLIT), TableShape(ROWS, DIM))
    places = sorted((shard.table, shard.rectangle) for shard in tracked.shards)
    assert places == [
        (SPLIT, Rectangle(0, ROWS, 0, 4)),
        (SPLIT, Rectangle(0, ROWS, 4, 8)),
        (TALL, Rectangle(0, ROWS, 0, 8)),
        (WIDE, Rectangle(0, ROWS, 0, 8)),
    ]


def test_a_model_without_tables() -> None:
    tracked = track(nn.Linear(2, 2))
    assert (tracked.tables, tracked.shards, tracked.modified_rows()) == ({}, [], {})
    tracked.close()


class TestMarks:
    def test_nothing_is_modified_at_first(self, tracked: TrackedModel) -> None:
        assert modified(tracked) == {}

    def test_training_marks_what_it_looked_up(
        self, model: nn.Module, tracked: TrackedModel
    ) -> None:
        before = {name: table(model, name) for name in tracked.tables}
        train(model, a=[[3, 3, 29], []], shared=[[5], [0]], b=[[], [7]])
        assert modified(tracked) == {"wide": [3, 29], "tall": [0, 5, 7], "split": [0, 5]}
        for name, old in before.items():
            changed = (table(model, name) != old).any(dim=1).nonzero()[:, 0]
            assert changed.tolist() == tracked.modified_rows()[name].tolist()
        train(model, a=[[4]])
        assert modified(tracked)["wide"] == [3, 4, 29]

    def test_ids_are_sorted_int64_on_the_cpu(self, model: nn.Module, tracked: TrackedModel) -> None:
        train(model, a=[[9, 2, 9, 5]])
        ids = tracked.modified_rows()[WIDE]
        assert ids.dtype == torch.int64
        assert ids.tolist() == [2, 5, 9]
        assert only(tracked, WIDE).modified_rows().tolist() == [2, 5, 9]

    def test_looking_up_is_not_training(self, model: nn.Module, tracked: TrackedModel) -> None:
        out = model(batch(a=[[1]]))
        with torch.no_grad():
            model(batch(a=[[2]]))
        model.eval()
        with torch.no_grad():
            model(batch(a=[[3]]))
        model.train()
        assert modified(tracked) == {}
        out.sum().backward()
        assert modified(tracked) == {"wide": [1]}

    def test_lookups_ahead_of_the_backward_pass(
        self, model: nn.Module, tracked: TrackedModel
    ) -> None:
        """Look up the next batch before this one is applied, as pipelines do."""
        first = model(batch(a=[[1]]))
        second = model(batch(a=[[2]]))
        first.sum().backward()
        assert modified(tracked) == {"wide": [1]}
        tracked.clear()
        second.sum().backward()
        assert modified(tracked) == {"wide": [2]}

    def test_rows_are_marked_by_hand(self, tracked: TrackedModel) -> None:
        tracked.mark(WIDE, [3, 1, 3])
        tracked.mark(TALL, np.array([29], dtype=np.int32))
        tracked.mark(SPLIT, torch.tensor([[4], [5]], dtype=torch.int32))
        assert modified(tracked) == {"wide": [1, 3], "tall": [29], "split": [4, 5]}
        tracked.mark_all(WIDE)
        assert modified(tracked)["wide"] == list(range(ROWS))
        assert modified(tracked)["tall"] == [29]
        tracked.mark_all()
        assert modified(tracked)["tall"] == list(range(ROWS))

    def test_rows_of_other_ranks_are_left_to_them(self, tracked: TrackedModel) -> None:
        only(tracked, WIDE).mark([-1, ROWS, 2**40, 7])
        only(tracked, WIDE).mark([])
        assert modified(tracked) == {"wide": [7]}

    @pytest.mark.parametrize("rows", [[-1], [3, ROWS], torch.tensor([2**40, 7])])
    def test_rows_of_no_rank_are_an_error(self, tracked: TrackedModel, rows: Any) -> None:
        """Refuse ids with a wrong offset, which would otherwise silently mark nothing."""
        with pytest.raises(IndexError, match=rf"{WIDE} has rows 0 to {ROWS - 1}, but 1 of the ids"):
            tracked.mark(WIDE, rows)
        assert modified(tracked) == {}

    @pytest.mark.parametrize(
        "rows",
        [
            torch.zeros(ROWS, dtype=torch.bool),
            np.ones(ROWS, dtype=bool),
            [True, False],
            [0.5],
            torch.ones(3),
        ],
        ids=["bool tensor", "bool array", "bools", "floats", "float tensor"],
    )
    def test_a_mask_is_not_a_list_of_ids(self, tracked: TrackedModel, rows: Any) -> None:
        """Refuse a mask: taken for ids, it would silently mark rows 0 and 1."""
        with pytest.raises(TypeError, match="integer row ids"):
            tracked.mark(WIDE, rows)
        with pytest.raises(TypeError, match="integer row ids"):
            only(tracked, WIDE).read_rows(rows)
        assert modified(tracked) == {}

    @pytest.mark.parametrize("name", ["wide", "ebc.embedding_bags.none", WIDE + ".weight", ""])
    def test_unknown_tables_are_refused(self, tracked: TrackedModel, name: str) -> None:
        with pytest.raises(KeyError, match=r"no sharded table .*ebc\.embedding_bags\.tall"):
            tracked.mark(name, [1])
        with pytest.raises(KeyError, match="no sharded table"):
            tracked.mark_all(name or "none")

    def test_each_consumer_clears_its_own(self, model: nn.Module, tracked: TrackedModel) -> None:
        consumers = [Consumer.LAST, Consumer.BASELINE, Consumer.USER]
        train(model, a=[[1]])
        for i, consumer in enumerate(consumers):
            tracked.clear(consumer)
            train(model, a=[[10 + i]])
        assert [modified(tracked, c)["wide"] for c in consumers] == [
            [10, 11, 12],
            [11, 12],
            [12],
        ]
        tracked.clear()
        assert modified(tracked) == {}
        assert modified(tracked, Consumer.BASELINE)["wide"] == [11, 12]

    def test_a_cut_takes_marks_away_and_merging_brings_them_back(
        self, model: nn.Module, tracked: TrackedModel
    ) -> None:
        train(model, a=[[1, 2]], shared=[[3]])
        cut = tracked.cut(Consumer.LAST)
        assert modified(tracked, Consumer.LAST) == {}
        assert modified(tracked, Consumer.BASELINE)["wide"] == [1, 2]
        assert modified(tracked)["wide"] == [1, 2]
        train(model, a=[[2, 9]])
        assert modified(tracked, Consumer.LAST) == {"wide": [2, 9]}
        tracked.merge(cut)
        assert modified(tracked, Consumer.LAST) == {"wide": [1, 2, 9], "tall": [3], "split": [3]}
        both = tracked.cut(Consumer.LAST | Consumer.BASELINE)
        assert modified(tracked, Consumer.LAST) == modified(tracked, Consumer.BASELINE) == {}
        tracked.merge(both)
        assert modified(tracked, Consumer.BASELINE)["wide"] == [1, 2, 9]

    def test_closing_takes_the_hooks_off(self, model: nn.Module) -> None:
        tracked = track(model)
        train(model, a=[[1]])
        tracked.close()
        tracked.close()
        train(model, a=[[2]])
        assert modified(tracked) == {"wide": [1]}
        # Without the hooks, nothing in the model refers to the marks.
        hooked = [module for module in model.modules() if module._forward_hooks]
        assert hooked == []

    def test_two_trackers_are_independent(self, model: nn.Module, tracked: TrackedModel) -> None:
        train(model, a=[[1]])
        other = track(model)
        train(model, a=[[2]])
        other.clear()
        train(model, a=[[3]])
        assert modified(tracked) == {"wide": [1, 2, 3]}
        assert modified(other) == {"wide": [3]}
        other.close()

    def test_an_optimizer_that_touches_other_rows(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Mark all rows for an optimizer not known to leave other rows alone; warn once."""
        monkeypatch.setattr(kernels, "_TOUCHES_LOOKED_UP_ROWS_ONLY", frozenset())
        model = make_model()
        tracked = track(model)
        with caplog.at_level(logging.WARNING, "torchrec_checknrun"):
            train(model, shared=[[1]])
            train(model, shared=[[1]])
        everything = list(range(ROWS))
        found = modified(tracked)
        assert (found["tall"], found["split"]) == (everything, everything)
        messages = [r.getMessage() for r in caplog.records if "all rows" in r.getMessage()]
        assert messages
        assert len(messages) == len(set(messages))
        assert any(TALL in message for message in messages)
        tracked.close()


def test_a_write_is_told_of_unless_all_rows_count_anyway(
    tracked: TrackedModel, caplog: pytest.LogCaptureFixture
) -> None:
    tall = only(tracked, TALL)
    tracked.clear()
    for marks in tall.writes.marks:
        marks.mark_all()
    tall.local.weight.add_(1)
    tracked.check_writes()
    assert caplog.text == ""
    tracked.clear()
    tall.local.weight.add_(1)
    assert modified(tracked)["tall"] == [*range(ROWS)]
    assert "written outside of training" in caplog.text


def test_a_tracker_does_not_keep_a_closed_model_alive() -> None:
    """Drop models in one process, as sweeps and notebooks do: the registries are weak."""
    from weakref import ref

    model = make_model()
    tracked = track(model)
    gone = ref(tracked)
    tracked.close()
    del model, tracked
    gc.collect()
    assert gone() is None
