"""Every tier keeps a rank's parts alike: whole or not at all, the newest first, damage is found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import pytest

from tests.unit.chains import DIM, Part, write
from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.format.names import MANIFEST_NAME
from torchrec_checknrun.memory.step_states import StepStates
from torchrec_checknrun.native import has_extension
from torchrec_checknrun.shared_memory import file as files
from torchrec_checknrun.shared_memory.areas import Areas, Layout
from torchrec_checknrun.shared_memory.header import HEAD_BYTES, Word
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.tiers.image_tier import ImageTier
from torchrec_checknrun.tiers.peer_tier import PeerTier
from torchrec_checknrun.tiers.storage_tier import StorageTier
from torchrec_checknrun.tiers.tier import NotHeld, Piece, Tier, Version

ROWS, FILE = 30, "rank-00000.bin"


class Place(Protocol):
    """A tier's memory, which outlives the process."""

    def opened(self) -> Tier:
        """Open the tier as a new process does."""

    def count(self, manifest: Manifest) -> None:
        """Make a part count that was put."""

    def damage(self, version: Version) -> None:
        """Change a byte of a part."""


class InAnImage:
    def __init__(self, folder: Path) -> None:
        self._path = folder / "image"
        areas = Areas.create(self._path, Layout("run", "shards", "x", {}))
        areas.publish("x")
        areas.words.publish(Word.READY, 1)
        areas.close()
        self._areas: Areas | None = None

    def opened(self) -> Tier:
        files._mapped.clear()
        if self._areas is not None:
            self._areas.publish("x")
            self._areas.close()
        self._areas = Areas.open(self._path, "run", "shards")
        return ImageTier(StepStates(self._areas))

    def count(self, manifest: Manifest) -> None:
        pass

    def damage(self, version: Version) -> None:
        assert self._areas is not None
        for name in ("state-0", "state-1"):
            area = self._areas.get(name)
            if int.from_bytes(bytes(area[:8].tolist()), "little") == version.step:
                area[HEAD_BYTES + 7] ^= 1


class InAPeer:
    def __init__(self, folder: Path) -> None:
        self._folder = folder / "held"

    def opened(self) -> Tier:
        return PeerTier(self._folder, FILE)

    def count(self, manifest: Manifest) -> None:
        pass

    def damage(self, version: Version) -> None:
        _change(self._folder / version.id / FILE)


class InTheStorage:
    def __init__(self, folder: Path) -> None:
        self._folder = folder / "root"
        self._folder.mkdir()

    def opened(self) -> Tier:
        return StorageTier(Folder(self._folder), FILE)

    def count(self, manifest: Manifest) -> None:
        (Folder(self._folder) / manifest.id).put(MANIFEST_NAME, manifest.to_bytes())

    def damage(self, version: Version) -> None:
        _change(self._folder / version.id / FILE)


def _change(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[7] ^= 1
    path.write_bytes(content)


@pytest.fixture(
    params=[
        pytest.param(
            InAnImage,
            marks=pytest.mark.skipif(not has_extension(), reason="the extension was not built"),
        ),
        InAPeer,
        InTheStorage,
    ]
)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    made: Place = request.param(tmp_path)
    return made


@pytest.fixture
def parts(tmp_path: Path) -> list[tuple[Manifest, Version, bytes]]:
    """A full checkpoint and a differential one upon it: one rank's files."""
    root = Folder(tmp_path / "written")
    root.create()
    full = write(root, ROWS, [Part((0, DIM), list(range(ROWS)), 8)])
    few = write(root, ROWS, [Part((0, DIM), [3, 7], 8)], parent=full)
    return [(m, Version(m.step, m.id), (root / m.id).read(FILE)) for m in (full, few)]


def in_pieces(content: bytes) -> Iterator[Piece]:
    half = len(content) // 2
    yield content[:half]
    yield memoryview(content)[half:]


def test_what_is_put_is_found(place: Place, parts: list[tuple[Manifest, Version, bytes]]) -> None:
    assert place.opened().newest() is None
    for manifest, version, content in parts:
        tier = place.opened()
        tier.put(version, in_pieces(content))
        place.count(manifest)
        for found in (tier, place.opened()):
            newest = found.newest()
            assert newest is not None
            assert newest.step == version.step
            assert newest.id in (version.id, "")
            assert b"".join(found.get(version)) == content
    assert b"".join(place.opened().get(parts[0][1])) == parts[0][2]  # the one before is there, too


def test_what_is_not_there_is_told(
    place: Place, parts: list[tuple[Manifest, Version, bytes]]
) -> None:
    (manifest, first, content), (_, second, _) = parts
    with pytest.raises(NotHeld):
        list(place.opened().get(first))
    place.opened().put(first, in_pieces(content))
    place.count(manifest)
    with pytest.raises(NotHeld):
        list(place.opened().get(second))


def test_a_part_that_ends_midway_leaves_the_one_before(
    place: Place, parts: list[tuple[Manifest, Version, bytes]]
) -> None:
    (manifest, first, content), (_, second, other) = parts
    tier = place.opened()
    tier.put(first, in_pieces(content))
    place.count(manifest)

    def broken() -> Iterator[Piece]:
        yield other[:50]
        raise OSError("says the test")

    with pytest.raises(OSError, match="says the test"):
        tier.put(second, broken())
    for found in (tier, place.opened()):
        newest = found.newest()
        assert newest is not None
        assert newest.step == first.step
        assert b"".join(found.get(first)) == content
        with pytest.raises(NotHeld):
            list(found.get(second))


def test_damage_is_found(place: Place, parts: list[tuple[Manifest, Version, bytes]]) -> None:
    for manifest, version, content in parts:
        place.opened().put(version, in_pieces(content))
        place.count(manifest)
    place.opened()
    place.damage(parts[1][1])
    with pytest.raises(NotHeld):
        list(place.opened().get(parts[1][1]))
    assert b"".join(place.opened().get(parts[0][1])) == parts[0][2]


@pytest.mark.parametrize("damage", [lambda c: c[:-30], lambda c: c[:10], lambda c: c + b"more"])
def test_a_copy_that_was_cut_off_is_found(
    tmp_path: Path,
    parts: list[tuple[Manifest, Version, bytes]],
    damage: Callable[[bytes], bytes],
) -> None:
    _, version, content = parts[0]
    tier = PeerTier(tmp_path / "held", FILE)
    tier.put(version, [damage(content)])
    with pytest.raises(NotHeld):
        list(tier.get(version))


def test_every_changed_byte_of_a_copy_is_found(
    tmp_path: Path, parts: list[tuple[Manifest, Version, bytes]]
) -> None:
    _, version, content = parts[1]
    tier = PeerTier(tmp_path / "held", FILE)
    for at in range(0, len(content), 3):
        changed = bytearray(content)
        changed[at] ^= 0x40
        tier.put(version, [bytes(changed)])
        with pytest.raises(NotHeld):
            list(tier.get(version))
