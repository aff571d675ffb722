"""Write the whole state of a job at its end without the package's code, and compare bit for bit.

The comparison shows that a resumed run equals one that was never interrupted:

    python -m recipes.dlrm_criteo.final_state runs/a/final runs/b/final

The state is read from TorchRec's kernels and PyTorch's optimizer, not through a checkpoint's view,
so that an error in that view cannot hide. Tables are put together from the ranks' shards: the two
runs may have had different plans and numbers of ranks.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import KeyedOptimizer
from torchrec.optim.optimizers import in_backward_optimizer_filter

MOST_SHOWN = 10  # differences to list; all are counted
Tensors = dict[str, torch.Tensor]


def save(
    directory: Path,
    model: DistributedModelParallel,
    optimizer: KeyedOptimizer,
    progress: Mapping[str, int],
) -> None:
    """Write this rank's part of the state, `rank<r>.pt`."""
    directory.mkdir(parents=True, exist_ok=True)
    state = {
        "world_size": dist.get_world_size(),
        "shards": list(shards_of(model)),
        "dense": dense_of(model, optimizer),
        "progress": {name: torch.tensor(value) for name, value in progress.items()},
    }
    torch.save(state, directory / f"rank{dist.get_rank()}.pt")


def shards_of(model: DistributedModelParallel) -> Iterator[dict[str, Any]]:
    """Yield this rank's shards of the split tables, each with its optimizer state."""
    for kernel in _kernels(model):
        weights = kernel.split_embedding_weights()
        if any(table.local_metadata is None for table in kernel.config.embedding_tables):
            continue  # data-parallel tables: ordinary parameters, see dense_of
        kernel.flush()  # writes back the rows in a GPU's cache
        states = kernel.emb_module.get_optimizer_state() or [{}] * len(weights)
        for table, weight, state in zip(
            kernel.config.embedding_tables, weights, states, strict=True
        ):
            row, column = table.local_metadata.shard_offsets
            yield {
                "table": table.name,
                "shape": (table.num_embeddings, table.embedding_dim),
                "row": row,
                "column": column,
                "weight": weight.cpu(),
                "state": {name: values.cpu() for name, values in state.items()},
            }


def _kernels(model: DistributedModelParallel) -> Iterator[Any]:
    for module in model.modules():
        for lookup in getattr(module, "_lookups", []):
            while isinstance(lookup, DistributedDataParallel):
                lookup = lookup.module
            yield from lookup._emb_modules


def dense_of(model: DistributedModelParallel, optimizer: KeyedOptimizer) -> Tensors:
    """Return every parameter that the dense optimizer trains, and its state."""
    states = optimizer.state_dict()["state"]
    dense = {}
    for name, parameter in in_backward_optimizer_filter(model.named_parameters()):
        dense[name] = parameter.detach().cpu()
        for key, value in states.get(name, {}).items():
            dense[f"{name} {key}"] = torch.as_tensor(value).cpu()
    return dense


@dataclass
class Comparison:
    """A comparison of two states; `differences` lists the first few differences."""

    tables: int = 0
    rows: int = 0
    dense_tensors: int = 0
    different: int = 0
    differences: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        return self.different == 0

    def to_json(self) -> dict[str, Any]:
        return {"equal": self.equal, **asdict(self)}

    def add(self, difference: str) -> None:
        self.different += 1
        if len(self.differences) < MOST_SHOWN:
            self.differences.append(difference)

    def compare(self, what: str, a: Tensors, b: Tensors) -> None:
        for name in sorted(a.keys() | b.keys()):
            if name not in a or name not in b:
                self.add(f"{what}{name}: only in {'A' if name in a else 'B'}")
            elif (a[name].shape, a[name].dtype) != (b[name].shape, b[name].dtype):
                self.add(f"{what}{name}: {_kind(a[name])} in A, {_kind(b[name])} in B")
            else:
                self._compare_rows(what + name, a[name], b[name])

    def _compare_rows(self, name: str, a: torch.Tensor, b: torch.Tensor) -> None:
        rows = torch.nonzero((_bytes(a) != _bytes(b)).any(dim=1)).flatten().tolist()
        if rows:
            first = f"row {rows[0]}: {_values(a, rows[0])} in A, {_values(b, rows[0])} in B"
            self.add(f"{name}: {len(rows)} of {len(_bytes(a))} rows differ, first {first}")


def compare(a: Path, b: Path) -> Comparison:
    """Compare two directories written by `save`, bit for bit."""
    result = Comparison()
    states = [_load(a), _load(b)]
    for directory, ranks in zip((a, b), states, strict=True):
        for rank, state in enumerate(ranks[1:], start=1):
            for part in ("dense", "progress"):
                of_ranks = Comparison()
                of_ranks.compare("", ranks[0][part], state[part])
                for difference in of_ranks.differences:
                    result.add(f"ranks 0 (A) and {rank} (B) of {directory}: {difference}")
    for part in ("progress", "dense"):
        result.compare(f"{part} ", states[0][0][part], states[1][0][part])
    tables_a, tables_b = (_tables(ranks) for ranks in states)
    for table in sorted(tables_a.keys() | tables_b.keys()):
        result.compare(f"table {table} ", tables_a.get(table, {}), tables_b.get(table, {}))
    result.tables = len(tables_a)
    result.rows = sum(len(tensors["weight"]) for tensors in tables_a.values())
    result.dense_tensors = len(states[0][0]["dense"])
    return result


def _load(directory: Path) -> list[dict[str, Any]]:
    ranks = sorted(directory.glob("rank*.pt"), key=lambda path: int(path.stem[4:]))
    states = [torch.load(path, mmap=True, weights_only=True) for path in ranks]
    if not states or {state["world_size"] for state in states} != {len(states)}:
        raise FileNotFoundError(
            f"{directory} holds {len(states)} rank files, of runs on "
            f"{sorted({state['world_size'] for state in states}) or 'no'} ranks; expected every "
            "rank's file of one run, as written with trainer.final_state"
        )
    return states


def _tables(ranks: list[dict[str, Any]]) -> dict[str, Tensors]:
    """Join the shards of whole tables: weights and states."""
    tables: dict[str, Tensors] = {}
    covered: dict[str, int] = {}
    for shard in (shard for state in ranks for shard in state["shards"]):
        rows, columns = shard["shape"]
        table = tables.setdefault(shard["table"], {"weight": torch.zeros(rows, columns)})
        row, column, weight = shard["row"], shard["column"], shard["weight"]
        last_row, last_column = row + weight.shape[0], column + weight.shape[1]
        covered[shard["table"]] = covered.get(shard["table"], 0) + weight.numel()
        table["weight"][row:last_row, column:last_column] = weight
        for name, values in shard["state"].items():
            if values.dim() == 2:
                whole = table.setdefault(name, torch.zeros(rows, columns, dtype=values.dtype))
                whole[row:last_row, column:last_column] = values
            else:
                # One value per row of a shard: split by columns, every part has its own.
                part = name if weight.shape[1] == columns else f"{name}, columns from {column}"
                whole = table.setdefault(part, torch.zeros(rows, dtype=values.dtype))
                whole[row:last_row] = values
    for name, table in tables.items():
        if covered[name] != table["weight"].numel():
            raise ValueError(
                f"the shards of table {name} hold {covered[name]} values, "
                f"the table has {table['weight'].numel()}; the rank files do not belong together"
            )
    return tables


def _bytes(values: torch.Tensor) -> torch.Tensor:
    """View values as a row of bytes per row: equal bits, also for NaN and negative zero."""
    rows = values.shape[0] if values.dim() else 1
    return values.contiguous().reshape(rows, -1).view(torch.uint8)


def _values(values: torch.Tensor, row: int) -> list[Any]:
    shown = values.reshape(values.shape[0] if values.dim() else 1, -1)[row].tolist()
    return shown if len(shown) <= 4 else [*shown[:4], "..."]


def _kind(values: torch.Tensor) -> str:
    return f"{values.dtype} {tuple(values.shape)}"


def main(arguments: list[str] | None = None) -> int:
    """Compare two states; return 0 if equal, 1 if different, 2 if no comparison was possible."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.dlrm_criteo.final_state",
        description="Compare two final states bit for bit; exit with status 1 if they differ.",
    )
    parser.add_argument("a", type=Path, help="trainer.final_state of one run")
    parser.add_argument("b", type=Path, help="trainer.final_state of the other")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    options = parser.parse_args(arguments)
    try:
        result = compare(options.a, options.b)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(result.to_json(), indent=2))
    elif result.equal:
        print(
            f"EQUAL bit for bit: {result.tables} tables with {result.rows} rows and their "
            f"optimizer states, {result.dense_tensors} dense parameters and optimizer states"
        )
    else:
        print(f"DIFFERENT in {result.different} tensors:")
        print("\n".join(f"  {difference}" for difference in result.differences))
    return 0 if result.equal else 1


if __name__ == "__main__":
    sys.exit(main())
