"""Export to stock DCP and safetensors exactly what a restore gives."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException

from tests.unit import chains
from tests.unit.chains import (
    CODECS,
    DIM,
    TABLE,
    Part,
    make_shards,
    new_root,
    random_parts,
    restore,
    same_bits,
    write,
    write_chain,
)
from tests.unit.cli.exported import WHOLE, assert_loads, newest_id
from tests.unit.console import Console
from tests.unit.forgery import load, seal
from torchrec_checknrun.codecs import Codec, Exact, Fp16, Rowwise
from torchrec_checknrun.codecs.quantization import TableEncoding
from torchrec_checknrun.errors import CheckpointExists, IncompatibleCheckpoint
from torchrec_checknrun.root.chain import resolve
from torchrec_checknrun.shards import LocalShard, Rectangle
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.tools.export import export_dcp, export_safetensors

pytestmark = pytest.mark.usefixtures("small_operations")

HALVES = ((0, 4), (4, DIM))


def restored(root: Folder, head: str) -> LocalShard:
    """Return the table as restored onto one rank."""
    rows = resolve(root, head).head.tables[TABLE].rows
    shards = make_shards(rows, [Rectangle(0, rows, 0, DIM)], fill=0.0)
    restore(root, head, shards)
    return shards[0]


def dcp_names(shard: LocalShard) -> dict[str, torch.Tensor]:
    states = {f"fused_optimizer.{TABLE}.{name}": t for name, t in shard.optimizer.items()}
    return {f"{TABLE}.weight": shard.weight, **states}


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
    """Write all files into one folder and none elsewhere, however the target is spelled."""
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


@pytest.mark.parametrize(("dim", "bits"), [(12, 2), (6, 4)])
def test_rows_that_inference_tables_do_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dim: int, bits: int
) -> None:
    """Write a table in full whose rows FBGEMM refuses."""
    pytest.importorskip("fbgemm_gpu")
    monkeypatch.setattr(chains, "DIM", dim)
    root = chain_in(Rowwise(bits), ((0, dim),))
    chain = resolve(root, newest_id(root))
    done = export_safetensors(root, chain, tmp_path, rows="fused", layout="inference")
    why = f"full: {dim} columns of {bits} bits don't fill 16-bit words, as rows of inference must"
    assert done.tables == {TABLE: why}
    assert load_file(tmp_path / f"{TABLE}.safetensors")["weight"].shape == (90, dim)


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

    def test_dcp_loads_and_no_scratch_file_is_left(
        self, root: Folder, console: Console, tmp_path: Path
    ) -> None:
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

    @pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
    @pytest.mark.parametrize("form", ["dcp", "safetensors"])
    def test_whom_the_user_lets_read_may_read_all(
        self, root: Folder, console: Console, tmp_path: Path, form: str, mask: int
    ) -> None:
        before = os.umask(mask)
        try:
            console.json("export", root, tmp_path / "out", "--format", form)
        finally:
            os.umask(before)
        modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
        assert len(modes) > 1
        assert modes == dict.fromkeys(modes, 0o666 & ~mask)

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
