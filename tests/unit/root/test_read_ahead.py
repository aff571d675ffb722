"""A chain's manifests and indexes are read several at once: a store takes its time for each."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.root.test_long_chains import put_chain
from tests.unit.small_roots import FILE, begin, ids, put, remove
from torchrec_checknrun.errors import ChainBroken, StorageFailed, StorageUnreachable
from torchrec_checknrun.format import reader
from torchrec_checknrun.format.manifest import Manifest, RankFile
from torchrec_checknrun.format.names import MANIFEST_NAME
from torchrec_checknrun.format.reader import read_chain
from torchrec_checknrun.root import chain as chains
from torchrec_checknrun.root.catalog import inventory
from torchrec_checknrun.root.chain import newest, resolve
from torchrec_checknrun.root.checkpoints import read_sound
from torchrec_checknrun.store.folder import Folder

LENGTH = 12
Damage = Callable[[Folder, str], None]


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[int]]:
    """Return the ids of what is read ahead, and how many reads were in progress at each."""
    names: list[str] = []
    together: list[int] = []
    lock, at_work = threading.Lock(), 0

    def watched(root: Folder, name: str) -> Manifest | None:
        nonlocal at_work
        with lock:
            at_work += 1
            names.append(name)
            together.append(at_work)
        time.sleep(0.02)
        found = read_sound(root, name)
        with lock:
            at_work -= 1
        return found

    monkeypatch.setattr(chains, "read_sound", watched)
    return names, together


def test_a_long_chain_is_read_several_at_once(
    memory_root: Folder, ahead: tuple[list[str], list[int]]
) -> None:
    made = put_chain(memory_root, LENGTH)
    chain, problems = newest(memory_root)
    assert (ids(chain), problems) == ([each.id for each in made], [])
    names, together = ahead
    assert sorted(names) == [each.id for each in made[:-2]]  # each once
    assert max(together) > 2


def test_a_chain_of_two_is_read_alone(
    memory_root: Folder, ahead: tuple[list[str], list[int]]
) -> None:
    made = put_chain(memory_root, LENGTH)
    last = put(memory_root, LENGTH + 1, made[0])
    assert ids(resolve(memory_root, last.id)) == [made[0].id, last.id]
    assert ahead == ([], [])


def test_what_is_known_is_not_read(memory_root: Folder, ahead: tuple[list[str], list[int]]) -> None:
    made = put_chain(memory_root, LENGTH)
    known = {each.id: each for each in made[3:8]}
    assert ids(resolve(memory_root, made[-1].id, known)) == [each.id for each in made]
    assert not known.keys() & ({each.id for each in made[3:8]} & set(ahead[0]))


def _garbage(root: Folder, id: str) -> None:
    (root / id).put(MANIFEST_NAME, b"{}")


def _short(root: Folder, id: str) -> None:
    (root / id).put(FILE.name, b"0123")


def _gone(root: Folder, id: str) -> None:
    remove(root / id)


def _uncommitted(root: Folder, id: str) -> None:
    remove(root / id, MANIFEST_NAME)


def _other(root: Folder, id: str) -> None:
    """Let another run's checkpoint stand there."""
    put(root, int(id[4:10]), step=7, name=id)


@pytest.mark.parametrize("damage", [_garbage, _short, _gone, _uncommitted, _other])
@pytest.mark.parametrize("number", range(LENGTH))
def test_what_is_wrong_is_told_as_of_one_by_one(
    memory_root: Folder, monkeypatch: pytest.MonkeyPatch, damage: Damage, number: int
) -> None:
    made = put_chain(memory_root, LENGTH)
    damage(memory_root, made[number].id)

    def told() -> list[Any]:
        found: list[Any] = [newest(memory_root)]
        for each in made[number + 1 :]:
            with pytest.raises(ChainBroken) as caught:
                resolve(memory_root, each.id)
            found.append(str(caught.value))
        return found

    several = told()
    monkeypatch.setattr(chains, "_MOST_AHEAD", 1)
    assert several == told()


@pytest.mark.parametrize("damage", [_garbage, _short, _uncommitted])
def test_damage_beside_the_chain_is_no_matter(memory_root: Folder, damage: Damage) -> None:
    made: list[Manifest] = []
    for sequence in range(1, 2 * LENGTH, 2):
        made.append(put(memory_root, sequence, made[-1] if made else None))
        beside = put(memory_root, sequence + 1, made[0])
        damage(memory_root, beside.id)
    begin(memory_root, 2 * LENGTH + 1)
    chain = resolve(memory_root, made[-1].id)
    assert ids(chain) == [each.id for each in made]


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (StorageUnreachable(errno.ETIMEDOUT, "no answer"), StorageUnreachable),
        (StorageFailed(errno.EIO, "a bad sector"), StorageFailed),
    ],
)
def test_a_storage_that_fails(
    memory_root: Folder, monkeypatch: pytest.MonkeyPatch, error: OSError, raised: type[OSError]
) -> None:
    made = put_chain(memory_root, LENGTH)
    read = Folder.read

    def failing(self: Folder, *arguments: Any) -> bytes:
        if self.name == made[2].id:
            raise error
        return read(self, *arguments)

    monkeypatch.setattr(Folder, "read", failing)
    with pytest.raises(raised):
        resolve(memory_root, made[-1].id)
    assert ids(resolve(memory_root, made[1].id)) == [each.id for each in made[:2]]


def test_a_root_that_hides_its_names(memory_root: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore by id where a store's policy lets nobody list the bucket."""
    made = put_chain(memory_root, LENGTH)

    def hidden(self: Folder) -> list[str]:
        raise StorageFailed(errno.EACCES, "no listing")

    monkeypatch.setattr(Folder, "names", hidden)
    assert ids(resolve(memory_root, made[-1].id)) == [each.id for each in made]


def test_a_catalog_reads_several_at_once(
    memory_root: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = put_chain(memory_root, LENGTH)
    together = threading.Barrier(2, timeout=20)  # broken, if one comes alone
    sizes = Folder.sizes

    def met(self: Folder, *arguments: Any) -> dict[str, int]:
        together.wait()
        return sizes(self, *arguments)

    monkeypatch.setattr(Folder, "sizes", met)
    assert [one.id for one in inventory(memory_root).checkpoints] == [m.id for m in made[::-1]]


def test_the_indexes_of_a_chain_are_read_at_once(
    memory_root: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = put_chain(memory_root, LENGTH)
    asked: list[list[str]] = []

    def empty(
        root: Folder, files: list[tuple[str, RankFile]], *_: float
    ) -> dict[tuple[str, str], bytearray]:
        asked.append([id for id, _ in files])
        return {(id, file.name): bytearray() for id, file in files}

    monkeypatch.setattr(reader, "read_index_bytes", empty)
    monkeypatch.setattr(reader, "parse_index", lambda *_: [])
    assert read_chain(memory_root, made) == [()] * LENGTH
    assert [each for each in asked if each] == [[manifest.id for manifest in made]]
