"""Compacted copies stand in for lost links: listing, restoring and pruning agree on it."""

from __future__ import annotations

import errno

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.examples import examples
from tests.unit.chains import new_root, put_manifest
from tests.unit.root.test_retention import compacted, make
from torchrec_checknrun.errors import CheckNRunError, StorageFailed
from torchrec_checknrun.format.manifest import (
    DIFFERENCES_VERSION,
    Manifest,
    TableDigests,
    TableTotals,
)
from torchrec_checknrun.format.names import checkpoint_id
from torchrec_checknrun.root.catalog import inventory
from torchrec_checknrun.root.chain import resolve
from torchrec_checknrun.root.prune import prune
from torchrec_checknrun.root.retention import Retention, judge
from torchrec_checknrun.store.folder import Folder

TABLE = "t"


def linked(manifest: Manifest, before: str | None, after: str) -> Manifest:
    """Store the table of a manifest as differences."""
    found = replace(
        manifest,
        tables={TABLE: TableTotals(1, 1)},
        deltas={TABLE: TableDigests(before, after)},
        format_version=DIFFERENCES_VERSION,
    )
    return found.sealed()


def word(number: int) -> str:
    return f"{number:016x}"


def links(kinds: str) -> list[Manifest]:
    """Make a history: ``F`` a base, ``l`` a link to the last checkpoint."""
    made: list[Manifest] = []
    for number, kind in enumerate(kinds, 1):
        last = made[-1] if made else None
        parent = last if kind == "l" else None
        before = None if parent is None else word(number - 1)
        made.append(linked(make(number, parent, last), before, word(number)))
    return made


def copy_of(head: Manifest, after: str | None = None, attempt: str = "f" * 8) -> Manifest:
    copy = compacted(head)
    id = checkpoint_id(head.sequence, head.step, attempt)
    return linked(replace(copy, id=id), None, after or head.deltas[TABLE].after)


def root_of(manifests: list[Manifest]) -> Folder:
    root = new_root()
    for manifest in manifests:
        (root / manifest.id).create()
        put_manifest(root, manifest)
    return root


def chains(root: Folder, ids: list[str]) -> dict[str, tuple[str, ...]]:
    """Return by id what a restore reads; nothing where it can't."""
    found: dict[str, tuple[str, ...]] = {}
    for id in ids:
        try:
            found[id] = tuple(manifest.id for manifest in resolve(root, id).manifests)
        except CheckNRunError:
            found[id] = ()
    return found


def test_a_listing_shows_the_copy_that_a_restore_reads() -> None:
    base, second, third = links("Fll")
    copy = copy_of(second)
    root = root_of([base, copy, third])
    listed = {one.id: one for one in inventory(root).checkpoints}
    assert listed[third.id].status == "restorable"
    assert listed[third.id].chain == (copy.id, third.id)
    other = root_of([base, copy_of(second, word(99)), third])
    (broken,) = (one for one in inventory(other).checkpoints if one.id == third.id)
    assert (broken.status, broken.chain) == ("broken", ())


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_a_copy_stands_in_for_a_link_that_can_not_be_read(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    base, second, third = links("Fll")
    copy = copy_of(second)
    root = root_of([base, second, copy, third])
    read = Folder.read

    def fail(folder: Folder, name: str, *part: int) -> bytes:
        if folder.name in unread:
            raise StorageFailed(number, "it can't be read")
        return read(folder, name, *part)

    monkeypatch.setattr(Folder, "read", fail)
    unread = {second.id}
    (listed,) = (one for one in inventory(root).checkpoints if one.id == third.id)
    assert listed.chain == (copy.id, third.id)
    assert chains(root, [third.id]) == {third.id: (copy.id, third.id)}
    unread.add(copy.id)
    with pytest.raises(StorageFailed, match="can't be read"):
        resolve(root, third.id)
    unread = {copy.id}
    assert chains(root, [third.id]) == {third.id: (base.id, second.id, third.id)}


def test_pruning_keeps_the_copy_that_a_kept_link_needs() -> None:
    base, second, third, fourth = links("Flll")
    copy = copy_of(second)
    root = root_of([base, copy, third, fourth])
    prune(root, Retention(1))
    assert chains(root, [fourth.id]) == {fourth.id: (copy.id, third.id, fourth.id)}
    verdict = judge([base, copy, third, fourth], Retention(1))
    assert set(verdict.delete) == {base.id}
    # The same where the original is there, but damaged.
    verdict = judge([base, second, copy, third, fourth], Retention(1), damaged=[second.id])
    assert copy.id in verdict.keep


def test_a_copy_stands_in_for_a_whole_link_without_a_baseline() -> None:
    _, second, third = links("Fll")
    copy = copy_of(second)
    root = root_of([second, copy, third])
    assert chains(root, [second.id, third.id]) == {second.id: (), third.id: (copy.id, third.id)}
    (listed,) = (one for one in inventory(root).checkpoints if one.id == third.id)
    assert (listed.status, listed.chain) == ("restorable", (copy.id, third.id))
    prune(root, Retention(1))
    assert chains(root, [third.id]) == {third.id: (copy.id, third.id)}


def test_all_take_the_same_of_two_copies() -> None:
    """A run and the program may both have compacted the same chain."""
    base, second, third, fourth = links("Flll")
    copies = [copy_of(second, attempt=attempt) for attempt in ("c0000000", "c1111111")]
    root = root_of([base, *copies, third, fourth])
    before = chains(root, [fourth.id])
    assert {one.id: one.chain for one in inventory(root).checkpoints}[fourth.id] == before[
        fourth.id
    ]
    prune(root, Retention(1))
    assert chains(root, [fourth.id]) == before


@settings(max_examples=examples(300, quick=20), deadline=None)
@given(
    kinds=st.text("Flll", min_size=1, max_size=8),
    copied=st.lists(st.integers(0, 7), max_size=8),
    wrong=st.sets(st.integers(0, 7), max_size=1),
    lost=st.sets(st.integers(0, 7)),
    keep=st.integers(1, 3),
)
def test_listing_restore_and_pruning_agree(
    kinds: str, copied: list[int], wrong: set[int], lost: set[int], keep: int
) -> None:
    made = links("F" + kinds)
    copies = [
        copy_of(made[n], word(99) if n in wrong else None, f"8{number:07x}")
        for number, n in enumerate(copied)
        if n < len(made)
    ]
    there = [m for n, m in enumerate(made) if n not in lost or n == len(made) - 1]
    there += copies
    root = root_of(there)
    ids = [manifest.id for manifest in there]
    readable = chains(root, ids)
    assert {one.id: one.chain for one in inventory(root).checkpoints} == readable
    before = {sequence_of(id) for id in ids if readable[id]}
    prune(root, Retention(keep))
    after = chains(root, ids)
    stay = {sequence_of(id) for id in ids if after[id]}
    assert sorted(stay)[-keep:] == sorted(before)[-keep:]
    # Deleting them one after the other leaves no link without what it needs.
    verdict = judge(there, Retention(keep))
    left = root_of(there)
    for id in verdict.delete:
        (left / id).delete("manifest.json")
        assert all(chains(left, list(verdict.keep)).values())


def sequence_of(id: str) -> int:
    return int(id[4:10])
