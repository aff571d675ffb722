"""Refuse untrusted checkpoints with precise errors, in bounded memory."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.examples import some_of
from tests.unit.chains import new_root
from tests.unit.forgery import attack, example, seal
from tests.unit.format.attacks import ATTACKS, Attack
from tests.unit.format.shards import encode, make_shard
from tests.unit.fuzz import bounded_memory
from torchrec_checknrun.codecs import Exact
from torchrec_checknrun.errors import (
    CheckpointNotFound,
    ClaimDamaged,
    CorruptCheckpoint,
    InvalidPlan,
    UnsupportedState,
)
from torchrec_checknrun.format import checks, row_ids
from torchrec_checknrun.format.checks import INDEX_BYTES, parse_json, require_limits
from torchrec_checknrun.format.entries import StateEntry
from torchrec_checknrun.format.names import MANIFEST_NAME
from torchrec_checknrun.format.rank_file import LARGEST_CHUNK, index_bytes, require_chunk_size
from torchrec_checknrun.root.chain import newest, resolve
from torchrec_checknrun.root.prune import prune
from torchrec_checknrun.root.retention import Retention
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.values.state import encode_state
from torchrec_checknrun.writers.lease import FOLDER, Lease, latest_claim


@pytest.fixture(scope="module")
def limited() -> Iterator[None]:
    """Limit all attacks together, with the libraries that they load, to a gigabyte."""
    root = new_root()
    assert (
        attack(root, seal(root, example())) == []
    )  # start threads and load libraries before the limit
    with bounded_memory():
        yield


@pytest.mark.usefixtures("limited")
@pytest.mark.parametrize(
    ("words", "change"),
    some_of([attack[1:] for attack in ATTACKS], *range(0, len(ATTACKS), 2)),
    ids=[attack[0] for attack in ATTACKS],
)
def test_attacks_are_refused(words: str, change: Attack) -> None:
    root, chain = new_root(), example()
    change(chain)
    refused = attack(root, seal(root, chain))
    assert refused
    assert any(re.search(words, text) for text in refused), refused
    assert max(map(len, refused)) < 2000  # no long text of the attacker


class TestLinks:
    """Refuse symbolic links that lead out of a root on disk."""

    @pytest.fixture
    def root(self, tmp_path: Path) -> Folder:
        root = Folder(tmp_path / "run")
        root.create()
        seal(root, example())
        return root

    def refused(self, root: Folder, name: str) -> str:
        _, problems = newest(root)
        refused = attack(root, name)
        assert refused
        return "\n".join([*problems, *refused])

    def test_a_linked_checkpoint_is_refused(self, root: Folder, tmp_path: Path) -> None:
        name = example()[-1].folder
        os.rename(tmp_path / "run" / name, tmp_path / "elsewhere")
        (tmp_path / "run" / name).symlink_to(tmp_path / "elsewhere")
        assert f"{name} is a symbolic link" in self.refused(root, name)

    def test_a_rank_file(self, root: Folder, tmp_path: Path) -> None:
        name = example()[-1].folder
        file = next(iter((tmp_path / "run" / name).glob("rank-*.bin")))
        os.rename(file, tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
        assert f"{file.name} should have" in self.refused(root, name)

    @pytest.mark.parametrize("what", ["link", "pipe"])
    def test_a_linked_manifest_is_refused(self, root: Folder, tmp_path: Path, what: str) -> None:
        name = example()[-1].folder
        file = tmp_path / "run" / name / MANIFEST_NAME
        os.rename(file, tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere") if what == "link" else os.mkfifo(file)
        assert f"{MANIFEST_NAME} is a symbolic link, or no file" in self.refused(root, name)

    def test_nothing_is_written_or_deleted_through_them(self, root: Folder, tmp_path: Path) -> None:
        outside = tmp_path / "outside"
        outside.mkdir()
        (outside / "rank-00000.bin").write_text("precious")
        (tmp_path / "run" / "seq-000009_step-00000090_0badcafe").symlink_to(outside)
        assert prune(root, Retention(1)).leftovers == ()
        (tmp_path / "run" / FOLDER).symlink_to(outside)
        with pytest.raises(CorruptCheckpoint, match="writers is a symbolic link"):
            Lease(root).acquire(lambda _: ())
        with pytest.raises(CorruptCheckpoint, match="writers is a symbolic link"):
            latest_claim(root)
        assert [file.name for file in outside.iterdir()] == ["rank-00000.bin"]


CLAIM: dict[str, Any] = {
    "epoch": 1,
    "holder": {"run": "r", "attempt": 0, "host": "h", "machine": "m", "pid": 1, "started": 1},
    "seconds": 60.0,
    "earlier": None,
    "uses": [],
    "released": True,
    "renewals": 0,
    "idle": 0.0,
}


@pytest.mark.parametrize(
    "change",
    [
        {"seconds": "never"},
        {"seconds": float("inf")},
        {"seconds": float("nan")},
        {"seconds": 0.0},
        {"seconds": 1e18},
        {"released": 1},
        {"idle": -1.0},
        {"epoch": True},
        {"epoch": 2},
        {"earlier": 5},
        {"uses": [5]},
        {"holder": {**CLAIM["holder"], "pid": "../../etc"}},
        {"holder": {**CLAIM["holder"], "attempt": None}},
        {"holder": []},
        {"more": 1},
    ],
    ids=repr,
)
def test_other_records_are_damaged_claims(change: dict[str, Any]) -> None:
    """Take any other record for a damaged claim, even with a valid checksum."""
    root = new_root()
    (root / FOLDER).put("epoch-00000001.json", checks.seal("claim", CLAIM))
    claim = latest_claim(root)
    assert claim is not None
    assert claim.released
    (root / FOLDER).put("epoch-00000001.json", checks.seal("claim", {**CLAIM, **change}))
    with pytest.raises(ClaimDamaged, match=r"writers/epoch-00000001\.json"):
        latest_claim(root)


@pytest.mark.parametrize("name", ["../x", "/etc", "", ".."])
def test_names_that_lead_elsewhere(name: str) -> None:
    with pytest.raises(CheckpointNotFound, match="is not a checkpoint's name"):
        resolve(new_root(), name)


def test_a_range_needs_no_memory_until_it_is_bounded() -> None:
    with pytest.raises(CorruptCheckpoint, match="unknown encoding or wrong size"):
        row_ids.decode("range", b"", 0, 2**40, 2**40)


class TestWriters:
    """Refuse to write any chunk that readers would refuse."""

    def test_states_that_are_too_deep(self) -> None:
        deep: list[Any] = []
        deep.append(deep)
        with pytest.raises(UnsupportedState, match="more than 100 deep, or contains itself"):
            encode_state(deep, "reader")
        with pytest.raises(UnsupportedState, match="40 dimensions"):
            encode_state({"x": torch.zeros([1] * 40)}, "reader")

    def test_an_index_that_is_too_large(self) -> None:
        with pytest.raises(InvalidPlan, match=r"index of rank-0, of 1 chunks.*chunk_bytes"):
            index_bytes(0, [StateEntry(name="x" * INDEX_BYTES, rank=None, tree={})], "rank-0")
        with pytest.raises(ValueError, match="not JSON compliant"):
            index_bytes(0, [StateEntry(name="x", rank=0, tree={"v": float("nan")})], "rank-0")

    def test_a_chunk_that_is_too_large(self) -> None:
        shard = make_shard(3, 4)
        rows = encode(shard, shard.gather(torch.arange(3)), Exact())
        with pytest.raises(InvalidPlan, match=r"a chunk of .*täble has .* make chunks smaller"):
            require_chunk_size(rows.entry, LARGEST_CHUNK + 1)
        state = StateEntry(name="model", rank=None, tree={"d": []})
        require_chunk_size(state, LARGEST_CHUNK + 1)

    def test_many_keys_of_which_one_is_there_twice(self) -> None:
        keys = [f'"{key}":0' for key in [*range(300_000), 299_999]]
        began = time.process_time()
        with pytest.raises(ValueError, match="the key '299999' appears twice"):
            parse_json(("{" + ",".join(keys) + "}").encode(), INDEX_BYTES)
        assert time.process_time() - began < 20  # a quadratic loop took hours

    def test_documents_over_the_limits_are_refused(self) -> None:
        assert parse_json(b'{"a": [1, 2.5, "x", null]}', 100) == {"a": [1, 2.5, "x", None]}
        with pytest.raises(ValueError, match="more than the 3 that are read"):
            require_limits(b"[[]]", 3)
