"""What is exported, others read: stock DCP into plain tensors, and safetensors."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException

from tests.unit import chains
from tests.unit.chains import (
    CODECS,
    DIM,
    TABLE,
    Job,
    Part,
    make_shards,
    new_root,
    random_parts,
    restore,
    same_bits,
    write,
    write_chain,
)
from tests.unit.console import Console
from tests.unit.entries import block_of, fields
from tests.unit.forgery import load, seal
from torchrec_checknrun.boxes import Box
from torchrec_checknrun.codecs import Codec, Exact, Fp16, Rowwise
from torchrec_checknrun.codecs.quantization import TableEncoding
from torchrec_checknrun.errors import CheckpointExists, CorruptCheckpoint, IncompatibleCheckpoint
from torchrec_checknrun.format.chunk import state_chunk
from torchrec_checknrun.format.entries import parse_entry
from torchrec_checknrun.format.rank_file import write_rank_file
from torchrec_checknrun.format.reader import StoredChunk, read_indexes
from torchrec_checknrun.format.state import encode_state
from torchrec_checknrun.model.blocks import Block
from torchrec_checknrun.root.chain import resolve
from torchrec_checknrun.shards import LocalShard, Rectangle
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.tools.dense import piece_problems, read_dense
from torchrec_checknrun.tools.diff import compare, same
from torchrec_checknrun.tools.export import export_dcp, export_safetensors

pytestmark = pytest.mark.usefixtures("small_operations")

WHOLE = (0, DIM)
HALVES = ((0, 4), (4, DIM))


def restored(root: Folder, head: str) -> LocalShard:
    """The table as a restore onto one rank gives it."""
    rows = resolve(root, head).head.tables[TABLE].rows
    shards = make_shards(rows, [Rectangle(0, rows, 0, DIM)], fill=0.0)
    restore(root, head, shards)
    return shards[0]


def dcp_names(shard: LocalShard) -> dict[str, torch.Tensor]:
    states = {f"fused_optimizer.{TABLE}.{name}": t for name, t in shard.optimizer.items()}
    return {f"{TABLE}.weight": shard.weight, **states}


def assert_loads(folder: str | Path, wanted: dict[str, torch.Tensor]) -> None:
    loaded = {name: torch.full_like(tensor, -7) for name, tensor in wanted.items()}
    dcp.load(loaded, checkpoint_id=folder, no_dist=True)
    for name, tensor in wanted.items():
        assert same_bits(loaded[name], tensor), name


@settings(max_examples=8, deadline=None)
@given(data=st.data(), rows=st.integers(1, 60), ranks=st.sampled_from([1, 3]))
def test_stock_dcp_loads_what_a_restore_gives(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, rows: int, ranks: int
) -> None:
    root, folder = new_root(), tmp_path_factory.mktemp("exported")
    head = write_chain(root, rows, data.draw(random_parts(rows, CODECS)), ranks)
    done = export_dcp(root, resolve(root, head), folder)
    drawn = {f"rng.rank{rank}.drawn": torch.arange(rank + 3.0) for rank in range(ranks)}
    wanted = {**dcp_names(restored(root, head)), **drawn}
    assert done.tensors == {name: list(tensor.shape) for name, tensor in wanted.items()}
    assert_loads(folder, wanted)
    document = json.loads((folder / "values.json").read_text())
    assert document["values"] == {"w": resolve(root, head).head.sequence}


def test_to_a_url(tmp_path: Path) -> None:
    root = new_root()
    head = write(root, 30, [Part(c, list(range(30)), 7) for c in HALVES])
    export_dcp(root, resolve(root, head.id), f"file://{tmp_path}/exported", optimizer=False)
    assert_loads(tmp_path / "exported", {f"{TABLE}.weight": restored(root, head.id).weight})
    with pytest.raises(CheckpointException, match=r"Missing key.*fused_optimizer"):
        assert_loads(tmp_path / "exported", dcp_names(restored(root, head.id)))


@pytest.mark.parametrize("target", ["~/out", "file://{home}/out", "out"])
@pytest.mark.parametrize("export", [export_dcp, export_safetensors])
def test_local_targets_are_one_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, export: Callable[..., object], target: str
) -> None:
    """However they are spelled: all files are there, and none elsewhere."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home if target == "out" else tmp_path)
    root = new_root()
    head = write(root, 30, [Part(WHOLE, list(range(30)), 30)])
    export(root, resolve(root, head.id), target.format(home=home))
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
    assert [path.name for path in home.iterdir()] == ["out"]
    names = {path.name for path in (home / "out").iterdir()}
    wanted = {".metadata"} if export is export_dcp else {f"{TABLE}.safetensors"}
    assert names > {"values.json"} | wanted


@settings(max_examples=8, deadline=None)
@given(data=st.data(), rows=st.integers(1, 60))
def test_safetensors_hold_what_a_restore_gives(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, rows: int
) -> None:
    root, folder = new_root(), tmp_path_factory.mktemp("exported")
    head = write_chain(root, rows, data.draw(random_parts(rows, CODECS)), ranks=2)
    done = export_safetensors(root, resolve(root, head), folder)
    loaded, wanted = load_file(folder / f"{TABLE}.safetensors"), restored(root, head)
    assert loaded.keys() == {"weight", *wanted.optimizer}
    assert same_bits(loaded["weight"], wanted.weight)
    for name, state in wanted.optimizer.items():
        assert same_bits(loaded[name], state)
    dense = load_file(folder / "dense.safetensors")
    assert dense["rng.rank1.drawn"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert done.files == [f"{TABLE}.safetensors", "dense.safetensors"]
    with safe_open(folder / f"{TABLE}.safetensors", "pt") as file:
        metadata = file.metadata()
    assert metadata["checkpoint"] == head
    assert (metadata["table"], metadata["rows"]) == (TABLE, "full")


def chain_in(codec: Codec, columns: tuple[tuple[int, int], ...], rows: int = 90) -> Folder:
    root = new_root()
    encoding = TableEncoding(codec)
    full = write(root, rows, [Part(c, list(range(rows)), 40, encoding=encoding) for c in columns])
    ids = list(range(0, rows, 2))
    write(root, rows, [Part(c, ids, 40, encoding=encoding) for c in columns], full)
    return root


def newest_id(root: Folder) -> str:
    return max(name for name in root.names() if name.startswith("seq"))


@pytest.mark.parametrize("columns", [(WHOLE,), HALVES], ids=["whole", "halves"])
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_fused_rows_decode_to_what_a_restore_gives(
    tmp_path: Path, bits: int, columns: tuple[tuple[int, int], ...]
) -> None:
    root = chain_in(Rowwise(bits), columns)
    head = newest_id(root)
    done = export_safetensors(root, resolve(root, head), tmp_path, rows="fused", optimizer=False)
    loaded, wanted = load_file(tmp_path / f"{TABLE}.safetensors"), restored(root, head)
    assert done.tables == {TABLE: f"fused, {bits} bit"}
    exceptions = 0
    for start, stop in columns:
        suffix = f".columns_{start}_{stop}" if columns is HALVES else ""
        fused = loaded[f"weight{suffix}"]
        assert fused.shape == (90, Rowwise(bits).row_bytes(stop - start))
        decoded = torch.empty((90, stop - start))
        Rowwise(bits).decode(fused.view(-1), {}, 90, 0, decoded)
        ids = loaded[f"exceptions.rows{suffix}"]
        assert fused[ids].count_nonzero() == 0
        assert ids.tolist() == sorted(set(ids.tolist()))
        decoded[ids] = loaded[f"exceptions.weight{suffix}"]
        assert same_bits(decoded, wanted.weight[:, start:stop].contiguous())
        exceptions += len(ids)
    assert 0 < exceptions < 30  # infinities


def test_fused_rows_are_fbgemms(tmp_path: Path) -> None:
    pytest.importorskip("fbgemm_gpu")
    root = chain_in(Rowwise(4), (WHOLE,))
    export_safetensors(root, resolve(root, newest_id(root)), tmp_path, rows="fused")
    loaded = load_file(tmp_path / f"{TABLE}.safetensors")
    decode = torch.ops.fbgemm.FusedNBitRowwiseQuantizedSBHalfToFloat
    values, wanted = decode(loaded["weight"], 4), restored(root, newest_id(root))
    plain = np.setdiff1d(np.arange(90), loaded["exceptions.rows"].numpy())
    torch.testing.assert_close(values[plain], wanted.weight[plain])
    assert same_bits(loaded["momentum1"], wanted.optimizer["momentum1"])


@pytest.mark.parametrize(
    ("codecs", "why"),
    [
        ((Exact(), Exact()), "full: rows are stored as exact"),
        ((Rowwise(4), Rowwise(8)), "full: rows are stored as 4 bit, 8 bit"),
        ((Rowwise(4), Fp16()), "full: rows are stored as 4 bit, fp16"),
        ((Exact(), Rowwise(4)), "full: rows are stored as 4 bit, exact"),
    ],
)
def test_tables_that_have_no_fused_rows_are_written_in_full(
    tmp_path: Path, codecs: tuple[Codec, Codec], why: str
) -> None:
    root = new_root()
    full = write(root, 60, [Part(WHOLE, list(range(60)), 60, encoding=TableEncoding(codecs[0]))])
    part = Part(WHOLE, list(range(20)), 60, encoding=TableEncoding(codecs[1]))
    head = write(root, 60, [part], full)
    done = export_safetensors(root, resolve(root, head.id), tmp_path, rows="fused")
    assert done.tables == {TABLE: why}
    loaded = load_file(tmp_path / f"{TABLE}.safetensors")
    assert same_bits(loaded["weight"], restored(root, head.id).weight)


def dense_chunks(root: Folder, states: dict[str, object]) -> tuple[StoredChunk, ...]:
    """Chunks of state objects, and of a sharded tensor in two pieces."""
    manifest = write(root, 4, [Part(WHOLE, list(range(4)), 4)])
    remapped = torch.arange(14).view(7, 2)
    blocks = [
        Block(("model", "ec.remapped"), (7, 2), Box((rows, (0, 2))), remapped[slice(*rows)])
        for rows in ((0, 4), (4, 7))
    ]
    jobs = [Job(state_chunk(n, None, *encode_state(v, n))) for n, v in states.items()]
    jobs += [Job(block.encode(block.box)) for block in blocks]
    file = write_rank_file(root / manifest.id, 9, iter(jobs)).file
    return read_indexes(root, replace(manifest, files=(file,)))


def test_dense_values_have_flat_names() -> None:
    root = new_root()
    chunks = dense_chunks(
        root,
        {
            "model": {"over.weight": torch.ones(2, 3), "over.steps": 4},
            "optimizer": {"state": {"over": {"exp_avg": torch.zeros(2)}}, "groups": [{"lr": 0.5}]},
            "reader": {"order": np.arange(3), "name": "a", "raw": b"\x01", "none": None, "no": []},
        },
    )
    found = read_dense(root, chunks)
    tensors = {name: v.tolist() for name, v in found.items() if isinstance(v, torch.Tensor)}
    assert tensors == {
        "over.weight": [[1.0] * 3] * 2,
        "optimizer.state.over.exp_avg": [0.0, 0.0],
        "reader.order": [0, 1, 2],
        "ec.remapped": torch.arange(14).view(7, 2).tolist(),
    }
    assert {name: v for name, v in found.items() if name not in tensors} == {
        "over.steps": 4,
        "optimizer.groups.0.lr": 0.5,
        "reader.name": "a",
        "reader.raw": b"\x01",
        "reader.none": None,
        "reader.no": [],
    }


def test_two_values_of_one_name_are_refused() -> None:
    root = new_root()
    chunks = dense_chunks(root, {"model": {"reader.at": 1}, "reader": {"at": 2}})
    with pytest.raises(IncompatibleCheckpoint, match=r"reader\.at"):
        read_dense(root, chunks)


@pytest.mark.parametrize(
    ("number", "change"),
    [
        (1, {"size": [2**60, 2]}),  # before memory is taken for it
        (0, {"part": [[1, 5], [0, 2]], "shard": [[1, 5], [0, 2]]}),  # row 4 twice, row 0 not
        (1, {"dtype": "float64"}),
        (1, {"path": ["other"]}),
    ],
)
def test_pieces_that_make_up_no_whole_are_refused(number: int, change: dict[str, object]) -> None:
    root = new_root()
    chunks = dense_chunks(root, {})
    pieces = [chunk for chunk in chunks if fields(chunk)["kind"] == "block"]
    assert list(piece_problems(pieces)) == []
    if "size" in change:
        pieces = pieces[1:]
        number = 0
    document = json.loads(json.dumps({**fields(pieces[number]), **change}))
    entry = parse_entry(document)
    pieces[number] = dataclasses.replace(pieces[number], entry=entry, header=block_of(entry))
    assert 1 <= len(list(piece_problems(pieces))) <= 2
    with pytest.raises(CorruptCheckpoint, match=r"pieces (of ec\.remapped )?are"):
        read_dense(root, tuple(pieces))


def test_a_value_of_a_states_name_is_refused() -> None:
    root = new_root()
    with pytest.raises(IncompatibleCheckpoint, match=r"two values .* 'ec\.remapped'"):
        read_dense(root, dense_chunks(root, {"model": {"ec.remapped": 1}}))


def with_model(monkeypatch: pytest.MonkeyPatch, value: object, table: str = TABLE) -> Folder:
    """A checkpoint whose state ``model`` holds this, under a table's name."""
    root = new_root()
    with monkeypatch.context() as patch:
        patch.setattr(chains, "TABLE", table)
        patch.setattr(chains, "encode_state", lambda _, name: encode_state({"w": value}, name))
        chains.write(root, 4, [Part(WHOLE, list(range(4)), 4)])
    return root


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.array([1j, 2]), r"^w of seq-.* is of torch\.complex128, .*--format dcp"),
        (torch.ones(2, dtype=torch.complex128), r"is of torch\.complex128"),
        (np.ones(2, dtype=np.longdouble), r"^w of seq-.* array of float128, .*save it as another"),
    ],
)
def test_types_that_safetensors_lack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: object, words: str
) -> None:
    root = with_model(monkeypatch, value)
    with pytest.raises(IncompatibleCheckpoint, match=words):
        export_safetensors(root, resolve(root, newest_id(root)), tmp_path / "files")
    assert list((tmp_path / "files").iterdir()) == []
    if "complex" in words:
        export_dcp(root, resolve(root, newest_id(root)), tmp_path / "dcp")
        assert_loads(tmp_path / "dcp", {"w": torch.as_tensor(value)})
    else:
        with pytest.raises(IncompatibleCheckpoint, match=words):
            export_dcp(root, resolve(root, newest_id(root)), tmp_path / "dcp")


def test_long_doubles_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (np.array([1, x, np.nan], dtype=np.longdouble) for x in (2, 3))
    assert same(one, one.copy())
    assert not same(one, other)
    assert not same(one, one.astype(np.float64))
    root = with_model(monkeypatch, one)
    assert compare(root.url, newest_id(root), newest_id(root)).dense_changed == ()


@pytest.mark.parametrize("table", ["dense", "Dense"])
def test_a_table_that_is_called_as_the_dense_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: str
) -> None:
    root = with_model(monkeypatch, torch.ones(2), table)
    with pytest.raises(IncompatibleCheckpoint, match=rf"table '{table}' would be written to"):
        export_safetensors(root, resolve(root, newest_id(root)), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["weight", "exceptions.rows"])
def test_an_optimizer_state_that_is_called_as_the_rows(tmp_path: Path, name: str) -> None:
    forged = load(chain_in(Rowwise(4), (WHOLE,)))
    for checkpoint in forged:
        for entry in checkpoint.entries:
            for state in entry.get("optimizer", ()):
                state["name"] = name if state["name"] == "exp_avg" else state["name"]
    root = new_root()
    head = seal(root, forged)
    match = f"table '{TABLE}' has an optimizer state '{name}', .*--no-optimizer"
    with pytest.raises(IncompatibleCheckpoint, match=match):
        export_safetensors(root, resolve(root, head), tmp_path / "a", rows="fused")
    export_safetensors(root, resolve(root, head), tmp_path / "b", rows="fused", optimizer=False)


class TestConsole:
    @pytest.fixture
    def root(self) -> Folder:
        return chain_in(Rowwise(4), (WHOLE,))

    def test_dcp(self, root: Folder, console: Console, tmp_path: Path) -> None:
        found = console.json("export", root, tmp_path / "out", "--scratch", tmp_path)
        assert found["tables"] == {TABLE: "full"}
        assert found["values"] == ["w"]
        assert_loads(tmp_path / "out", dcp_names(restored(root, newest_id(root))))
        assert [path.name for path in tmp_path.iterdir()] == ["out"]  # no scratch file is left

    def test_an_older_one_to_safetensors(
        self, root: Folder, console: Console, tmp_path: Path
    ) -> None:
        older = min(name for name in root.names() if name.startswith("seq"))
        options = ("--format", "safetensors", "--rows", "fused", "--no-optimizer")
        result = console.run("export", root, tmp_path / "out", older, *options)
        assert result.code == 0, result.err
        assert "fused, 4 bit" in result.out
        loaded = load_file(tmp_path / "out" / f"{TABLE}.safetensors")
        assert loaded.keys() == {"weight", "exceptions.rows", "exceptions.weight"}

    def test_nothing_is_overwritten(self, root: Folder, console: Console, tmp_path: Path) -> None:
        (tmp_path / "mine").touch()
        result = console.run("export", root, tmp_path)
        assert result.code == 2
        assert "holds 'mine' already: export into a new or empty folder" in result.err
        with pytest.raises(CheckpointExists):
            export_safetensors(root, resolve(root, newest_id(root)), tmp_path)

    def test_fused_dcp_is_refused(self, root: Folder, console: Console, tmp_path: Path) -> None:
        result = console.run("export", root, tmp_path / "out", "--rows", "fused")
        assert result.code == 2
        assert "safetensors" in result.err

    def test_safetensors_go_to_a_folder(self, root: Folder, console: Console) -> None:
        into = new_root()
        result = console.run("export", root, f"{into}/out", "--format", "safetensors")
        assert result.code == 2
        assert "local folder" in result.err
        assert into.names() == []
