"""Find every differing bit of two final states, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.dlrm_criteo.final_state import MOST_SHOWN, compare, main

ROWS, COLUMNS = 7, 8
State = dict[str, Any]


def whole() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(ROWS, COLUMNS, generator=generator)
    weight[3, 2] = float("nan")
    return weight, torch.rand(ROWS, generator=generator)


def shard(rows: slice, columns: slice) -> dict[str, Any]:
    weight, momentum = whole()
    return {
        "table": "t",
        "shape": (ROWS, COLUMNS),
        "row": rows.start,
        "column": columns.start,
        "weight": weight[rows, columns].clone(),
        "state": {"momentum1": momentum[rows].clone(), "exp_avg": weight[rows, columns].clone()},
    }


def by_rows() -> list[State]:
    return [rank([shard(slice(0, 4), slice(0, 8))]), rank([shard(slice(4, 7), slice(0, 8))])]


def by_columns() -> list[State]:
    return [rank([shard(slice(0, 7), slice(0, 4))]), rank([shard(slice(0, 7), slice(4, 8))])]


def by_table() -> list[State]:
    return [rank([shard(slice(0, 7), slice(0, 8))]), rank([])]


def rank(shards: list[dict[str, Any]]) -> State:
    dense = {"w": torch.arange(6.0).reshape(2, 3), "w step": torch.tensor(5.0)}
    progress = {"step": torch.tensor(5), "samples": torch.tensor(50)}
    return {"world_size": 2, "shards": shards, "dense": dense, "progress": progress}


def write(directory: Path, ranks: list[State]) -> Path:
    directory.mkdir()
    for number, state in enumerate(ranks):
        torch.save(state, directory / f"rank{number}.pt")
    return directory


def test_equal_states_on_different_shards(tmp_path: Path) -> None:
    result = compare(write(tmp_path / "a", by_rows()), write(tmp_path / "b", by_table()))
    assert result.equal
    assert (result.tables, result.rows, result.dense_tensors) == (1, ROWS, 2)


def test_row_wise_states_of_column_shards_are_their_own(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", by_columns()), write(tmp_path / "b", by_columns())
    assert compare(a, b).equal
    mixed = compare(a, write(tmp_path / "c", by_rows()))
    assert mixed.different == 3  # two states per row against one; equal weights
    assert all("momentum1" in difference for difference in mixed.differences)


def flip_weight(ranks: list[State]) -> None:
    ranks[1]["shards"][0]["weight"].view(torch.int32)[1, 6] ^= 1


def negate_zero(ranks: list[State]) -> None:
    for state in ranks:
        state["dense"]["w"][0, 0] = -0.0


def flip_momentum(ranks: list[State]) -> None:
    ranks[0]["shards"][0]["state"]["momentum1"].view(torch.int32)[2] ^= 1


def drop_state(ranks: list[State]) -> None:
    for state in ranks:
        del state["shards"][0]["state"]["exp_avg"]


def drop_dense(ranks: list[State]) -> None:
    for state in ranks:
        del state["dense"]["w step"]


def other_type(ranks: list[State]) -> None:
    for state in ranks:
        state["dense"]["w"] = state["dense"]["w"].double()


def other_progress(ranks: list[State]) -> None:
    for state in ranks:
        state["progress"]["samples"] += 10


def ranks_disagree(ranks: list[State]) -> None:
    ranks[1]["dense"]["w"][1, 1] += 1


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (flip_weight, "table t weight: 1 of 7 rows differ, first row 5"),
        (negate_zero, "dense w: 1 of 2 rows differ, first row 0: [0.0, 1.0, 2.0] in A, [-0.0"),
        (flip_momentum, "table t momentum1: 1 of 7 rows differ, first row 2"),
        (drop_state, "table t exp_avg: only in A"),
        (drop_dense, "dense w step: only in A"),
        (other_type, "dense w: torch.float32 (2, 3) in A, torch.float64 (2, 3) in B"),
        (other_progress, "progress samples: 1 of 1 rows differ, first row 0: [50] in A, [60] in B"),
        (ranks_disagree, "b: w: 1 of 2 rows differ, first row 1"),
    ],
)
def test_one_difference_is_found_and_named(
    tmp_path: Path, change: Callable[[list[State]], None], named: str
) -> None:
    changed = by_rows()
    change(changed)
    result = compare(write(tmp_path / "a", by_rows()), write(tmp_path / "b", changed))
    assert result.different == 1
    assert named in result.differences[0]


def test_all_differences_are_counted_some_are_shown(tmp_path: Path) -> None:
    a, b = by_table(), by_table()
    for state in a:
        state["dense"] = {f"w{i}": torch.zeros(1) for i in range(MOST_SHOWN + 5)}
    for state in b:
        state["dense"] = {f"w{i}": torch.ones(1) for i in range(MOST_SHOWN + 5)}
    result = compare(write(tmp_path / "a", a), write(tmp_path / "b", b))
    assert result.different == MOST_SHOWN + 5
    assert len(result.differences) == MOST_SHOWN


def test_incomplete_states_are_no_states(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", by_rows()), write(tmp_path / "b", by_rows())
    (b / "rank1.pt").unlink()
    with pytest.raises(FileNotFoundError, match="expected every rank's file"):
        compare(a, b)
    with pytest.raises(FileNotFoundError, match="holds 0 rank files"):
        compare(a, tmp_path / "nowhere")
    half = by_rows()
    half[1]["shards"] = []
    with pytest.raises(ValueError, match="table t hold 32 values, the table has 56"):
        compare(a, write(tmp_path / "c", half))


def test_the_command_compares_two_states(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = by_rows()
    flip_weight(changed)
    a, b = str(write(tmp_path / "a", by_rows())), str(write(tmp_path / "b", changed))
    assert main([a, a]) == 0
    assert capsys.readouterr().out.startswith("EQUAL bit for bit: 1 tables with 7 rows")
    assert main([a, b]) == 1
    assert "table t weight: 1 of 7 rows differ, first row 5" in capsys.readouterr().out
    assert main([a, b, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["equal"], found["different"], found["rows"]) == (False, 1, 7)
    assert main([a, str(tmp_path / "none")]) == 2
    assert "expected every rank's file" in capsys.readouterr().err
