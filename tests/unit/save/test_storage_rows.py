"""Save rows of tables in hand-made local shards as a Checkpointer does."""

import pytest
import torch

from tests.unit.entries import decode_rows, fields
from tests.unit.plain_states import cause, load
from torchrec_checknrun import Quantization
from torchrec_checknrun.errors import ChainBroken, IncompatibleCheckpoint
from torchrec_checknrun.format.manifest import Header, Link, Manifest
from torchrec_checknrun.format.names import MANIFEST_NAME
from torchrec_checknrun.format.reader import read_chunk
from torchrec_checknrun.ranks import Ranks
from torchrec_checknrun.restore.chunks import read_content
from torchrec_checknrun.root.chain import resolve
from torchrec_checknrun.root.report import Progress, checkpoint_report
from torchrec_checknrun.row_sets import RowSet
from torchrec_checknrun.save.commit import CheckpointWriter, save_checkpoint
from torchrec_checknrun.save.plan import Prepared, summarize
from torchrec_checknrun.shards import LocalShard, Rectangle, TableShape
from torchrec_checknrun.snapshot.items import Items
from torchrec_checknrun.snapshot.snapshot import ShardSnapshot, Snapshot
from torchrec_checknrun.store.folder import Folder


def make_shard(table: str, shape: TableShape, rectangle: Rectangle) -> LocalShard:
    generator = torch.Generator().manual_seed(len(table))
    return LocalShard(
        table,
        shape,
        rectangle,
        torch.randn((rectangle.rows, rectangle.cols), generator=generator),
        {
            "momentum1": torch.rand(rectangle.rows, generator=generator),
            "exp_avg_sq": torch.rand((rectangle.rows, rectangle.cols), generator=generator),
        },
    )


BIG, SMALL = TableShape(100, 8), TableShape(7, 4)
TABLES = {"ebc.big": BIG, "ebc.small": SMALL}


def make_shards() -> list[LocalShard]:
    return [
        make_shard("ebc.big", BIG, Rectangle(0, 60, 0, 8)),
        make_shard("ebc.big", BIG, Rectangle(60, 100, 0, 4)),
        make_shard("ebc.big", BIG, Rectangle(60, 100, 4, 8)),
        make_shard("ebc.small", SMALL, Rectangle(0, 7, 0, 4)),
    ]


def save_rows(
    root: Folder,
    name: str,
    shards: list[LocalShard],
    modified: list[list[int]] | None = None,
    header: Header | None = None,
    bits: int | None = None,
    chunk_bytes: int = 500,
) -> Manifest:
    snapshots = []
    for i, shard in enumerate(shards):
        mask = None
        if modified is not None:
            mask = torch.zeros(shard.rectangle.rows, dtype=torch.bool)
            mask[modified[i]] = True
        snapshots.append(ShardSnapshot(shard, None if mask is None else RowSet(mask)))
    snapshot = Snapshot(snapshots, TABLES, {"reader": {"samples": 5}, "w": torch.ones(10)})
    quantization = Quantization(bits, "asymmetric", exact_below_rows=0)
    items = Items.of(snapshot, quantization, chunk_bytes)
    summary = summarize(header or Header(bits=bits), snapshot, items, quantization)
    prepared = Prepared(summary, items.by_name)
    return save_checkpoint(Ranks.of(None), CheckpointWriter(root / name), lambda: prepared)


@pytest.mark.parametrize("bits", [None, 8, 4, 2])
def test_a_manifest_accounts_for_every_byte(root: Folder, bits: int | None) -> None:
    shards = make_shards()
    manifest = save_rows(root, "first", shards, bits=bits)
    folder = root / "first"
    listing = {name: folder.size(name) for name in folder.names()}
    assert listing.pop(MANIFEST_NAME) == len(manifest.to_bytes())
    assert listing == {file.name: file.size for file in manifest.files}
    report = checkpoint_report(manifest, 1, Progress())
    assert sum(report.bytes.values()) == report.total_bytes
    assert report.total_bytes == sum(folder.size(name) or 0 for name in folder.names())
    assert all(size > 0 for name, size in report.bytes.items() if name != "ids")
    assert report.bytes["ids"] == 0
    assert report.bytes["optimizer"] == sum(s.nbytes for x in shards for s in x.optimizer.values())
    weights = sum(shard.weight.nbytes for shard in shards)
    assert (report.bytes["weights"] == weights) == (bits is None)
    assert report.bytes["weights"] <= weights
    assert (report.error_mean is None) == (report.error_max is None) == (bits is None)
    assert manifest.lossy == (bits is not None)
    assert report.full_fp32_bytes == weights + report.bytes["optimizer"] + report.bytes["dense"]
    assert report.modified_rows == report.total_rows == 107
    assert report.modified_fraction == 1.0
    assert {t.value_bits for t in manifest.tables.values()} == {bits or 32}


def read_tables(root: Folder, name: str) -> dict[str, torch.Tensor]:
    """Read a chain's tables by an independent reader, newest rows last."""
    tables = {table: torch.full((s.rows, s.dim), torch.nan) for table, s in TABLES.items()}
    for part in read_content(root, resolve(root, name)).chunks:
        for chunk in part:
            if fields(chunk)["kind"] == "rows":
                rows = decode_rows(chunk.entry, read_chunk(root, chunk))
                start, stop = fields(chunk)["columns"]
                tables[fields(chunk)["table"]][rows.ids, start:stop] = rows.weight
    return tables


def test_full_and_differential_rows(root: Folder) -> None:
    shards = make_shards()
    full = save_rows(root, "first", shards)
    assert sum(file.chunks for file in full.files) > len(shards) + 2
    wanted = {table: torch.full((s.rows, s.dim), torch.nan) for table, s in TABLES.items()}

    def put_wanted() -> None:
        for s in shards:
            r = s.rectangle
            wanted[s.table][r.row_start : r.row_stop, r.col_start : r.col_stop] = s.weight

    put_wanted()
    for table, values in read_tables(root, "first").items():
        assert torch.equal(values, wanted[table])
    modified = [[0, 1, 2, 59], [], list(range(40)), [6]]
    for shard, rows in zip(shards, modified, strict=True):
        shard.weight[rows] += 1
    put_wanted()
    header = Header(kind="differential", parent=full.link, previous=full.link, step=10)
    second = save_rows(root, "second", shards, modified, header, chunk_bytes=1 << 20)
    for table, values in read_tables(root, "second").items():
        assert torch.equal(values, wanted[table])
    assert (second.kind, second.parent, second.step) == ("differential", full.link, 10)
    report = checkpoint_report(second, 2, Progress())
    stored = 4 * 8 + 40 * 4 + 4
    assert second.modified_fraction == stored / (800 + 28)
    assert report.bytes["weights"] == 4 * stored
    assert report.bytes["ids"] == 3  # the gaps of the one shard whose rows are not consecutive
    assert report.full_fp32_bytes == checkpoint_report(full, 1, Progress()).full_fp32_bytes


def test_a_differential_checkpoint_without_a_row(root: Folder) -> None:
    shards = make_shards()
    full = save_rows(root, "first", shards, bits=8)
    header = Header(kind="differential", parent=full.link, bits=8)
    second = save_rows(root, "second", shards, [[], [], [], []], header, bits=8)
    assert second.modified_fraction == 0
    assert not second.lossy
    assert set(second.tables) == set(TABLES)
    assert read_tables(root, "second").keys() == TABLES.keys()


def test_a_broken_chain_names_the_missing_parent(disk: Folder) -> None:
    full = save_rows(disk, "first", make_shards())
    header = Header(kind="differential", parent=Link(full.id, "0" * 32))
    save_rows(disk, "second", make_shards(), [[], [], [], []], header)
    error = cause(lambda: load(disk, "second", {"w": torch.zeros(10)}))
    assert isinstance(error, ChainBroken)
    assert "second needs first" in str(error)


def test_loading_without_the_tables_is_refused(disk: Folder) -> None:
    save_rows(disk, "first", make_shards())
    error = cause(lambda: load(disk, "first", {"w": torch.zeros(10)}))
    assert isinstance(error, IncompatibleCheckpoint)
    assert "'ebc.big' (100 × 8)" in str(error)
    assert "'ebc.small' (7 × 4)" in str(error)
