"""Number checkpoints under users' own names by their manifests.

A damaged one comes last, and is reported.
"""

import errno
import json

import pytest

from tests.unit.small_roots import FILE, ids, put
from torchrec_checknrun.errors import CorruptCheckpoint, StorageFailed, StorageUnreachable
from torchrec_checknrun.format.names import MANIFEST_NAME
from torchrec_checknrun.root.catalog import inventory
from torchrec_checknrun.root.chain import newest, resolve
from torchrec_checknrun.root.checkpoints import committed
from torchrec_checknrun.root.counting import counting
from torchrec_checknrun.root.prune import prune
from torchrec_checknrun.root.retention import Retention
from torchrec_checknrun.store.folder import Folder


@pytest.mark.parametrize("content", [b"", b"{}", None], ids=["empty", "other", "flipped"])
def test_it_is_told_of(
    root: Folder, caplog: pytest.LogCaptureFixture, content: bytes | None
) -> None:
    first = put(root, 1)
    final = put(root, 2, first, name="final")
    flipped = final.to_bytes().replace(b'"step":20', b'"step":21')
    assert flipped != final.to_bytes()
    (root / "final").put(MANIFEST_NAME, flipped if content is None else content)
    assert committed(root) == [first.id, "final"]
    chain, problems = newest(root)
    assert ids(chain) == [first.id]
    assert [problem.split(":")[0] for problem in problems] == ["final"]
    assert newest(root, {"final"})[1] == []
    assert list(counting(root, None)) == [first]
    assert f"final/{MANIFEST_NAME}" in caplog.text
    assert {one.id: one.status for one in inventory(root).checkpoints} == {
        first.id: "restorable",
        "final": "broken",
    }
    before = sorted((root / "final").names())
    done = prune(root, Retention(1))
    assert (dict(done.verdict.delete), done.leftovers) == ({}, ())
    assert sorted((root / "final").names()) == before


def test_of_a_later_release(root: Folder) -> None:
    document = json.loads(put(root, 2, name="final").to_bytes())
    document["manifest"]["format_version"] = 99
    (root / "final").put(MANIFEST_NAME, json.dumps(document).encode())
    chain, problems = newest(root)
    assert chain is None
    assert "upgrade torchrec_checknrun" in problems[0]


def test_a_copy_has_its_number(root: Folder) -> None:
    first, second = put(root, 1), put(root, 2)
    (root / "best").create()
    for file in (FILE.name, MANIFEST_NAME):
        (root / "best").put(file, (root / first.id).read(file))
    assert committed(root) == [second.id, first.id, "best"]
    assert newest(root)[1] == []
    with pytest.raises(CorruptCheckpoint, match="moved or copied"):
        resolve(root, "best")


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (StorageUnreachable(errno.ETIMEDOUT, "no answer"), StorageUnreachable),
        (StorageFailed(errno.EIO, "a bad sector"), StorageFailed),
    ],
)
def test_storage_that_fails_is_no_damage(
    root: Folder, monkeypatch: pytest.MonkeyPatch, error: OSError, raised: type[OSError]
) -> None:
    put(root, 1)
    put(root, 2, name="final")
    read = Folder.read

    def fail(self: Folder, name: str, *part: int) -> bytes:
        if self.name == "final":
            raise error
        return read(self, name, *part)

    monkeypatch.setattr(Folder, "read", fail)
    with pytest.raises(raised) as caught:
        newest(root)
    assert caught.value is error


def test_a_directory_of_somebody_else(root: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Report a directory such as lost+found, which only its owner may read."""
    first = put(root, 1)
    (root / "lost+found").create()
    (root / "lost+found").put("x", b"")
    read = Folder.read

    def refuse(self: Folder, name: str, *part: int) -> bytes:
        if self.name == "lost+found":
            raise StorageFailed(errno.EACCES, "permission was refused")
        return read(self, name, *part)

    monkeypatch.setattr(Folder, "read", refuse)
    chain, problems = newest(root)
    assert (ids(chain), problems) == ([first.id], [])
