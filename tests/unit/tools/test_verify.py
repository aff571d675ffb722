"""Call a checkpoint sound exactly if a restore accepts it; ``test_cli`` has more cases."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.chains import DIM, TABLE, Part, new_root, write
from tests.unit.forgery import Forged, example, seal
from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.root import chain, checkpoints
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.tools.verify import verify

pytestmark = pytest.mark.usefixtures("small_operations")

WHOLE = (0, DIM)


def problems_of(forged: list[Forged]) -> list[str]:
    root = new_root()
    seal(root, forged)
    return [problem for found in verify(root.url) for problem in found.problems]


def entries(forged: Forged, kind: str) -> list[dict[str, Any]]:
    return [e for file in forged.files.values() for e in file.index["chunks"] if e["kind"] == kind]


def test_rows_that_are_there_twice_while_others_are_missing() -> None:
    forged = example()
    (shifted,) = (entry for entry in entries(forged[0], "rows") if entry["first"] == 40)
    shifted |= {"first": 20, "last": 39}
    (problem,) = problems_of(forged)
    assert "rows of ebc.embedding_bags.t, columns 0 to 3, that are in another chunk" in problem
    assert f"{forged[0].folder} is not full" in problem


def test_columns_that_overlap_while_others_are_missing() -> None:
    """Refuse overlapping columns even if the number of values is right."""
    forged = example()
    del forged[1:]
    for entry in entries(forged[0], "rows"):
        entry["columns"] = [2, 6] if entry["columns"] == [4, DIM] else [0, 4]
    (problem,) = (text for text in problems_of(forged) if "not full" in text)
    assert "it has columns [(0, 4), (2, 6)] of 8, and of 2 to 3 it holds 120 of the 60" in problem


@pytest.mark.parametrize("size", [{"table_rows": 1000}, {"table_dim": 1000}])
def test_chunks_of_a_table_of_another_size(size: dict[str, int]) -> None:
    forged = example()
    for entry in entries(forged[1], "rows"):
        entry |= size
    (problem,) = problems_of(forged)
    assert f"{forged[1].folder}/rank-00000.bin, chunk 0: rows of a table '{TABLE}' of " in problem
    assert "where the manifest has it as 60 × 8" in problem


def test_chunks_of_a_table_that_the_manifest_lacks() -> None:
    forged = example()
    entries(forged[2], "rows")[0]["table"] = "other"
    assert any(
        "a table 'other' of 60 × 8, where the manifest has none" in p for p in problems_of(forged)
    )


def test_rows_that_no_table_takes_with_the_others() -> None:
    root = new_root()
    full = write(root, 40, [Part(WHOLE, list(range(40)), 10, states=())])
    first = write(root, 40, [Part(WHOLE, [3], 10)], full)  # first step of the table's optimizer
    write(root, 40, [Part(WHOLE, [4], 10, states=("exp_avg",))], first)
    (found, *others) = verify(root.url)
    assert [other.problems for other in others] == [(), ()]
    (problem,) = found.problems
    assert "float32 with optimizer state ['exp_avg'], others of the chain float32 with" in problem


def test_a_state_that_is_not_there() -> None:
    forged = example()
    forged[2].manifest["states"] = {"model": False, "rng": True, "reader": False}
    forged[1].manifest["world_size"] = 2**62
    problems = problems_of(forged)
    assert f"{forged[2].folder} lacks state 'reader'" in problems
    assert f"{forged[1].folder} has state 'rng' of 1 of {2**62} ranks" in problems


def test_pieces_of_sharded_tensors() -> None:
    forged = example()
    payload = forged[2].first.payload
    at = len(payload)
    piece = {"kind": "block", "path": ["model", "ids"], "dtype": "int64", "size": [8]}
    piece |= {"part": [[0, 4]], "shard": [[0, 4]]}
    payload += bytes(32)
    forged[2].entries.append({**piece, "offset": at, "length": 32, "checksum": ""})
    texts = "\n".join(problems_of(forged))
    assert f"{forged[2].folder} holds 4 of the 8 values of ids, or some twice" in texts


def test_what_collisions_know() -> None:
    forged = example()
    collisions = {"kind": "collisions", "name": "managed collisions", "rank": 0}
    collisions |= {"modules": {"a": {"rows": [0, 4], "buckets": 1}}, "tree": {"d": []}}
    at, number = len(forged[2].first.payload), len(forged[2].entries)
    forged[2].entries.append({**collisions, "offset": at, "length": 0, "checksum": ""})
    texts = "\n".join(problems_of(forged))
    assert f"chunk {number}: index entry of a collisions chunk is malformed" in texts
    assert "missing required field `input_hash_size` - at `$.modules[...]`" in texts


def test_each_manifest_of_a_chain_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    root, manifest = new_root(), None
    for length in range(10):
        ids = [1] if length else list(range(30))
        manifest = write(root, 30, [Part(WHOLE, ids, 30)], manifest)
    read: list[str] = []
    real = checkpoints.read_manifest

    def counting(root: Folder, name: str) -> Manifest:
        read.append(name)
        return real(root, name)

    for module in (chain, checkpoints):
        monkeypatch.setattr(module, "read_manifest", counting)
    assert len(verify(root.url)) == 10
    assert len(read) == len(set(read)) == 10
