"""Build the rows of tables stored as differences from storage, without a model or ranks.

Memory: the references of one table: of ``delta`` a little more than a quarter of the table in fp32,
of ``lc`` as much as the table; two bytes more a row for each state stored by ``logdelta``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial

from torchrec_checknrun.codecs import Chained
from torchrec_checknrun.delta.digest import text_of
from torchrec_checknrun.delta.references import References
from torchrec_checknrun.errors import CheckNRunError, CorruptCheckpoint
from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.format.reader import Columns, Read, read_chunk
from torchrec_checknrun.format.row_reader import StoredRows
from torchrec_checknrun.restore.chunks import ChainContent, RowChunk, read_content
from torchrec_checknrun.root.chain import Chain
from torchrec_checknrun.shards import Rectangle
from torchrec_checknrun.store.folder import Folder

ByColumns = dict[Columns, References]


class TableLinks:
    """One table of a chain, built up checkpoint by checkpoint.

    Attributes:
        by_columns: what the rows restore to, by their range of columns.
        read: reads a chunk's bytes, verified; by default from the root.
    """

    def __init__(self, root: Folder, table: str, rows: int) -> None:
        self.read: Read
        self.read = partial(read_chunk, root)
        self._table, self._rows = table, rows
        self.by_columns: ByColumns = {}

    @property
    def digest(self) -> str:
        """Return the digest of all rows, as a manifest has it."""
        return text_of(sum(one.digest for one in self.by_columns.values()))

    def add(self, chunks: Iterable[RowChunk]) -> None:
        """Add a checkpoint's chunks of the table.

        Raises:
            CorruptCheckpoint: a chunk is damaged, or doesn't follow what was added.
        """
        for chunk, header in chunks:
            if not isinstance(header.codec, Chained):
                raise CorruptCheckpoint(
                    f"{chunk.checkpoint}/{chunk.file}, chunk {chunk.number}: rows of {self._table} "
                    "that nothing can build on, in a table that is stored as differences"
                )
            stored = StoredRows(header, self.read(chunk))
            columns = header.rectangle.col_start, header.rectangle.col_stop
            if columns not in self.by_columns:
                place = Rectangle(0, self._rows, *columns)
                states = header.log_states
                self.by_columns[columns] = header.codec.references(self._table, place, states)
            stored.add_to(self.by_columns[columns], slice(0, header.count))


def build_table(
    root: Folder,
    content: ChainContent,
    table: str,
    read: Read | None = None,
) -> ByColumns:
    """Build what a table's rows restore to, by their range of columns.

    Args:
        read: reads a chunk's bytes, verified; None: from the root.

    Raises:
        CorruptCheckpoint: a chunk is damaged, or the rows are not those of the chain's head.
    """
    head = content.chain.head
    links = TableLinks(root, table, head.tables[table].rows)
    if read is not None:
        links.read = read
    for by_table in content.by_table:
        links.add(by_table.get(table, ()))
    if problem := _mismatch(head, table, links.digest):
        raise CorruptCheckpoint(problem)
    return links.by_columns


def digest_problems(
    root: Folder, manifests: Mapping[str, Manifest], parents: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Build the tables of all chains; yield the ids of checkpoints whose rows have other digests
    than their manifests say, or can't be built, each with the problem.

    Args:
        parents: by id the id of what a checkpoint builds on; absent if its chain can't be read.
    """
    built_upon = set(parents.values())
    for head in manifests.values():
        if head.deltas and head.id not in built_upon:
            chain = [head]
            while (parent := parents.get(chain[-1].id)) is not None:
                chain.append(manifests[parent])
            if chain[-1].parent is None:  # else it is reported elsewhere
                yield from _chain_problems(root, Chain(tuple(reversed(chain))))


def _chain_problems(root: Folder, chain: Chain) -> Iterator[tuple[str, str]]:
    try:
        content = read_content(root, chain)
    except (CheckNRunError, OSError):
        return  # reported with the checkpoint's own chunks
    read = content.reader(root)
    for table in chain.head.deltas:
        links = TableLinks(root, table, chain.head.tables[table].rows)
        links.read = read
        for manifest, by_table in zip(chain.manifests, content.by_table, strict=True):
            try:
                links.add(by_table.get(table, ()))
            except (CheckNRunError, OSError) as error:
                yield manifest.id, f"{table}: {error}"
                break
            if problem := _mismatch(manifest, table, links.digest):
                yield manifest.id, problem
                break


def _mismatch(manifest: Manifest, table: str, digest: str) -> str | None:
    said = manifest.deltas.get(table)
    if said is not None and said.after == digest:
        return None
    return (
        f"{manifest.id}: the rows of {table} have digest {digest}, the manifest says "
        f"{said.after if said is not None else 'none'}"
    )
