"""Check that the ranks' parts make up all tables and sharded tensors, none of them written twice.

Parts that ranks of another mesh or sharding group hold as well are left to the lowest of the ranks.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

from torchrec_checknrun.errors import InvalidPlan
from torchrec_checknrun.format.chunk import Path
from torchrec_checknrun.model.blocks import BlockSummary, check_blocks
from torchrec_checknrun.shards import Rectangle, TableShape, check_coverage
from torchrec_checknrun.snapshot.items import block_key, rows_key

Shards = Sequence[Sequence[tuple[str, Rectangle]]]
"""By rank, table and rectangle of each shard."""


def left_to_others(
    tables: Mapping[str, TableShape],
    shards: Shards,
    averaged: Sequence[Container[str]],
    blocks: Sequence[Sequence[BlockSummary]],
) -> list[set[str]]:
    """Refuse plans in which two ranks write the same, or a part of a table or a sharded tensor is
    missing.

    Args:
        tables: all tables by name.
        averaged: by rank, names of the shards that other sharding groups hold as well.
        blocks: by rank, its parts of other sharded tensors.

    Returns:
        For each rank the keys, as ``key_of`` returns, of items that another rank writes as well.

    Raises:
        InvalidPlan: names the table, the ranks and the parts.
    """
    left: list[set[str]] = [set() for _ in shards]
    for table, parts in _unusual(tables, shards).items():
        written = []
        seen: set[Rectangle] = set()
        for place, rank in parts:  # in the order of ranks
            name = f"{table}{place}"
            if place in seen and name in averaged[rank]:
                left[rank].add(rows_key(name))
            else:
                written.append((place, rank))
            seen.add(place)
        check_coverage(table, tables[table], written)
    found: dict[Path, list[tuple[BlockSummary, int]]] = {}
    keys: dict[Path, list[str]] = {}
    for rank, of_rank in enumerate(blocks):
        for number, block in enumerate(of_rank):
            found.setdefault(block.path, []).append((block, rank))
            keys.setdefault(block.path, []).append(block_key(number, rank))
    for path, pieces in found.items():
        for i in check_blocks(path, pieces):
            left[pieces[i][1]].add(keys[path][i])
    return left


def _unusual(
    tables: Mapping[str, TableShape], shards: Shards
) -> dict[str, list[tuple[Rectangle, int]]]:
    """Collect the parts of tables that are not split by rows, each with its rank, in their order.

    Most tables are, which is checked in passing: lists of all tables' parts would hold a million
    objects that lie far from each other in memory.
    """
    rows_done = dict.fromkeys(tables, 0)
    found: dict[str, list[tuple[Rectangle, int]]] = {}
    for rank, of_rank in enumerate(shards):
        for table, place in of_rank:
            if table not in tables:
                raise InvalidPlan(f"rank {rank} writes rows of {table!r}, which is no known table")
            whole_rows = (place.col_start, place.col_stop) == (0, tables[table].dim)
            if whole_rows and place.row_start == rows_done[table]:
                rows_done[table] = place.row_stop
            else:
                found[table] = []
    found |= {name: [] for name, rows in rows_done.items() if rows != tables[name].rows}
    for rank, of_rank in enumerate(shards) if found else ():
        for table, place in of_rank:
            if table in found:
                found[table].append((place, rank))
    return found


def tables_among(keys: Iterable[str]) -> set[str]:
    """Return the tables of which keys of items name a shard."""
    return {key.rpartition("[")[0] for key in keys}
