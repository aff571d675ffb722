"""Check that damaged claims and manifests of a root never show, and that publishing goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.serve.served import (
    Job,
    Net,
    differences,
    newest,
    quantized,
    restored,
    served,
)
from torchrec_checknrun import Follower, Publish
from torchrec_checknrun.errors import ClaimDamaged, SaveFailed
from torchrec_checknrun.format.names import MANIFEST_NAME

pytestmark = pytest.mark.usefixtures("one_rank")


def test_a_damaged_claim_changes_nothing(tmp_path: Path) -> None:
    root = tmp_path / "run"
    job = Job(root)
    job.train(1)
    job.save()
    follower = Follower(root, quantized(Net(), 8))
    served(follower)
    wanted = quantized(restored(root), 8)
    job.train(2)
    job.save()
    claim = max((root / "writers").iterdir())
    content = claim.read_bytes()
    claim.write_bytes(content[:-9])
    version = served(follower)
    assert version.step == 1
    assert version.error is not None
    assert "checknrun repair" in version.error
    assert differences(follower, wanted) == []
    with pytest.raises(ClaimDamaged):
        Follower(root, quantized(Net(), 8)).poll()
    claim.write_bytes(content)
    version = served(follower)
    assert (version.step, version.error) == (2, None)
    assert differences(follower, quantized(restored(root), 8)) == []
    job.saver.close()


@pytest.mark.parametrize("damage", ["emptied", "swapped", "a directory"])
def test_publications_leave_a_damaged_manifest(tmp_path: Path, damage: str) -> None:
    """Nothing is built on a publication that no follower can read: a base comes next."""
    root = tmp_path / "serve"
    job = Job(tmp_path / "run", publish=Publish(root, every_seconds=1e6, bits=32))
    for seed in range(2):
        job.train(seed)
        assert job.saver.publish() is not None
    follower = Follower(root, Net())
    assert served(follower).step == 2
    manifest = newest(root) / MANIFEST_NAME
    other = min(root.glob("seq-*")) / MANIFEST_NAME
    manifest.unlink()
    if damage == "a directory":
        manifest.mkdir()
    else:
        manifest.write_bytes(b"" if damage == "emptied" else other.read_bytes())
    job.train(3)
    assert job.saver.publish() is None
    assert served(follower).step == 2
    report = job.saver.publish()
    assert report is not None
    assert report.kind == "full"
    version = served(follower)
    assert (version.step, version.error) == (3, None)
    job.saver.close()


def test_checkpoints_leave_a_damaged_manifest(tmp_path: Path) -> None:
    root = tmp_path / "run"
    job = Job(root)
    for seed in range(2):
        job.train(seed)
        job.save()
    manifest = newest(root) / MANIFEST_NAME
    manifest.write_bytes(manifest.read_bytes()[:-5])
    job.train(3)
    with pytest.raises(SaveFailed, match="damaged"):
        job.save()
    job.save()
    follower = Follower(root, Net())
    assert (served(follower).step, served(follower).whole) == (3, True)
    job.saver.close()
