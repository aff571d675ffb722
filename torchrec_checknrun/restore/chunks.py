"""Read what a chain holds: the indexes of its files, and its chunks by several threads, each verified."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from reprlib import repr as shown

from torchrec_checknrun.errors import CorruptCheckpoint
from torchrec_checknrun.format.chunk import Entry
from torchrec_checknrun.format.manifest import Manifest, TableTotals
from torchrec_checknrun.format.reader import Columns, StoredChunk, read_indexes
from torchrec_checknrun.format.row_chunk import KIND
from torchrec_checknrun.root.chain import Chain
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.threads import Turn


@dataclass(frozen=True)
class ChainContent:
    """A chain with the index of every file in it, checkpoints oldest first."""

    chain: Chain
    chunks: tuple[tuple[StoredChunk, ...], ...]


class ReadableChunk(io.BytesIO):
    """A stored chunk for the planner, which may find that it needs no byte of it.

    A BytesIO because DCP's planners are given those.

    Args:
        key: which chunk of the chain.
        read: gives its bytes, verified, in memory that may be used again once it is loaded.
        turn: entered by what one thread at a time must do, when several load chunks, and after what
            the plan has of the table's other checkpoints before.
    """

    def __init__(self, key: str, entry: Entry, read: Callable[[], memoryview], turn: Turn) -> None:
        super().__init__()
        self.key = key
        self.entry = entry
        self.payload = read
        self.turn = turn


def read_content(root: Folder, chain: Chain) -> ChainContent:
    """Reads the chunk indexes of a chain.

    The tables are of the size that the manifests say, so that memory of it may be taken.

    Raises:
        CorruptCheckpoint: an index is missing, or differs from what the manifest says of it or of
            the tables; or the full checkpoint isn't full.
    """
    content = ChainContent(
        chain, tuple(read_indexes(root, manifest) for manifest in chain.manifests)
    )
    for manifest, chunks in zip(chain.manifests, content.chunks, strict=True):
        for problem in table_problems(manifest, chunks):
            raise CorruptCheckpoint(problem)
    return content


def table_problems(manifest: Manifest, chunks: Sequence[StoredChunk]) -> Iterator[str]:
    """How tables that a manifest has aren't those of its chunks, as far as indexes tell: at most
    two lines for each table.
    """
    others: dict[str, str] = {}
    rows: dict[str, Counter[Columns]] = {name: Counter() for name in manifest.tables}
    for chunk in chunks:
        entry = chunk.entry
        if entry["kind"] != KIND:
            continue
        name, size = entry["table"], (entry["table_rows"], entry["table_dim"])
        table = manifest.tables.get(name)
        if table is not None:
            first, last = entry["columns"]
            rows[name][first, last] += entry["count"]
        if table is None or size != (table.rows, table.dim):
            said = "has none" if table is None else f"has it as {table.rows} × {table.dim}"
            others.setdefault(
                name,
                f"{chunk.checkpoint}/{chunk.file}, chunk {chunk.number}: rows of a table "
                f"{name!r} of {size[0]} × {size[1]}, where the manifest {said}",
            )
    if manifest.kind == "full":
        for name, table in manifest.tables.items():
            if gap := _gap(name, table, rows[name]):
                yield f"{manifest.id} {gap}: {manifest.id} is not full"
    yield from others.values()


def _gap(name: str, table: TableTotals, rows: Counter[Columns]) -> str:
    """Columns of which a full checkpoint has too few rows, or too many.

    Args:
        rows: by the columns of chunks, how many rows they have.
    """
    changes: Counter[int] = Counter()
    for (first, last), count in rows.items():
        changes[first] += count
        changes[last] -= count
    held = at = 0
    for column in sorted({*changes, table.dim}):
        if column > at and held != table.rows:
            values = sum((last - first) * count for (first, last), count in rows.items())
            return (
                f"holds {values} of the {table.rows * table.dim} values of {name}; it has columns "
                f"{shown(sorted(rows))} of {table.dim}, and of {at} to {column - 1} it holds "
                f"{held} of the {table.rows} rows"
            )
        held, at = held + changes[column], column
    return ""
