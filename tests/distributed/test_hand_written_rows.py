"""Tables that are written by hand between checkpoints: whatever was written is restored.

Random sequences of training and of all the ways in which users write rows, on real ranks, with a
table of each kind of sharding, data-parallel ones included. The expected rows come from TorchRec's
own state dicts.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor

from tests.distributed.watch import warnings_said
from tests.distributed.worker_pool import WorkerPool
from tests.distributed.zoo import ROWS, Zoo, build_zoo, changed_rows, stored_rows, table_arrays
from tests.examples import some_of
from torchrec_checknrun import Checkpointer, Consecutive, OneShot

Workers = Callable[[int], WorkerPool]

PREFIX = "embeddings.embedding_bags."
PLANS = {
    "mixed": {"t0": "data_parallel", "t1": "row_wise", "t2": "table_wise:0"},
    "columns": {"t0": "column_wise:0,1", "t1": "data_parallel", "t2": "row_wise"},
    "one_kernel": {"t0": "row_wise", "t1": "row_wise", "t2": "row_wise"},
}


class Job:
    """A zoo with a checkpointer, and what can be done to its tables."""

    def __init__(self, root: str, plan: dict[str, str], one_shot: bool = False) -> None:
        self.zoo = build_zoo("bags", plan)
        self.root = Path(root)
        self.saver = Checkpointer(
            root,
            model=self.zoo.model,
            state={"optimizer": self.zoo.optimizer},
            policy=OneShot() if one_shot else Consecutive(),
            retention=None,
            chunk_bytes=1500,
        )
        self.draw = random.Random(0)
        """The same on all ranks."""

    def save(self) -> int:
        """Save and return the number of stored rows (on rank 0)."""
        self.saver.steps += 1
        report = self.saver.save()
        assert report is not None
        stored, wrong = stored_rows(self.root / report.id, table_arrays(self.zoo))
        assert not wrong
        return len(stored)

    def parts(self, table: str, *names: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield this rank's parts of a table's weight, each with its first row.

        Args:
            names: yield parts of the optimizer state with any of these names instead.
        """
        if not names:
            whole = self.zoo.model.state_dict()[f"{PREFIX}{table}.weight"]
        else:
            found = self.zoo.optimizer.state_dict()["state"]  # with a prefix for the dense one
            states = [of for key, of in found.items() if key.endswith(f"{PREFIX}{table}.weight")]
            if not states:
                return  # another rank holds the table
            (whole,) = [value for key, value in states[0].items() if key.split(".")[-1] in names]
        if isinstance(whole, ShardedTensor):
            for shard in whole.local_shards():
                yield shard.metadata.shard_offsets[0], shard.tensor.detach()
        else:
            yield 0, whole.detach()

    def rows(self, table: str) -> list[int]:
        return sorted(self.draw.sample(range(ROWS[table]), 3))

    def assign(self, table: str, rows: list[int], how: str = "view") -> None:
        """Write new values into those of the rows that are on this rank."""
        value = self.draw.random()
        for first, part in self.parts(table):
            own = [row - first for row in rows if 0 <= row - first < len(part)]
            if not own:
                continue
            if how == "data":
                part.data[own] = value
            elif how == "numpy":
                part.numpy()[own] = value
            elif how == "inference":
                with torch.inference_mode():
                    part[own] = value
            else:
                part[own] = value

    def act(self, action: str) -> None:
        """Train, evaluate or write to a random table."""
        table = self.draw.choice(sorted(ROWS))
        rows = self.rows(table)
        zoo = self.zoo
        if action == "train":
            zoo.train(self.draw.randint(1, 2))
        elif action == "eval":
            zoo.model.eval()
            with torch.no_grad():
                zoo.model(zoo.batch(7))
            zoo.model.train()
        elif action in NAMED:
            self.write_named(action, table, rows)
        else:
            self.write_plainly(action, table, rows)

    def write_plainly(self, action: str, table: str, rows: list[int]) -> None:
        """Write without naming the rows: the package notices by itself."""
        zoo = self.zoo
        if action == "load":
            zoo.model.load_state_dict(scaled(zoo.model.state_dict()))
        elif action == "load_optimizer":
            zoo.optimizer.load_state_dict(scaled(zoo.optimizer.state_dict()))
        elif action == "zero":
            for _, part in self.parts(table):
                part.zero_()
        elif action == "parameter":
            with torch.no_grad():
                dict(zoo.model.named_parameters())[f"{PREFIX}{table}.weight"].mul_(0.5)
        elif action == "state" and zoo.steps:
            more = self.draw.random()
            for _, part in self.parts(table, "momentum1", "sum"):
                part.add_(more)
        elif action in ("view", "inference"):
            self.assign(table, rows, action)

    def write_named(self, action: str, table: str, rows: list[int]) -> None:
        """Write rows and name them to the package."""
        if action == "writing":
            with self.saver.writing(PREFIX + table, rows):
                self.assign(table, rows)
        elif action in ("data", "numpy"):
            self.assign(table, rows, action)
            self.saver.mark(PREFIX + table, rows)
        elif action == "write_rows":
            self.write_rows(table, rows)

    def write_rows(self, table: str, rows: list[int]) -> None:
        value = self.draw.random()
        for shard in self.saver._target.tracked.shards:
            place = shard.rectangle
            own = [row for row in rows if place.row_start <= row < place.row_stop]
            if shard.table == PREFIX + table and own:
                shard.write_rows(own, torch.full((len(own), place.cols), value))


PLAIN = ("load", "load_optimizer", "zero", "parameter", "state", "view", "inference")
NAMED = ("writing", "data", "numpy", "write_rows")
ACTIONS = ("train", "train", "eval", *PLAIN, *NAMED)


def scaled(state: Any) -> Any:
    """Copy a state dict and halve its values."""
    return _halve(copy.deepcopy(state))


@torch.no_grad()
def _halve(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _halve(item) for key, item in value.items()}
    if isinstance(value, ShardedTensor):
        for shard in value.local_shards():
            shard.tensor.mul_(0.5)
    elif isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim():
        value.mul_(0.5)
    return value


def restored(root: str, plan: dict[str, str]) -> dict[str, dict[str, Any]]:
    zoo: Zoo = build_zoo("bags", plan)
    with Checkpointer(root, model=zoo.model, state={"optimizer": zoo.optimizer}) as saver:
        assert saver.restore() is not None
    return table_arrays(zoo)


def sequence(root: str, plan: dict[str, str], seed: int) -> None:
    """Act at random between checkpoints; restore every third one into another model."""
    job = Job(root, plan, one_shot=seed % 2 == 1)
    job.draw = random.Random(seed)
    job.zoo.train(1)
    job.save()
    for number in range(9):
        for _ in range(job.draw.randint(1, 4)):
            job.act(job.draw.choice(ACTIONS))
        job.save()
        if number % 3 == 2:
            assert changed_rows(table_arrays(job.zoo), restored(root, plan)) == set()
    job.saver.close()


@pytest.mark.parametrize(
    ("plan", "seed"),
    [
        ("mixed", 0),
        *(
            pytest.param(plan, seed, marks=pytest.mark.slow)
            for plan in sorted(PLANS)
            for seed in range(1, 10)
        ),
    ],
)
def test_whatever_was_written_is_restored(
    workers: Workers, tmp_path: Path, plan: str, seed: int
) -> None:
    workers(2).run(sequence, root=str(tmp_path), plan=PLANS[plan], seed=seed)


def each_way(root: str, plan: dict[str, str], action: str) -> list[int]:
    """Write once between two checkpoints of the same step, then only train."""
    job = Job(root, plan)
    job.zoo.train(2)
    stored = [job.save()]
    job.draw = random.Random(5)
    with warnings_said() as said:
        for _ in range(2):
            job.act(action)
            stored.append(job.save())
        assert changed_rows(table_arrays(job.zoo), restored(root, plan)) == set()
        job.zoo.train(1)
        stored.append(job.save())
    job.saver.close()
    assert changed_rows(table_arrays(job.zoo), restored(root, plan)) == set()
    return [*stored, sum("outside of training" in line for line in said)]


ALL = sum(ROWS.values())


@pytest.mark.parametrize("action", some_of([*PLAIN, *NAMED], 0, 4, 7))
def test_each_way_of_writing(workers: Workers, tmp_path: Path, action: str) -> None:
    plan = PLANS["one_kernel"]
    full, first, second, trained, warned = workers(2).run(
        each_way, root=str(tmp_path), plan=plan, action=action
    )[0]
    assert full == ALL
    named = action in NAMED
    if action in ("view", "inference"):  # only on ranks that hold one of the three rows
        assert min(first, second) > ALL // 3
    else:
        assert (first, second) == ((3, 3) if named else (ALL, ALL))
    assert warned == 0 if named else warned <= 1
    assert trained < ALL  # the writes are known by then
