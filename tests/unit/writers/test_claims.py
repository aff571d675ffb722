"""Detect damaged control records or ignore harmless ones; never start fresh or delete; repair."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.examples import ALL
from tests.unit.chains import Part, new_root, write
from tests.unit.console import Console
from tests.unit.root.commits import ROWS, commit
from torchrec_checknrun.errors import CheckNRunError, ClaimDamaged, CorruptCheckpoint, RootInUse
from torchrec_checknrun.format import checks
from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.root.catalog import inventory
from torchrec_checknrun.root.chain import newest
from torchrec_checknrun.root.counting import counting_ids
from torchrec_checknrun.root.prune import prune
from torchrec_checknrun.root.retention import PINNED, Retention, pin
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.tools import takeover
from torchrec_checknrun.tools.control_records import find_damage
from torchrec_checknrun.tools.verify import verify
from torchrec_checknrun.writers import claims
from torchrec_checknrun.writers.claims import (
    FOLDER,
    Claim,
    Holder,
    _read_claims,
    latest_claim,
    read_claims,
)
from torchrec_checknrun.writers.lease import Lease

OTHER = Holder("another run", 0, "far", "another", 7, 7)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "_PAUSE", 0.0)


@pytest.fixture
def disk(tmp_path: Path) -> Folder:
    root = Folder(tmp_path / "run")
    root.create()
    (root / FOLDER).create()
    return root


def put(root: Folder, claim: Claim, data: bytes | None = None) -> str:
    (root / FOLDER).put(claim.name, claim.to_bytes() if data is None else data)
    return claim.name


def age(root: Folder, *names: str, seconds: float = 3600) -> None:
    """Make files of ``writers/`` old, by the store's times."""
    for name in names:
        before = time.time() - seconds
        os.utime(Path(root.url, FOLDER, name), (before, before))


@pytest.fixture
def taken_over(disk: Folder) -> tuple[Folder, list[Manifest]]:
    """Make a root that a second writer has taken over from the first.

    The second one restored the first one's checkpoint, committed its own, and has ended; in between
    the first one committed another checkpoint too late.
    """
    first = commit(disk, 1)
    put(disk, Claim(1, OTHER, earlier=(), released=True))
    late = commit(disk, 1)
    put(disk, Claim(2, OTHER, earlier=(first.id,), uses=(first.id,), released=True))
    own = commit(disk, 2)
    return disk, [first, late, own]


def outcome(root: Folder) -> object:
    """Run a restore, a new writer and a pruning."""
    chain, _ = newest(root)
    counting = tuple(counting_ids(root, latest_claim(root)))
    doomed = tuple(prune(root, Retention(1), dry_run=True).verdict.delete)
    return None if chain is None else chain.head.id, counting, doomed


@pytest.mark.parametrize("name", ["epoch-00000001.json", "epoch-00000002.json"])
def test_every_flipped_bit_is_found_or_harmless(
    taken_over: tuple[Folder, list[Manifest]], name: str
) -> None:
    root, made = taken_over
    expected = outcome(root)
    assert expected == (made[2].id, (made[2].id, made[0].id), (made[1].id, made[0].id))
    quick = new_root()
    for file in (root / FOLDER).names():
        (quick / FOLDER).put(file, (root / FOLDER).read(file))
    data = (root / FOLDER).read(name)
    for bit in range(0, 8 * len(data), 1 if ALL else 3):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        (quick / FOLDER).put(name, bytes(flipped))
        found = _read_claims(quick, every=True)
        assert name in found.damaged
        # The first claim decides nothing any more.
        assert found.undecided == ((name,) if "2" in name else ())
    put(root, Claim(int(name[6:14]), OTHER), bytes(flipped))
    if "2" in name:
        with pytest.raises(ClaimDamaged, match=r"epoch-00000002\.json.*checknrun repair"):
            outcome(root)
    else:
        assert outcome(root) == expected


@pytest.mark.parametrize("data", [b"", b"{", b"null", b'{"checksum":"","claim":{}}'])
def test_nothing_is_restored_saved_or_deleted(
    taken_over: tuple[Folder, list[Manifest]], data: bytes
) -> None:
    root, made = taken_over
    put(root, Claim(2, OTHER), data)
    age(root, "epoch-00000002.json")
    names = root.names()
    for act in (
        lambda: newest(root),
        lambda: prune(root, Retention(1)),
        lambda: prune(root, Retention(1), own=Claim(2, OTHER)),
        lambda: Lease(root).acquire(lambda before: counting_ids(root, before)),
        lambda: takeover.unlock(root),
        lambda: takeover.adopt(root, [made[1].id]),
    ):
        with pytest.raises(ClaimDamaged, match=r"epoch-00000002\.json.*checknrun repair"):
            act()
    assert root.names() == names
    assert (root / FOLDER).names() == ["epoch-00000001.json", "epoch-00000002.json"]
    (problem,) = (one for one in verify(root.url) if one.problems)
    assert problem.id == "writers/epoch-00000002.json"
    listed = inventory(root)
    statuses = {one.id: one.status for one in listed.checkpoints}
    assert [statuses[m.id] for m in made] == ["undecided", "undecided", "restorable"]
    assert "writers/epoch-00000002.json" in listed.problems[0]


def test_a_claim_that_is_gone_is_noticed(taken_over: tuple[Folder, list[Manifest]]) -> None:
    root, _ = taken_over
    (root / FOLDER).delete("epoch-00000002.json")
    for act in (
        lambda: newest(root),
        lambda: prune(root, Retention(1)),
        lambda: list(counting_ids(root, latest_claim(root))),
    ):
        with pytest.raises(ClaimDamaged, match="committed in epoch 2, but"):
            act()
    assert any("committed in epoch 2" in p for one in verify(root.url) for p in one.problems)
    takeover.repair(root)
    assert newest(root)[0] is not None
    assert all(not one.problems for one in verify(root.url))


def test_claims_of_links_directories_and_other_epochs(
    taken_over: tuple[Folder, list[Manifest]], tmp_path: Path
) -> None:
    root, _ = taken_over
    file = Path(root.url, FOLDER, "epoch-00000002.json")
    data = file.read_bytes()

    def link() -> None:
        (tmp_path / "elsewhere").write_bytes(data)
        file.symlink_to(tmp_path / "elsewhere")

    def other() -> None:
        file.write_bytes(Claim(3, OTHER, earlier=()).to_bytes())

    for make in (link, file.mkdir, other):
        file.unlink()
        make()
        with pytest.raises(ClaimDamaged, match="epoch-00000002"):
            newest(root)
        if file.is_dir():
            file.rmdir()
            file.touch()


def test_repair_tells_of_a_directory_that_stays(
    taken_over: tuple[Folder, list[Manifest]], console: Console
) -> None:
    root, (_, _, own) = taken_over
    file = Path(root.url, FOLDER, "epoch-00000002.json")
    file.unlink()
    file.mkdir()
    age(root, file.name)
    refused = console.run("repair", root, "--yes")
    assert refused.code == 2
    told = " ".join(refused.err.split())
    assert f"{FOLDER}/{file.name}" in told
    assert "Remove these by hand" in told
    chain, _ = newest(root)
    assert chain is not None
    assert chain.head.id == own.id
    file.rmdir()
    assert "nothing to repair" in console.run("repair", root, "--yes").out


def test_only_leftovers_are_a_fresh_start(disk: Folder) -> None:
    """Start fresh after a kill before the first commit, whatever the claim."""
    begun = commit(disk, 1)
    (disk / begun.id).delete("manifest.json")
    name = put(disk, Claim(1, OTHER))
    (disk / FOLDER).put(f".{name}.0123abcd", b'{"chec')
    assert newest(disk) == (None, [])
    for data in (b"", b'{"checksum"'):
        put(disk, Claim(1, OTHER), data)
        assert newest(disk) == (None, [])
        lease = Lease(disk)
        with pytest.raises(RootInUse, match="damaged and was written less than 60 s ago"):
            lease.acquire(lambda before: counting_ids(disk, before))
    age(disk, name, f".{name}.0123abcd")
    lease.acquire(lambda before: counting_ids(disk, before))
    assert lease.claim.epoch == 2
    lease.release()
    assert not [name for name in (disk / FOLDER).names() if not name.startswith("epoch")]


def test_checkpoints_that_do_not_count_are_no_fresh_start(disk: Folder, console: Console) -> None:
    put(disk, Claim(1, OTHER, earlier=(), released=True))
    put(disk, Claim(2, OTHER, earlier=(), released=True))
    late = commit(disk, 1)
    chain, problems = newest(disk)
    assert chain is None
    assert f"checknrun adopt {disk} {late.id}" in problems[0]
    found = console.run("verify", disk)
    assert found.code == 1
    assert "none of the 1 committed checkpoints counts" in found.out
    assert console.run("adopt", disk, late.id).code == 2  # no terminal to ask
    assert console.run("adopt", disk, late.id, "--yes").code == 0
    chain, problems = newest(disk)
    assert chain is not None
    assert (chain.head.id, problems) == (late.id, [])
    assert console.run("verify", disk).code == 0


def test_repair_lets_checkpoints_count_again(
    taken_over: tuple[Folder, list[Manifest]], console: Console
) -> None:
    """Let counting checkpoints count again; possibly late ones as well, unless excluded."""
    root, (first, late, own) = taken_over
    put(root, Claim(2, OTHER), b"junk")
    asked = console.run("repair", root)
    assert (asked.code, "--yes" in asked.err) == (2, True)
    assert f"{late.id}  counts, presumably" in asked.out
    assert "counts, presumably" not in next(x for x in asked.out.splitlines() if own.id in x)
    early = console.run("repair", root, "--yes")
    assert (early.code, "was written less than 60 s ago" in early.err) == (2, True)
    age(root, "epoch-00000002.json")
    done = console.run("repair", root, "--ignore", late.id, "--yes")
    assert done.code == 0, done.err
    assert f"a restore takes {own.id}" in done.out
    assert "epoch-00000002.json" not in (root / FOLDER).names()
    assert set(counting_ids(root, latest_claim(root))) == {first.id, own.id}
    assert console.run("verify", root).code == 0
    assert "nothing to repair" in console.run("repair", root).out
    lease = Lease(root)
    lease.acquire(lambda before: counting_ids(root, before))  # saving continues
    lease.check()
    lease.release()


def test_repair_without_any_claim_that_can_be_read(disk: Folder) -> None:
    made = [commit(disk, 3), commit(disk, 3)]
    name = put(disk, Claim(3, OTHER), b"")
    age(disk, name)
    damage = takeover.repair(disk)
    assert damage.undecided is not None
    assert set(counting_ids(disk, latest_claim(disk))) == {one.id for one in made}
    assert newest(disk)[1] == []


def test_a_live_writer_writes_its_damaged_claim_anew(disk: Folder) -> None:
    lease = Lease(disk, seconds=60)
    lease.acquire(lambda _: ())
    try:
        put(disk, lease.claim, b"junk")
        with pytest.raises(ClaimDamaged):
            latest_claim(disk)
        lease.check()
        assert latest_claim(disk) == lease.claim
        (disk / FOLDER).delete(lease.claim.name)
        lease.check()
        assert latest_claim(disk) == lease.claim
        put(disk, replace(lease.claim, holder=OTHER))
        with pytest.raises(RootInUse, match="taken over by process 7 on far"):
            lease.check()
    finally:
        lease.release()


def test_a_new_epoch_is_above_those_of_checkpoints(disk: Folder) -> None:
    """Continue a root whose claims were deleted, or with checkpoints copied from another root."""
    made = commit(disk, 7)
    lease = Lease(disk)
    lease.acquire(lambda before: counting_ids(disk, before), above=7)
    assert lease.claim.epoch == 8
    lease.release()
    assert outcome(disk) == (made.id, (made.id,), ())


def test_what_cannot_be_read_now_counts_later(disk: Folder) -> None:
    made = commit(disk, 1)
    manifest = (disk / made.id).read("manifest.json")
    (disk / made.id).put("manifest.json", manifest[:-9])
    put(disk, Claim(1, OTHER, earlier=(), released=True))
    lease = Lease(disk)
    lease.acquire(lambda before: counting_ids(disk, before))
    lease.release()
    (disk / made.id).put("manifest.json", manifest)
    chain, _ = newest(disk)
    assert chain is not None
    assert chain.head.id == made.id


@pytest.mark.parametrize("data", [b"", b"junk", checks.seal("pin", {"id": "another"})])
def test_a_damaged_pin_keeps_and_is_told(disk: Folder, data: bytes) -> None:
    made = [commit(disk, 1) for _ in range(3)]
    pin(disk, made[0].id)
    assert all(not one.problems for one in verify(disk.url))
    (disk / made[0].id).put(PINNED, data)
    (bad,) = (one for one in verify(disk.url) if one.problems)
    assert bad.id == made[0].id
    assert list(prune(disk, Retention(1)).verdict.delete) == [made[1].id]
    assert made[0].id in disk.names()
    takeover.repair(disk)
    assert find_damage(disk).pins == {}
    assert inventory(disk).checkpoints[-1].pinned


def test_a_pin_that_is_a_link_keeps(disk: Folder, tmp_path: Path) -> None:
    made = [commit(disk, 1) for _ in range(2)]
    Path(disk.url, made[0].id, PINNED).symlink_to(tmp_path)
    assert list(prune(disk, Retention(1)).verdict.delete) == []
    assert inventory(disk).checkpoints[-1].pinned


def test_what_a_pinned_checkpoint_needs_stays_while_its_manifest_is_damaged(disk: Folder) -> None:
    first = commit(disk, 0)
    child = write(disk, ROWS, [Part((0, 8), [1], 1)], first)
    for _ in range(2):
        commit(disk, 0)
    pin(disk, child.id)
    (disk / child.id).put("manifest.json", b"junk")
    with pytest.raises(CorruptCheckpoint, match=f"nothing is deleted.*{child.id} is pinned"):
        prune(disk, Retention(1))
    (disk / child.id).delete("manifest.json")
    with pytest.raises(CheckNRunError, match=f"nothing is deleted.*{child.id} is pinned"):
        prune(disk, Retention(1))
    assert {first.id, child.id} <= set(disk.names())


def test_records_in_memory() -> None:
    """Detect damage in a store without links and renames."""
    root = new_root()
    made = commit(root, 1)
    (root / FOLDER).put("epoch-00000002.json", b"junk")
    with pytest.raises(ClaimDamaged):
        newest(root)
    assert read_claims(root).counts(made.id, 1) is None
    assert read_claims(root).counts(made.id, 2)
