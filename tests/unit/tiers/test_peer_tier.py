"""A peer keeps copies of a rank's files whole or not at all, and damage is found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.chains import DIM, Part, write
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.tiers.peer_tier import NotHeld, PeerTier

ROWS, FILE = 30, "rank-00000.bin"
Copies = list[tuple[str, bytes]]


@pytest.fixture
def copies(tmp_path: Path) -> Copies:
    """A full checkpoint and a differential one upon it: their ids, and one rank's files."""
    root = Folder(tmp_path / "written")
    root.create()
    full = write(root, ROWS, [Part((0, DIM), list(range(ROWS)), 8)])
    few = write(root, ROWS, [Part((0, DIM), [3, 7], 8)], parent=full)
    return [(m.id, (root / m.id).read(FILE)) for m in (full, few)]


@pytest.fixture
def tier(tmp_path: Path) -> PeerTier:
    return PeerTier(tmp_path / "held", FILE)


def keep(tier: PeerTier, id: str, content: bytes) -> None:
    copy, half = tier.receive(id), len(content) // 2
    copy.write(content[:half])
    copy.write(memoryview(content)[half:])
    copy.keep()


def test_what_is_kept_is_found(tier: PeerTier, copies: Copies, tmp_path: Path) -> None:
    assert tier.sizes() == {}
    for id, content in copies:
        keep(tier, id, content)
        again = PeerTier(tmp_path / "held", FILE)  # as a new process does
        assert again.sizes()[id] == again.verify(id) == len(content)
        assert again.read(id, 0, len(content)) == content
        assert again.read(id, 5, 7) == content[5:12]
    assert tier.sizes().keys() == {id for id, _ in copies}
    tier.keep_only([copies[1][0]])
    assert tier.sizes().keys() == {copies[1][0]}


def test_what_is_not_there_is_told(tier: PeerTier, copies: Copies) -> None:
    keep(tier, *copies[0])
    with pytest.raises(NotHeld):
        tier.verify(copies[1][0])
    assert tier.read(copies[1][0], 0, 9) == bytes(9)


def test_a_copy_that_ends_midway_leaves_the_one_before(tier: PeerTier, copies: Copies) -> None:
    (first, content), (second, other) = copies
    keep(tier, first, content)
    copy = tier.receive(second)
    copy.write(other[:50])
    for end in (lambda: None, copy.drop):  # a kill, then an error
        end()
        assert tier.sizes() == {first: len(content)}
        with pytest.raises(NotHeld):
            tier.verify(second)
    assert tier.read(first, 0, len(content)) == content


@pytest.mark.parametrize("damage", [lambda c: c[:-30], lambda c: c[:10], lambda c: c + b"more"])
def test_a_copy_that_was_cut_off_is_found(
    tier: PeerTier, copies: Copies, damage: Callable[[bytes], bytes]
) -> None:
    id, content = copies[0]
    keep(tier, id, damage(content))
    with pytest.raises(NotHeld):
        tier.verify(id)


def test_damage_is_found(tier: PeerTier, copies: Copies) -> None:
    id, content = copies[1]
    for at in range(0, len(content), 3):
        changed = bytearray(content)
        changed[at] ^= 0x40
        keep(tier, id, bytes(changed))
        with pytest.raises(NotHeld):
            tier.verify(id)
