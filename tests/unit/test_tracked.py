"""``track``: which rows changed, and rows in and out, on a model sharded over a group of one."""

import gc
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_checknrun import (
    Consumer,
    LoadPlanner,
    Quantization,
    SavePlanner,
    StorageReader,
    StorageWriter,
    TrackedModel,
    TrackedShard,
    kernels,
    track,
)
from torchrec_checknrun.shards import Rectangle, TableShape

ROWS, DIM = 30, 8
WIDE, TALL, SPLIT = (f"ebc.embedding_bags.{name}" for name in ("wide", "tall", "split"))


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Model(nn.Module):
    """Features ``a`` and ``shared``; ``shared`` feeds two tables, one of them in two parts."""

    def __init__(self) -> None:
        super().__init__()
        features = {"wide": ["a"], "tall": ["shared", "b"], "split": ["shared"]}
        self.ebc = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(
                    name=name,
                    num_embeddings=ROWS,
                    embedding_dim=DIM,
                    feature_names=feature_names,
                )
                for name, feature_names in features.items()
            ],
            device=torch.device("meta"),
        )

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        pooled: torch.Tensor = self.ebc(features).values()
        return pooled


def make_model(optimizer: type[torch.optim.Optimizer] = RowWiseAdagrad) -> nn.Module:
    torch.manual_seed(0)
    model = Model()
    apply_optimizer_in_backward(optimizer, model.ebc.parameters(), {"lr": 0.5})
    sharder = EmbeddingBagCollectionSharder()
    plan = construct_module_sharding_plan(
        model.ebc,
        {
            "wide": row_wise(),
            "tall": table_wise(rank=0),
            "split": column_wise(ranks=[0, 0]),
        },
        sharder=sharder,
        local_size=1,
        world_size=1,
        device_type="cpu",
    )
    return DistributedModelParallel(
        model, device=torch.device("cpu"), plan=ShardingPlan({"ebc": plan}), sharders=[sharder]
    )


def batch(**bags: list[list[int]]) -> KeyedJaggedTensor:
    """A batch of one bag or more per feature; features not named look up nothing."""
    samples = max(len(bag) for bag in bags.values())
    by_feature = [bags.get(name, [[]] * samples) for name in ("a", "shared", "b")]
    return KeyedJaggedTensor(
        keys=["a", "shared", "b"],
        values=torch.tensor([i for bags in by_feature for bag in bags for i in bag]).long(),
        lengths=torch.tensor([len(bag) for bags in by_feature for bag in bags]),
    )


def train(model: nn.Module, **bags: list[list[int]]) -> None:
    model(batch(**bags)).square().sum().backward()


def table(model: nn.Module, name: str) -> torch.Tensor:
    """A table's weights by TorchRec's own state dict."""
    whole = torch.full((ROWS, DIM), torch.nan)
    for shard in model.state_dict()[f"{name}.weight"].local_shards():
        row, col = shard.metadata.shard_offsets
        part = shard.tensor.detach()
        whole[row : row + part.shape[0], col : col + part.shape[1]] = part
    return whole


@pytest.fixture
def model() -> nn.Module:
    return make_model()


@pytest.fixture
def tracked(model: nn.Module) -> Iterator[TrackedModel]:
    tracked = track(model)
    yield tracked
    tracked.close()


def only(tracked: TrackedModel, name: str) -> TrackedShard:
    (shard,) = (shard for shard in tracked.shards if shard.table == name)
    return shard


def modified(tracked: TrackedModel, consumer: Consumer = Consumer.USER) -> dict[str, list[int]]:
    """Tables with modified rows, by the last part of their names."""
    found = tracked.modified_rows(consumer)
    assert set(found) == {WIDE, TALL, SPLIT}
    return {name.split(".")[-1]: ids.tolist() for name, ids in found.items() if len(ids)}


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
        """As a pipeline does it: the next batch is looked up before this one is applied."""
        first = model(batch(a=[[1]]))
        second = model(batch(a=[[2]]))
        first.sum().backward()
        assert modified(tracked) == {"wide": [1]}
        tracked.clear()
        second.sum().backward()
        assert modified(tracked) == {"wide": [2]}

    def test_by_hand(self, tracked: TrackedModel) -> None:
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
        tracked.mark(WIDE, [-1, ROWS, 2**40, 7])
        tracked.mark(WIDE, [])
        assert modified(tracked) == {"wide": [7]}

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
        """Taken for ids, a mask would quietly mark rows 0 and 1."""
        with pytest.raises(TypeError, match="integer row ids"):
            tracked.mark(WIDE, rows)
        with pytest.raises(TypeError, match="integer row ids"):
            only(tracked, WIDE).read_rows(rows)
        assert modified(tracked) == {}

    @pytest.mark.parametrize("name", ["wide", "ebc.embedding_bags.none", WIDE + ".weight", ""])
    def test_unknown_tables(self, tracked: TrackedModel, name: str) -> None:
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
        # Without the hooks nothing of the model refers to the marks any more.
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
        """Of one that isn't known to leave them alone, that is assumed; it is said once."""
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


class TestRows:
    def test_read(self, model: nn.Module, tracked: TrackedModel) -> None:
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

    def test_no_rows(self, tracked: TrackedModel) -> None:
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

    def test_write(self, model: nn.Module, tracked: TrackedModel) -> None:
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


class TestDirectSaves:
    """Marks between ``dcp.save`` calls: no row may be lost between two checkpoints."""

    def save(self, path: Path, tracked: TrackedModel, bits: int | None = None) -> Any:
        planner = SavePlanner(tracked, quantization=Quantization(bits, exact_below_rows=0))
        return dcp.save({}, storage_writer=StorageWriter(path), planner=planner).planner_data

    def check(self, path: Path, model: nn.Module) -> None:
        """The checkpoint holds what the model holds."""
        fresh = make_model()
        other = track(fresh)
        for shard in other.shards:
            shard.write_rows(range(ROWS), torch.zeros(ROWS, shard.rectangle.cols))
        dcp.load({}, storage_reader=StorageReader(path), planner=LoadPlanner(other))
        for name in other.tables:
            assert torch.equal(table(fresh, name), table(model, name))
        other.close()

    def test_full_then_differential(
        self, model: nn.Module, tracked: TrackedModel, tmp_path: Path
    ) -> None:
        train(model, a=[[1, 2]])
        first = self.save(tmp_path / "first", tracked)
        train(model, a=[[5]], shared=[[6]])
        second = self.save(tmp_path / "second", tracked)
        assert (first.kind, second.kind) == ("full", "differential")
        assert second.parent == first.link
        assert second.tables[WIDE].stored_values == DIM
        self.check(tmp_path / "second", model)
        assert modified(tracked)["wide"] == [1, 2, 5]

    def test_a_second_save_into_the_same_directory_loses_nothing(
        self, model: nn.Module, tracked: TrackedModel, tmp_path: Path
    ) -> None:
        first = self.save(tmp_path / "first", tracked)
        train(model, a=[[5]])
        with pytest.raises(CheckpointException, match="CheckpointExists"):
            self.save(tmp_path / "first", tracked)
        train(model, a=[[6]])
        second = self.save(tmp_path / "second", tracked)
        assert second.parent == first.link
        assert second.tables[WIDE].stored_values == 2 * DIM
        self.check(tmp_path / "second", model)

    def test_a_failed_save_loses_nothing(
        self,
        model: nn.Module,
        tracked: TrackedModel,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        self.save(tmp_path / "first", tracked)
        train(model, a=[[5]])
        with monkeypatch.context() as patched:
            patched.setattr("os.link", lambda *_: 1 / 0)
            with pytest.raises(CheckpointException, match="ZeroDivisionError"):
                self.save(tmp_path / "second", tracked)
        train(model, a=[[6]])
        third = self.save(tmp_path / "third", tracked)
        assert third.tables[WIDE].stored_values == 2 * DIM
        self.check(tmp_path / "third", model)

    def test_a_rise_in_width_needs_a_full_checkpoint(
        self, model: nn.Module, tracked: TrackedModel, tmp_path: Path
    ) -> None:
        """Else rows that are not written again would keep their loss under an exact checkpoint."""
        kinds = []
        for i, bits in enumerate([8, 4, 8, 8, None, 8, None]):
            train(model, a=[[i]])
            kinds.append(self.save(tmp_path / str(i), tracked, bits).kind)
        assert [kind == "full" for kind in kinds] == [True, False, True, False, True, False, True]
        self.check(tmp_path / "6", model)

    def test_a_damaged_checkpoint_is_nobodys_parent(
        self, model: nn.Module, tracked: TrackedModel, tmp_path: Path
    ) -> None:
        first = self.save(tmp_path / "first", tracked)
        train(model, a=[[5]])
        self.save(tmp_path / "second", tracked)
        (tmp_path / "second" / "manifest.json").write_bytes(b"{}")
        train(model, a=[[6]])
        third = self.save(tmp_path / "third", tracked)
        assert third.parent == first.link
        self.check(tmp_path / "third", model)


def test_a_tracker_does_not_keep_a_closed_model_alive() -> None:
    """Its registers are weak: models come and go in one process (sweeps, notebooks)."""
    from weakref import ref

    model = make_model()
    tracked = track(model)
    gone = ref(tracked)
    tracked.close()
    del model, tracked
    gc.collect()
    assert gone() is None
