"""Check all ranks' plans on rank 0, and the files that the ranks wrote."""

from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import SavePlan

from tests.unit.plain_states import State, cause, example
from torchrec_checknrun.boxes import Box
from torchrec_checknrun.dcp import SavePlanner, StorageWriter
from torchrec_checknrun.errors import CheckNRunError, InvalidPlan
from torchrec_checknrun.format.manifest import Header, Link
from torchrec_checknrun.format.names import MANIFEST_NAME
from torchrec_checknrun.model.blocks import BlockSummary
from torchrec_checknrun.save.plan import (
    GlobalPlan,
    LocalPlan,
    PlanSummary,
    Share,
    make_global_plan,
)
from torchrec_checknrun.save.rank_differences import RankDifferences
from torchrec_checknrun.shards import Rectangle, TableShape
from torchrec_checknrun.store.folder import Folder


class TestGlobalPlan:
    """Check all ranks' plans on rank 0."""

    def summary(self, *shards: tuple[str, Rectangle], **other: Any) -> PlanSummary:
        plain: State = {
            "header": Header(step=5),
            "tables": {"t": TableShape(10, 8)},
            "shards": list(shards),
            "fp32_bytes": dict.fromkeys((table for table, _ in shards), 32),
            "progress": {},
            "replicated": {},
            "per_rank": (),
        }
        return PlanSummary(**{**plain, **other})

    def plan(self, *summaries: PlanSummary) -> tuple[list[Share], GlobalPlan]:
        plans = []
        for rank, summary in enumerate(summaries):
            keys = [f"{table}{rectangle}#0" for table, rectangle in summary.shards]
            keys += [f"state:{name}" for name in summary.replicated]
            keys += [f"state@{rank}:{name}" for name in summary.per_rank]
            plans.append(LocalPlan(tuple(keys), summary))
        return make_global_plan(plans, RankDifferences())

    @pytest.mark.parametrize(
        "rectangles",
        [
            [Rectangle(0, 10, 0, 8)],
            [Rectangle(0, 5, 0, 8), Rectangle(5, 10, 0, 8)],
            [Rectangle(0, 10, 4, 8), Rectangle(0, 10, 0, 4)],
            [Rectangle(0, 5, 0, 4), Rectangle(0, 5, 4, 8), Rectangle(5, 10, 0, 8)],
            [Rectangle(0, 10, 0, 8), Rectangle(10, 10, 0, 8)],  # a rank without rows
        ],
    )
    def test_parts_that_make_a_table(self, rectangles: list[Rectangle]) -> None:
        plans, whole = self.plan(*(self.summary(("t", r)) for r in rectangles))
        assert [len(plan.items) for plan in plans] == [1] * len(rectangles)
        assert whole.chunks == (1,) * len(rectangles)
        assert whole.fp32_bytes == {"t": 32 * len(rectangles)}
        assert whole.header == Header(step=5)
        assert all(not plan.settled for plan in plans)

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            (Rectangle(0, 10, 0, 8), Rectangle(0, 10, 0, 8)),
            (Rectangle(0, 6, 0, 8), Rectangle(5, 10, 0, 8)),
            (Rectangle(0, 10, 0, 5), Rectangle(0, 10, 4, 8)),
            (Rectangle(0, 10, 0, 8), Rectangle(9, 10, 7, 8)),
        ],
    )
    def test_two_ranks_with_the_same_rows(self, one: Rectangle, other: Rectangle) -> None:
        nothing = self.summary()
        with pytest.raises(InvalidPlan, match=r"^t: ranks 1 and 2 would both write \["):
            self.plan(nothing, self.summary(("t", one)), self.summary(("t", other)))

    @pytest.mark.parametrize(
        ("rectangles", "covered"),
        [
            ([], 0),
            ([Rectangle(0, 9, 0, 8)], 72),
            ([Rectangle(0, 6, 0, 8), Rectangle(6, 12, 0, 8)], 96),
            ([Rectangle(1, 10, 0, 8)], 72),
            ([Rectangle(0, 10, 0, 4)], 40),
            ([Rectangle(0, 5, 0, 8), Rectangle(5, 10, 0, 4)], 60),
        ],
    )
    def test_a_missing_part(self, rectangles: list[Rectangle], covered: int) -> None:
        summaries = [self.summary(), *(self.summary(("t", r)) for r in rectangles)]
        with pytest.raises(InvalidPlan, match=rf"^t: the ranks hold {covered} of 10 × 8 values"):
            self.plan(*summaries)

    def test_a_sharded_buffer_in_parts(self) -> None:
        def part(start: int, stop: int) -> PlanSummary:
            block = BlockSummary(("model", "ids"), "int64", (9,), Box(((start, stop),)))
            return self.summary(tables={}, blocks=[block])

        self.plan(part(5, 9), self.summary(tables={}), part(0, 5))
        with pytest.raises(InvalidPlan, match=r"^model\.ids: ranks 2 and 0 would both write "):
            self.plan(part(4, 9), self.summary(tables={}), part(0, 5))
        with pytest.raises(InvalidPlan, match=r"^model\.ids: the ranks hold 8 of 9 values"):
            self.plan(part(5, 9), part(0, 4))

    def test_an_unknown_table(self) -> None:
        whole = self.summary(("t", Rectangle(0, 10, 0, 8)))
        with pytest.raises(InvalidPlan, match="rank 1 writes rows of 'u'"):
            self.plan(whole, self.summary(("u", Rectangle(0, 1, 0, 8))))

    @pytest.mark.parametrize(
        "other",
        [
            {"header": Header(step=6)},
            {"header": Header(step=5, kind="differential", parent=Link("x", "0"))},
            {"tables": {"t": TableShape(10, 9)}},
            {"tables": {}},
            {"per_rank": ("reader",)},
        ],
    )
    def test_ranks_that_disagree(self, other: State) -> None:
        whole = self.summary(("t", Rectangle(0, 10, 0, 8)))
        what = next(iter(other))
        with pytest.raises(
            InvalidPlan, match=rf"^ranks 0 and 2 don't save the same checkpoint: {what} is "
        ):
            self.plan(whole, self.summary(), self.summary(**other))

    def test_other_rows_of_state_on_another_rank(self) -> None:
        """Refuse a table that all ranks hold, and of which each writes a part, but not alike."""

        def half(start: int, *names: str) -> PlanSummary:
            return self.summary(("t", Rectangle(start, start + 5, 0, 8)), row_states={"t": names})

        self.plan(half(0, "momentum1"), half(5, "momentum1"))
        with pytest.raises(
            InvalidPlan, match=r"'t' has optimizer state \['momentum1'\] on rank 0 "
        ):
            self.plan(half(0, "momentum1"), half(5))

    def test_what_all_have_alike_is_written_once_and_shared_out(self) -> None:
        sizes = {"model": 100, "a": 60, "b": 50, "c": 10, "empty": 0}
        summaries = [self.summary(tables={}, replicated=sizes) for _ in range(3)]
        plans, whole = self.plan(*summaries)
        written = [plan.items for plan in plans]
        assert sorted(chain(*written)) == sorted(f"state:{name}" for name in sizes)
        load = [sum(sizes[key.removeprefix("state:")] for key in keys) for keys in written]
        assert max(load) == 100
        assert whole.states == dict.fromkeys(sizes, False)
        assert whole.chunks == tuple(len(keys) for keys in written)

    def test_per_rank_states_are_written_by_all(self) -> None:
        plans, whole = self.plan(*(self.summary(tables={}, per_rank=("rng",)) for _ in range(3)))
        keys = [plan.items for plan in plans]
        assert keys == [("state@0:rng",), ("state@1:rng",), ("state@2:rng",)]
        assert whole.states == {"rng": True}

    def test_a_state_that_only_some_ranks_have(self) -> None:
        """Choose the writer among the ranks that have the state."""
        plans, _ = self.plan(
            self.summary(tables={}), self.summary(tables={}, replicated={"late": 5})
        )
        assert [len(plan.items) for plan in plans] == [0, 1]


def test_finish_counts_what_was_written(disk: Folder) -> None:
    """Refuse to commit if a rank silently wrote less than planned."""

    class Forgetful(StorageWriter):
        def write_data(self, plan: SavePlan, planner: Any) -> Any:
            return super().write_data(replace(plan, items=plan.items[1:]), planner)

    error = cause(
        lambda: dcp.save(
            example(),
            storage_writer=Forgetful((disk / "first").url),
            planner=SavePlanner(),
            no_dist=True,
        )
    )
    assert isinstance(error, CheckNRunError)
    assert "were to write (5,) chunks, but wrote (4,)" in str(error)
    assert MANIFEST_NAME not in (disk / "first").names()
