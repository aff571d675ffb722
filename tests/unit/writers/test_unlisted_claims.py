"""Let the previous claim decide until a writer has listed the counting checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.unit.chains import Part, write
from tests.unit.root.writers import ELSEWHERE, become, nothing
from torchrec_checknrun.errors import StorageFailed
from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.root.chain import newest
from torchrec_checknrun.root.counting import counting
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.writers.lease import FOLDER, Claim, Holder, Lease, latest_claim


def upon(root: Folder, parent: Manifest, epoch: int) -> Manifest:
    return write(root, 20, [Part((0, 8), list(range(20)), 20)], parent, epoch=epoch)


def lease_earlier(root: Folder, epoch: int) -> tuple[str, ...]:
    fields = json.loads((root / FOLDER).read(f"epoch-{epoch:08d}.json"))["claim"]
    assert "before" not in fields
    return tuple(fields["earlier"])


class TestWithoutAList:
    """Kill a writer, or fail its storage, between claiming an epoch and listing.

    The first writer has committed a checkpoint in time, and another after the second writer's.
    """

    @pytest.fixture
    def made(self, root: Folder, monkeypatch: pytest.MonkeyPatch) -> list[Manifest]:
        """Return three checkpoints: in time, late, and of the second writer, which has given up."""
        root.create()
        old, new = Lease(root), Lease(root)
        with monkeypatch.context() as patch:
            become(patch, **ELSEWHERE)
            old.acquire(nothing)
            old.release()
        in_time = write(root, 20, [Part((0, 8), list(range(20)), 20)], epoch=1)
        new.acquire(self.listed(root))
        after = upon(root, in_time, epoch=2)
        late = upon(root, after, epoch=1)
        new.release()
        return [in_time, late, after]

    @staticmethod
    def listed(root: Folder) -> Callable[[Claim | None], list[str]]:
        return lambda before: [manifest.id for manifest in counting(root, before)]

    @staticmethod
    def fail(_: Claim | None) -> list[str]:
        raise StorageFailed(5, "a moment's trouble")

    @staticmethod
    def counted(root: Folder) -> list[str]:
        return [manifest.id for manifest in counting(root, latest_claim(root))]

    def test_the_claim_before_goes_on_deciding(
        self,
        root: Folder,
        made: list[Manifest],
        leases: list[Lease],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        in_time, _, after = made
        expected = [after.id, in_time.id]
        assert self.counted(root) == expected
        for pid in range(3):  # three writers, one after the other, each of which dies at that point
            with monkeypatch.context() as patch:
                become(patch, **{**ELSEWHERE, "pid": pid})
                patch.setattr(Holder, "gone", True)
                with pytest.raises(StorageFailed):
                    Lease(root).acquire(self.fail)
            claim = latest_claim(root)
            assert claim is not None
            assert (claim.epoch, claim.earlier) == (3 + pid, None)
            assert self.counted(root) == expected
            chain, _ = newest(root)
            assert chain is not None
            assert chain.head.id == expected[0]
        lease = Lease(root)
        leases.append(lease)
        monkeypatch.setattr(Holder, "gone", True)
        lease.acquire(self.listed(root))
        assert list(lease.claim.earlier or ()) == expected
        lease.release()
        again = Lease(root)
        leases.append(again)
        again.acquire(self.listed(root))
        assert again.claim.earlier == lease_earlier(root, 6)
        assert (root / FOLDER).names() == ["epoch-00000006.json", "epoch-00000007.json"]

    def test_the_same_process_lists_when_it_tries_again(
        self, root: Folder, made: list[Manifest], leases: list[Lease]
    ) -> None:
        in_time, late, after = made
        first, second = Lease(root), Lease(root)
        leases += [first, second]
        with pytest.raises(StorageFailed):
            first.acquire(self.fail)
        second.acquire(self.listed(root))
        assert second.claim.epoch == 3
        assert set(second.claim.earlier or ()) == {in_time.id, after.id}
        assert latest_claim(root) == second.claim
        upon(root, late, epoch=2)  # late as well
        assert set(self.counted(root)) == {in_time.id, after.id}
