"""Take what storage shows wrongly for a moment for no damage: a run would abandon a checkpoint."""

from __future__ import annotations

import pytest

from tests.unit.chains import Part, apply_in_order, make_shards, restore, same_bits, write
from tests.unit.root.commits import ROWS, commit
from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.format.names import MANIFEST_NAME
from torchrec_checknrun.root.chain import newest
from torchrec_checknrun.root.checkpoints import committed
from torchrec_checknrun.root.prune import prune
from torchrec_checknrun.root.retention import Retention
from torchrec_checknrun.shards import Rectangle
from torchrec_checknrun.store.driver import DriverStore
from torchrec_checknrun.store.folder import Folder


@pytest.fixture(name="root")
def _root(memory_root: Folder) -> Folder:
    return memory_root


def chain_of_two(root: Folder) -> list[Manifest]:
    first = commit(root)
    return [first, write(root, ROWS, [Part((0, 8), [1, 5, 9], 8)], first)]


@pytest.fixture
def lagging(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Hide the files of some checkpoints from listings."""
    hidden = set[str]()
    sizes = DriverStore.sizes

    def show(self: DriverStore) -> dict[str, int]:
        return {} if self.path.rpartition("/")[2] in hidden else sizes(self)

    monkeypatch.setattr(DriverStore, "sizes", show)
    return hidden


def test_files_that_a_listing_lacks_are_there(root: Folder, lagging: set[str]) -> None:
    chain = chain_of_two(root)
    lagging.update(manifest.id for manifest in chain)
    found, problems = newest(root, resumes=True)
    assert problems == []
    assert found is not None
    assert list(found.manifests) == chain


def test_a_pruning_keeps_what_a_listing_lacks(root: Folder, lagging: set[str]) -> None:
    """And what it builds on."""
    _, head = chain = chain_of_two(root)
    commit(root)
    lagging.add(head.id)
    assert prune(root, Retention(2)).verdict.delete == {}
    (root / head.id).delete(MANIFEST_NAME)  # now it is gone, as its listing says
    prune(root, Retention(1))
    assert chain[0].id not in committed(root)


@pytest.mark.parametrize("name", [MANIFEST_NAME, "rank-00000.bin"])
@pytest.mark.parametrize("how", ["flipped", "cut"])
def test_bytes_that_were_damaged_on_their_way(
    root: Folder, monkeypatch: pytest.MonkeyPatch, name: str, how: str
) -> None:
    """Every first read of a part of a file is wrong."""
    head = chain_of_two(root)[1]
    wanted, found = (make_shards(ROWS, [Rectangle(0, ROWS, 0, 8)]) for _ in range(2))
    apply_in_order(root, head.id, wanted)
    seen = set[tuple[str, int]]()
    read = DriverStore.read

    def spoil(self: DriverStore, file: str, offset: int, length: int | None) -> bytes:
        data = read(self, file, offset, length)
        if file != name or (place := (f"{self.path}/{file}", offset)) in seen:
            return data
        seen.add(place)
        half = len(data) // 2
        return data[:half] + (bytes([data[half] ^ 4]) + data[half + 1 :]) * (how == "flipped")

    monkeypatch.setattr(DriverStore, "read", spoil)
    chain, problems = newest(root, resumes=True)
    assert (chain and chain.head, problems) == (head, [])
    restore(root, head.id, found)
    assert same_bits(found[0].weight, wanted[0].weight)
    assert seen
