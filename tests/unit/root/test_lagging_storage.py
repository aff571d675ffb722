"""Take what storage shows wrongly for a moment for no damage: a run would abandon a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.unit.chains import Part, apply_in_order, make_shards, restore, same_bits, write
from tests.unit.root.commits import ROWS, commit
from tests.unit.root.writers import ELSEWHERE, become
from torchrec_checknrun import Consecutive
from torchrec_checknrun.errors import RootInUse, SaveFailed
from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.format.names import MANIFEST_NAME, PRIORITY_SAVES
from torchrec_checknrun.root.chain import Chain, newest
from torchrec_checknrun.root.checkpoints import committed
from torchrec_checknrun.root.deletion import delete_checkpoint, delete_priority_saves
from torchrec_checknrun.root.lineage import Lineage
from torchrec_checknrun.root.prune import prune
from torchrec_checknrun.root.retention import Retention
from torchrec_checknrun.root.writer import RootWriter
from torchrec_checknrun.shards import Rectangle
from torchrec_checknrun.store.driver import DriverStore
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.writers.lease import Lease
from torchrec_checknrun.writers.liveness import require_no_newer


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


@contextmanager
def unlisted(*hidden: str) -> Iterator[None]:
    """Leave names out of listings, as of an earlier moment."""
    names = DriverStore.list

    def earlier(self: DriverStore) -> list[str]:
        return [name for name in names(self) if name not in hidden]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DriverStore, "list", earlier)
        yield


def test_a_replaced_writer_commits_nothing_though_no_listing_has_the_other_s_claim(
    root: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tell the run: the checkpoint would not count."""
    replaced = Lease(root)
    replaced.acquire(lambda _: [])
    become(monkeypatch, **ELSEWHERE)
    other = Lease(root)
    other.acquire(lambda _: [], force=True)
    with unlisted(other.claim.name):
        with pytest.raises(RootInUse, match="taken over by process 7 on far"):
            replaced.check()
        with pytest.raises(RootInUse, match="was claimed meanwhile"):
            require_no_newer(root, replaced.claim.epoch)
    other.check()
    for lease in (replaced, other):
        lease.release()


def test_a_commit_upon_a_checkpoint_that_a_listing_lacks(root: Folder) -> None:
    """Find nevertheless that one is gone."""
    chain = chain_of_two(root)
    chain.append(write(root, ROWS, [Part((0, 8), [2], 8)], chain[-1]))
    lineage = Lineage()
    lineage.restored(Chain(tuple(chain)), converted=False, forks=False)
    writer = RootWriter(root, lineage, None)
    writer.claim()
    proposal = writer.propose(Consecutive(), None, {}, 40)
    assert proposal.header.parent == chain[-1].link
    with unlisted(chain[1].id):
        writer.before_commit(proposal)
        delete_checkpoint(root / chain[1].id)
        with pytest.raises(SaveFailed, match=f"{chain[1].id}, .* was deleted"):
            writer.before_commit(proposal)
    writer.close()


def test_priority_saves_of_a_checkpoint_that_a_listing_lacks_stay(root: Folder) -> None:
    gone, last = commit(root), commit(root)
    saves = [f"{manifest.id}.run.step-00000003" for manifest in (gone, last)]
    for name in saves:
        (root / PRIORITY_SAVES / name).create()
        (root / PRIORITY_SAVES / name).put("rank-00000.bin", b"rows")
    delete_checkpoint(root / gone.id)
    with unlisted(last.id):
        assert delete_priority_saves(root) == saves[:1]
    assert (root / PRIORITY_SAVES).names() == saves[1:]
