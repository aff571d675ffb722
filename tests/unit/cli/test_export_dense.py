"""Export the dense part under flat names, or refuse values that another format lacks."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from tests.unit import chains
from tests.unit.chains import TABLE, Job, Part, new_root, write
from tests.unit.cli.exported import WHOLE, assert_loads, newest_id
from tests.unit.entries import block_of, fields
from torchrec_checknrun.boxes import Box
from torchrec_checknrun.errors import CorruptCheckpoint, IncompatibleCheckpoint
from torchrec_checknrun.format.chunk import state_chunk
from torchrec_checknrun.format.entries import parse_entry
from torchrec_checknrun.format.rank_file import write_rank_file
from torchrec_checknrun.format.reader import StoredChunk, read_indexes
from torchrec_checknrun.model.blocks import Block
from torchrec_checknrun.root.chain import resolve
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.tools.dense import piece_problems, read_dense
from torchrec_checknrun.tools.diff import compare, same
from torchrec_checknrun.tools.export import export_dcp, export_safetensors
from torchrec_checknrun.values.state import encode_state

pytestmark = pytest.mark.usefixtures("small_operations")


def dense_chunks(root: Folder, states: dict[str, object]) -> tuple[StoredChunk, ...]:
    """Return chunks of state objects, and of a sharded tensor in two pieces."""
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
        (1, {"size": [2**60, 2]}),  # refused before memory is allocated for it
        (0, {"part": [[1, 5], [0, 2]], "shard": [[1, 5], [0, 2]]}),  # row 4 twice, row 0 missing
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
    """Write a checkpoint whose state ``model`` holds a value under a table's name."""
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


def test_values_are_json_of_any_parser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write NaN and infinities, as of a schedule's best metric, in a form that JSON has."""
    none = float("nan")
    best = {"best": float("inf"), "lr": 0.5, "seen": {none, -1.0}, "at": complex(0, -none)}
    root = with_model(monkeypatch, best)
    export_dcp(root, resolve(root, newest_id(root)), tmp_path / "dcp")
    text = (tmp_path / "dcp" / "values.json").read_text()
    document = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    found = {name: v for name, v in document["values"].items() if name.startswith("w.")}
    assert found == {
        "w.best": {"float": "inf"},
        "w.lr": 0.5,
        "w.seen": {"set": [-1.0, {"float": "nan"}]},
        "w.at": {"complex": [0.0, {"float": "nan"}]},
    }


def test_a_value_that_is_called_as_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Advise what helps with a checkpoint that is there: other files, not other names."""
    root = with_model(monkeypatch, {"weight": torch.ones(2)}, "w")
    chain = resolve(root, newest_id(root))
    with pytest.raises(IncompatibleCheckpoint, match=r"'w\.weight': .*--format safetensors"):
        export_dcp(root, chain, tmp_path / "dcp")
    done = export_safetensors(root, chain, tmp_path / "files")
    assert done.tensors.keys() >= {"w.weight"}
    assert (tmp_path / "files" / "w.safetensors").is_file()
    assert (tmp_path / "files" / "dense.safetensors").is_file()
