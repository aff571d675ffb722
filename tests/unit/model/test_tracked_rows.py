"""Read and write rows of tracked tables, on a model sharded over a group of one."""

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from tests.unit.tracked_model import (
    DIM,
    ROWS,
    SPLIT,
    WIDE,
    batch,
    make_model,
    modified,
    only,
    table,
    train,
)
from torchrec_checknrun.tracking import Consumer, TrackedModel, track

pytestmark = pytest.mark.usefixtures("group")


class TestRows:
    def test_rows_are_read_in_the_given_order(
        self, model: nn.Module, tracked: TrackedModel
    ) -> None:
        train(model, a=[[4, 9]])
        shard = only(tracked, WIDE)
        rows = shard.read_rows([9, 4, 0])
        assert rows.ids.tolist() == [9, 4, 0]
        assert torch.equal(rows.weight, table(model, WIDE)[[9, 4, 0]])
        assert rows.optimizer.keys() == {"momentum1"}
        momentum = rows.optimizer["momentum1"]
        assert momentum.shape == (3,)
        assert bool((momentum[:2] > 0).all())
        assert momentum[2] == 0

    def test_what_is_read_is_a_copy(self, model: nn.Module, tracked: TrackedModel) -> None:
        shard, before = only(tracked, WIDE), table(model, WIDE)
        rows = shard.read_rows(range(ROWS))
        rows.weight += 1
        rows.optimizer["momentum1"] += 1
        assert torch.equal(table(model, WIDE), before)
        assert bool((shard.read_rows([0]).optimizer["momentum1"] == 0).all())

    def test_no_rows_mark_nothing(self, tracked: TrackedModel) -> None:
        shard = only(tracked, WIDE)
        rows = shard.read_rows([])
        assert rows.weight.shape == (0, DIM)
        shard.write_rows([], rows.weight, rows.optimizer)
        assert shard.encode_rows([], bits=8).shape[0] == 0
        assert modified(tracked) == {}

    def test_parts_of_a_row(self, model: nn.Module, tracked: TrackedModel) -> None:
        parts = sorted(
            (shard for shard in tracked.shards if shard.table == SPLIT),
            key=lambda shard: shard.rectangle,
        )
        rows = [part.read_rows([2, 3]).weight for part in parts]
        assert torch.equal(torch.cat(rows, dim=1), table(model, SPLIT)[2:4])
        parts[1].write_rows([2], torch.ones(1, 4))
        wanted = table(model, SPLIT)[2]
        assert torch.equal(wanted, torch.cat([rows[0][0], torch.ones(4)]))

    def test_written_rows_are_marked(self, model: nn.Module, tracked: TrackedModel) -> None:
        shard, before = only(tracked, WIDE), table(model, WIDE)
        weight = torch.randn(2, DIM)
        shard.write_rows([7, 2], weight, {"momentum1": torch.tensor([5.0, 6.0])})
        after = table(model, WIDE)
        assert torch.equal(after[[7, 2]], weight)
        others = [i for i in range(ROWS) if i not in (7, 2)]
        assert torch.equal(after[others], before[others])
        assert shard.read_rows([2, 7, 8]).optimizer["momentum1"].tolist() == [6, 5, 0]
        for consumer in (Consumer.LAST, Consumer.BASELINE, Consumer.USER):
            assert modified(tracked, consumer) == {"wide": [2, 7]}
        shard.write_rows([7], torch.zeros(1, DIM))
        assert shard.read_rows([7]).optimizer["momentum1"].tolist() == [5]

    def test_writes_reach_the_model(self, model: nn.Module, tracked: TrackedModel) -> None:
        only(tracked, WIDE).write_rows([5], torch.full((1, DIM), 3.0))
        with torch.no_grad():
            pooled = model(batch(a=[[5]]))
        assert pooled[0, :DIM].tolist() == [3.0] * DIM

    @pytest.mark.parametrize("rows", [[-1], [ROWS], [0, 2**40]])
    def test_rows_that_are_not_here(
        self, model: nn.Module, tracked: TrackedModel, rows: Sequence[int]
    ) -> None:
        shard, before = only(tracked, WIDE), table(model, WIDE)
        with pytest.raises(IndexError, match=r"wide\[0:30, 0:8\] holds rows 0 to 29, but rows"):
            shard.read_rows(rows)
        with pytest.raises(IndexError, match="holds rows 0 to 29"):
            shard.encode_rows(rows)
        with pytest.raises(IndexError, match="holds rows 0 to 29"):
            shard.write_rows(rows, torch.zeros(len(rows), DIM))
        assert torch.equal(table(model, WIDE), before)
        assert modified(tracked) == {}

    @pytest.mark.parametrize(
        ("weight", "optimizer", "named"),
        [
            (torch.zeros(2, DIM + 1), {}, "weight"),
            (torch.zeros(1, DIM), {}, "weight"),
            (torch.zeros(2 * DIM), {}, "weight"),
            (torch.zeros(2, DIM), {"momentum1": torch.zeros(3)}, "momentum1"),
            (torch.zeros(2, DIM), {"momentum1": torch.zeros(2, 1)}, "momentum1"),
            (torch.zeros(2, DIM), {"exp_avg": torch.zeros(2)}, "exp_avg"),
        ],
    )
    def test_shapes_that_dont_fit(
        self,
        model: nn.Module,
        tracked: TrackedModel,
        weight: torch.Tensor,
        optimizer: dict[str, torch.Tensor],
        named: str,
    ) -> None:
        shard, before = only(tracked, WIDE), table(model, WIDE)
        with pytest.raises(ValueError, match=rf"wide\[.*{named} of shape .* doesn't fit"):
            shard.write_rows([1, 2], weight, optimizer)
        assert torch.equal(table(model, WIDE), before)
        assert modified(tracked) == {}

    @pytest.mark.parametrize("bits", [8, 4, 2])
    def test_encoded_rows_are_fbgemms(
        self, model: nn.Module, tracked: TrackedModel, bits: int
    ) -> None:
        rows = [3, 29, 0]
        weight = table(model, WIDE)[rows]
        if bits == 8:
            wanted = torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized(weight)
        else:
            wanted = torch.ops.fbgemm.FloatToFusedNBitRowwiseQuantizedSBHalf(weight, bits)
        assert torch.equal(only(tracked, WIDE).encode_rows(rows, bits=bits), wanted)

    def test_rows_that_cant_be_encoded(self, tracked: TrackedModel) -> None:
        shard = only(tracked, WIDE)
        shard.write_rows([4], torch.full((1, DIM), torch.nan))
        with pytest.raises(ValueError, match=r"wide\[.*8-bit.*NaN"):
            shard.encode_rows([3, 4])
        shard.encode_rows([3])
        with pytest.raises(ValueError, match="bits must be 8, 4 or 2"):
            shard.encode_rows([3], bits=16)

    @pytest.mark.parametrize(
        ("optimizer", "names"), [(torch.optim.SGD, set()), (torch.optim.Adagrad, {"momentum1"})]
    )
    def test_state_of_other_optimizers(
        self, optimizer: type[torch.optim.Optimizer], names: set[str]
    ) -> None:
        model = make_model(optimizer)
        tracked = track(model)
        train(model, a=[[3]])
        states = only(tracked, WIDE).read_rows([3, 4]).optimizer
        assert states.keys() == names
        for state in states.values():
            assert state.shape == (2, DIM)
            assert bool((state[0] != 0).any())
            assert bool((state[1] == 0).all())
        tracked.close()
