"""Keep what is needed by checkpoints that a user has made count, and by a live run's next one."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.unit.chains import new_root, put_manifest
from tests.unit.root.test_retention import compacted, make
from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.root.catalog import inventory
from torchrec_checknrun.root.chain import newest, resolve
from torchrec_checknrun.root.checkpoints import committed
from torchrec_checknrun.root.prune import prune
from torchrec_checknrun.root.retention import Retention, abandoned_ids, judge
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.tools import takeover
from torchrec_checknrun.writers.lease import Lease


def put(root: Folder, manifest: Manifest, epoch: int) -> Manifest:
    made = replace(manifest, epoch=epoch).sealed()
    (root / made.id).create()
    put_manifest(root, made)
    return made


@pytest.fixture
def run() -> tuple[Folder, list[Manifest]]:
    """Let a writer commit twice more after another one has taken its root over."""
    root = new_root()
    first = Lease(root)
    first.acquire(lambda _: ())
    first.release()
    base = put(root, make(1), 1)
    second = Lease(root)
    second.acquire(lambda _: [base.id])
    second.release()
    others = [put(root, make(number), 2) for number in (2, 3)]
    late = put(root, make(4, base, base), 1)
    last = put(root, make(5, late, late), 1)
    return root, [base, *others, late, last]


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_an_adopted_checkpoint_keeps_what_it_needs(
    run: tuple[Folder, list[Manifest]], keep: int
) -> None:
    root, (base, second, third, late, last) = run
    assert takeover.adopt(root, [last.id]) == [last.id]
    for _ in range(2):
        done = prune(root, Retention(keep))
        chain, problems = newest(root)
        assert chain is not None
        assert not problems
        assert [one.id for one in chain.manifests] == [base.id, late.id, last.id]
    assert not done.verdict.delete
    listed = {one.id: one.status for one in inventory(root).checkpoints}
    assert listed[last.id] == "restorable"
    points = [last.id, third.id, second.id][:keep]
    assert set(points) | {base.id, late.id} == listed.keys()


def test_an_adopted_checkpoint_that_is_older_keeps_what_it_needs(
    run: tuple[Folder, list[Manifest]],
) -> None:
    """The run goes on, and keeps the adopted one among its newest."""
    root, made = run
    last = made[-1]
    takeover.adopt(root, [last.id])
    put(root, make(6), 3)
    prune(root, Retention(2))
    assert resolve(root, last.id).head.id == last.id


@pytest.mark.parametrize(("keep", "gone"), [(1, [2]), (2, [])])
def test_what_does_not_count_is_no_point_of_its_own(keep: int, gone: list[int]) -> None:
    base = make(1)
    late = make(3, base, base)
    adopted = make(4, late, late)
    counting = [base, make(2), adopted]
    verdict = judge(counting, Retention(keep), ignored=[late])
    assert [one.sequence for one in counting if one.id in verdict.delete] == gone
    assert late.id not in verdict.delete
    assert abandoned_ids(counting, (), [late]) == set()


def test_a_live_run_may_go_on_from_any_of_its_newer_copies() -> None:
    """A copy behind training may be ready when checkpoints were committed upon its original."""
    root = new_root()
    live = Lease(root)
    live.acquire(lambda _: ())
    base = put(root, make(1), 1)
    original = put(root, make(2, base, base), 1)
    last = put(root, make(3, original, original), 1)
    copy = put(root, compacted(original), 1)
    prune(root, Retention(1))
    assert resolve(root, last.id).head.id == last.id
    assert resolve(root, copy.id).head.id == copy.id
    upon = put(root, make(4, copy, last), 1)
    prune(root, Retention(1))
    assert committed(root) == [upon.id, copy.id]
    put(root, make(5, upon, upon), 1)
    full = put(root, make(6, None, upon), 1)
    prune(root, Retention(1))
    assert committed(root) == [full.id]
    live.release()
