"""Write hand-made chains of checkpoints with random chunks; read them plainly for comparison."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from tests.unit.entries import decode_rows, fields
from torchrec_checknrun.codecs import Codec, Exact, Fp16, ImportanceWeighted, Rowwise
from torchrec_checknrun.codecs.quantization import TableEncoding
from torchrec_checknrun.codecs.row_state import STATE_SCHEMES
from torchrec_checknrun.format.chunk import EncodedChunk, state_chunk
from torchrec_checknrun.format.entries import RowsEntry
from torchrec_checknrun.format.manifest import Manifest, TableTotals
from torchrec_checknrun.format.names import MANIFEST_NAME, checkpoint_id
from torchrec_checknrun.format.rank_file import add_totals, write_rank_file
from torchrec_checknrun.format.reader import read_chunk
from torchrec_checknrun.format.row_chunk import encode_rows
from torchrec_checknrun.in_order import Turn, run_in_order
from torchrec_checknrun.marks.layers import Consumer
from torchrec_checknrun.marks.marks import Marks
from torchrec_checknrun.restore.chunks import ChainContent, ReadableChunk, read_content
from torchrec_checknrun.restore.fit import Fit
from torchrec_checknrun.restore.rows import RowRestore
from torchrec_checknrun.root.chain import resolve
from torchrec_checknrun.shards import LocalShard, Rectangle, RowBlock, TableShape
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.values.state import encode_state

TABLE, DIM = "ebc.embedding_bags.t", 8
STATES = {"momentum1": True, "exp_avg": False}
"""Optimizer states by name, each with whether it is row-wise."""

CODECS: list[Codec] = [
    Exact(),
    Fp16(),
    *(Rowwise(bits) for bits in (8, 4, 3, 2)),
    ImportanceWeighted(),
]
CHAIN_ROWS = 40
"""Rows of ``chain_of_three``."""
_numbers = itertools.count()


def new_root() -> Folder:
    """Make a root in memory."""
    root = Folder(f"memory://tests/chains/{next(_numbers)}")
    root.create()
    return root


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread: threads of small operations wait for each other on busy CPUs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass
class Part:
    """The rows of some columns, in chunks of a given size."""

    columns: tuple[int, int]
    ids: list[int]
    size: int
    states: tuple[str, ...] = tuple(STATES)
    encoding: TableEncoding = field(default_factory=lambda: TableEncoding(Exact()))


@dataclass
class Job:
    """A job of the rank-file writer: one encoded chunk."""

    chunk: EncodedChunk

    def encode(self) -> EncodedChunk:
        return self.chunk

    def close(self) -> None:
        pass


def encode(part: Part, rows: int, seed: int) -> list[EncodedChunk]:
    """Encode random rows into chunks."""
    generator = torch.Generator().manual_seed(seed)
    start, stop = part.columns
    chunks = []
    for at in range(0, len(part.ids), part.size):
        ids = torch.tensor(part.ids[at : at + part.size])
        shapes = {n: (len(ids),) if STATES[n] else (len(ids), stop - start) for n in part.states}
        weight = torch.randn((len(ids), stop - start), generator=generator)
        weight[torch.rand(len(ids), generator=generator) < 0.05] = torch.inf
        block = RowBlock(
            table=TABLE,
            shape=TableShape(rows, DIM),
            columns=part.columns,
            ids=ids,
            weight=weight,
            positions=None,
            optimizer={n: torch.rand(shape, generator=generator) for n, shape in shapes.items()},
        )
        chunks.append(encode_rows(block, part.encoding))
    return chunks


def write(
    root: Folder,
    rows: int,
    parts: Sequence[Part],
    parent: Manifest | None = None,
    ranks: int = 1,
    dense: Mapping[str, object] | None = None,
    sharded: Sequence[EncodedChunk] = (),
    **other: Any,
) -> Manifest:
    """Commit a checkpoint of one table, one state common to all ranks, and one state per rank.

    Args:
        dense: more of the common state.
        sharded: pieces of sharded tensors.
    """
    sequence = parent.sequence + 1 if parent else 1
    name = checkpoint_id(sequence, sequence * 10, f"{sequence:08x}")
    (root / name).create()
    chunks = [c for i, part in enumerate(parts) for c in encode(part, rows, 100 * sequence + i)]
    summaries = []
    for rank in range(ranks):
        of_rank = chunks[rank::ranks]
        if rank == 0:
            model = {"w": sequence, **(dense or {})}
            of_rank.append(state_chunk("model", None, *encode_state(model, "model")))
            of_rank += sharded
        own = {"drawn": torch.arange(rank + 3.0)}
        of_rank.append(state_chunk("rng", rank, *encode_state(own, "rng")))
        summaries.append(write_rank_file(root / name, rank, iter(map(Job, of_rank))))
    total = TableTotals(rows, DIM)
    for summary in summaries:
        if TABLE in summary.tables:
            total = add_totals(total, summary.tables[TABLE])
    manifest = Manifest(
        id=name,
        sequence=sequence,
        step=sequence * 10,
        kind="differential" if parent else "full",
        parent=parent.link if parent else None,
        previous=parent.link if parent else None,
        world_size=ranks,
        created_at="2024-02-03T04:05:06.789+00:00",
        created_by="test",
        lossy_restores=0,
        bits=None,
        tables={TABLE: total},
        states={"model": False, "rng": True},
        dense_bytes=sum(summary.dense_bytes for summary in summaries),
        files=tuple(summary.file for summary in summaries),
        **other,
    ).sealed()
    (root / name).put(MANIFEST_NAME, manifest.to_bytes())
    return manifest


@st.composite
def splits(draw: st.DrawFn, size: int) -> list[tuple[int, int]]:
    """Draw ranges that make up ``[0, size)``."""
    cuts = sorted(draw(st.sets(st.integers(1, size - 1), max_size=3))) if size > 1 else []
    return list(zip([0, *cuts], [*cuts, size], strict=True))


@st.composite
def random_parts(
    draw: st.DrawFn, rows: int, codecs: Sequence[Codec] = (Exact(),)
) -> list[list[Part]]:
    """Draw a chain of a full checkpoint and differential ones; some chunks hold all rows of a
    range.

    Rows of the first ones may have no optimizer state yet.
    """
    columns = draw(splits(DIM))
    length = draw(st.integers(1, 5))
    without = draw(st.integers(0, length - 1))
    chain = []
    for age in range(length):
        parts = []
        for of_columns in columns:
            ids = list(range(rows))
            if age and draw(st.booleans()):
                ids = sorted(draw(st.sets(st.sampled_from(ids), min_size=int(age == without))))
            elif age:
                start = draw(st.integers(0, rows - 1))
                ids = ids[start : start + draw(st.integers(int(age == without), rows))]
            parts.append(
                Part(
                    of_columns,
                    ids,
                    draw(st.integers(1, 30)),
                    () if age < without else tuple(STATES),
                    TableEncoding(
                        draw(st.sampled_from(list(codecs))),
                        draw(st.sampled_from(STATE_SCHEMES)),
                        draw(st.booleans()),
                    ),
                )
            )
        chain.append(parts)
    return chain


def write_chain(root: Folder, rows: int, chain: Sequence[Sequence[Part]], ranks: int = 1) -> str:
    """Write a chain of given parts; return the head's id."""
    manifest = None
    for parts in chain:
        manifest = write(root, rows, parts, manifest, ranks)
    assert manifest is not None
    return manifest.id


def make_shards(rows: int, places: Iterable[Rectangle], fill: float = -1.0) -> list[LocalShard]:
    """Make shards filled with a value that no stored row has."""
    return [
        LocalShard(
            TABLE,
            TableShape(rows, DIM),
            place,
            torch.full((place.rows, place.cols), fill),
            {
                name: torch.full((place.rows,) if rowwise else (place.rows, place.cols), fill)
                for name, rowwise in STATES.items()
            },
        )
        for place in places
    ]


def content_of(root: Folder, head: str) -> ChainContent:
    return read_content(root, resolve(root, head))


def restore(
    root: Folder, head: str, shards: list[LocalShard], threads: int = 1, dry_run: bool = False
) -> tuple[list[Marks], list[str]]:
    """Restore as a planner and a reader do.

    Returns:
        The shards' marks, and the keys of the chunks that were read.
    """
    content = content_of(root, head)
    marks = [Marks(shard.rectangle.rows, torch.device("cpu")) for shard in shards]
    rows = RowRestore(content, {TABLE: TABLE}, Fit())
    chunks = {chunk.key: chunk for part in content.chunks for chunk in part}
    keys = rows.plan(shards, marks)
    were_read: list[str] = []

    def load(number: int, turn: Turn) -> None:
        chunk = chunks[keys[number]]

        def read() -> memoryview:
            were_read.append(chunk.key)
            return read_chunk(root, chunk)

        rows.load(ReadableChunk(chunk, read, turn), dry_run)

    if threads == 1:
        for number in range(len(keys)):
            load(number, nullcontext())
    else:
        stages = [[(fields(chunks[key])["table"], chunks[key].checkpoint)] for key in keys]

        def one(number: int, turn: Callable[[int], Turn]) -> None:
            load(number, turn(0))

        run_in_order(one, [1] * len(keys), stages, len(keys), threads)
    rows.finish(dry_run)
    return marks, were_read


def apply_in_order(root: Folder, head: str, shards: list[LocalShard]) -> list[np.ndarray]:
    """Apply every chunk in the chain's order, the older ones first: the right result of a restore.

    Returns:
        The rows of each shard that differential checkpoints hold.
    """
    held = [np.zeros(shard.rectangle.rows, dtype=bool) for shard in shards]
    for age, chunks in enumerate(content_of(root, head).chunks):
        for chunk in chunks:
            if isinstance(chunk.entry, RowsEntry):
                for shard, of_shard in zip(shards, held, strict=True):
                    local = _apply(chunk.entry, read_chunk(root, chunk), shard)
                    of_shard[local] |= age > 0
    return held


def _apply(entry: RowsEntry, payload: memoryview, shard: LocalShard) -> np.ndarray:
    own, rows = shard.rectangle, decode_rows(entry, payload)
    first, last = entry.columns
    start, stop = max(first, own.col_start), min(last, own.col_stop)
    here = (rows.ids >= own.row_start) & (rows.ids < own.row_stop)
    local = rows.ids[here] - own.row_start
    if start >= stop:
        return local[:0].numpy()
    into, source = (
        slice(start - own.col_start, stop - own.col_start),
        slice(start - first, stop - first),
    )
    shard.weight[local, into] = rows.weight[here][:, source]
    for name, state in rows.optimizer.items():
        if state.dim() == 1:
            assert (start, stop) == (first, last) == (own.col_start, own.col_stop)
            shard.optimizer[name][local] = state[here]
        else:
            shard.optimizer[name][local, into] = state[here][:, source]
    return local.numpy()


def marked(marks: Marks) -> np.ndarray:
    return marks.modified(Consumer.BASELINE).numpy()


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    raw = (t.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in (one, other))
    return one.dtype == other.dtype and len(set(raw)) == 1


def chain_of_three(root: Folder) -> list[Manifest]:
    """Write a full checkpoint of two ranks and two differential ones, 4-bit except for the last."""
    rows, encoding = CHAIN_ROWS, TableEncoding(Rowwise(4))
    full = write(root, rows, [Part((0, DIM), list(range(rows)), 10, encoding=encoding)], ranks=2)
    second = write(root, rows, [Part((0, DIM), [1, 2], 10, encoding=encoding)], full)
    return [full, second, write(root, rows, [Part((0, DIM), [3], 10)], second)]


def put_manifest(root: Folder, manifest: Manifest) -> None:
    (root / manifest.id).put(MANIFEST_NAME, manifest.to_bytes())
