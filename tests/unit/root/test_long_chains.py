"""A chain of hundreds of checkpoints takes work in proportion to its length, not to its square."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from tests.unit.root.test_lineage import Run, chain_of
from tests.unit.root.test_retention import run
from tests.unit.run.jobs import checkpointer, make_job, train
from tests.unit.small_roots import FILE, put
from torchrec_checknrun import Consecutive
from torchrec_checknrun.errors import ChainBroken, CheckNRunError
from torchrec_checknrun.format import reader
from torchrec_checknrun.format.entries import StateEntry
from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.format.reader import read_chain
from torchrec_checknrun.restore.chunks import read_content
from torchrec_checknrun.root import catalog, lineage, retention
from torchrec_checknrun.root import chain as chains
from torchrec_checknrun.root.catalog import inventory
from torchrec_checknrun.root.chain import newest_required
from torchrec_checknrun.root.retention import Retention, judge
from torchrec_checknrun.serve.publish import publish
from torchrec_checknrun.store.coalescing import CoalescedReads, Place
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.tools.verify import verify

LENGTH = 60


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Count how often a checkpoint is compared with its parent, as whoever follows a chain does."""
    count = 0
    incompatibility = chains.incompatibility

    def counted(child: Manifest, parent: Manifest) -> str | None:
        nonlocal count
        count += 1
        return incompatibility(child, parent)

    for module in (chains, lineage, retention, catalog):
        monkeypatch.setattr(module, "incompatibility", counted, raising=False)

    def taken() -> int:
        nonlocal count
        found, count = count, 0
        return found

    return taken


def put_chain(root: Folder, length: int = LENGTH) -> list[Manifest]:
    made: list[Manifest] = []
    for sequence in range(1, length + 1):
        made.append(put(root, sequence, made[-1] if made else None))
    return made


def test_training_follows_no_chain_at_a_commit(links: Callable[[], int]) -> None:
    """Training waits while a checkpoint is noted, and reported with the length of its chain."""
    job = Run(Consecutive())
    manifests = [job.save()]
    for _ in range(LENGTH):
        manifests.append(job.save())
        links()
        assert job.lineage.chain_length == len(manifests)
        assert links() == 0
    assert job.lineage.chain == list(chain_of(manifests[-1], manifests).manifests)
    assert job.lineage.ancestors(manifests[-1].link) == tuple(m.id for m in manifests)
    links()
    job.lineage.committed(job_manifest := job.save())
    assert job.lineage.chain[-1] is job_manifest
    assert links() < LENGTH / 4


def test_retention_looks_at_each_checkpoint_a_few_times(links: Callable[[], int]) -> None:
    made = run("F" + "c" * LENGTH)
    links()
    assert not judge(made, Retention(keep=1)).delete
    assert links() < 12 * LENGTH
    # A run that was restored from the chain claims all of it.
    verdict = judge(made, Retention(keep=1), in_use=[manifest.id for manifest in made])
    assert len(verdict.keep) == len(made)
    assert links() < 16 * LENGTH


def test_a_list_looks_at_each_checkpoint_a_few_times(
    memory_root: Folder, links: Callable[[], int]
) -> None:
    made = put_chain(memory_root)
    links()
    found = inventory(memory_root).checkpoints
    assert links() < 16 * LENGTH
    sizes = [sum((memory_root / manifest.id).sizes().values()) for manifest in made]
    for number, listed in enumerate(reversed(found), 1):
        assert listed.chain == tuple(manifest.id for manifest in made[:number])
        assert listed.chain_bytes == sum(sizes[:number])


@pytest.mark.parametrize("look", ["restore", "verify"])
def test_a_chain_whose_begin_is_lost_is_read_once(
    look: str, memory_root: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its checkpoints is tried as a head, and needs all those before."""
    made = put_chain(memory_root)
    (memory_root / made[0].id).delete(FILE.name)
    reads = 0

    def counted(root: Folder, name: str) -> Manifest:
        nonlocal reads
        reads += 1
        return read(root, name)

    read = chains.read_manifest
    monkeypatch.setattr(chains, "read_manifest", counted)
    if look == "restore":
        with pytest.raises(ChainBroken, match="no complete chain") as raised:
            newest_required(memory_root)
        assert len(str(raised.value)) < 4000
    else:
        assert all(one.problems for one in verify(memory_root))
    assert reads <= 4 * LENGTH


def test_what_is_broken_in_the_middle_is_told_of_each(memory_root: Folder) -> None:
    made = put_chain(memory_root, 6)
    (memory_root / made[2].id).delete(FILE.name)
    found = {listed.id: listed for listed in inventory(memory_root).checkpoints}
    assert [found[manifest.id].status for manifest in made] == ["restorable"] * 2 + ["broken"] * 4
    for manifest in made[3:]:
        assert f"it needs {made[2].id}, which is damaged" in (found[manifest.id].problem or "")
        assert found[manifest.id].chain == ()
    with pytest.raises(CheckNRunError):
        chains.resolve(memory_root, made[-1].id)
    assert newest_required(memory_root).head == made[1]


@pytest.mark.usefixtures("one_rank")
def test_each_difference_beside_the_tables_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read no difference again for each one that is added to it."""
    job = make_job()
    with checkpointer(tmp_path / "run", job) as saver:
        for _ in range(LENGTH // 4):
            train(job, saver)
            saver.save()
    model = Folder(tmp_path / "run")
    chunks = list(chain.from_iterable(read_chain(model, newest_required(model).manifests)))
    assert sum(chunk.base is not None for chunk in chunks) > LENGTH / 4
    reads, read, part = 0, reader._read_payload, CoalescedReads.part

    def counted(*arguments: Any) -> memoryview:
        nonlocal reads
        reads += 1
        return read(*arguments)

    def counted_part(self: CoalescedReads, place: Place) -> memoryview | None:
        nonlocal reads
        found = part(self, place)
        reads += found is not None
        return found

    monkeypatch.setattr(reader, "_read_payload", counted)
    monkeypatch.setattr(CoalescedReads, "part", counted_part)
    assert not any(one.problems for one in verify(tmp_path / "run"))
    assert reads == len(chunks)
    reads = 0
    publish(tmp_path / "run", tmp_path / "published")
    assert reads <= len(chunks)


@pytest.mark.usefixtures("one_rank")
def test_a_restore_holds_what_tells_of_states_of_one_checkpoint(tmp_path: Path) -> None:
    """Let 4,000 parameters take 13 MB on each rank once, and not for each of 500 checkpoints."""
    job = make_job()
    with checkpointer(tmp_path / "run", job) as saver:
        for _ in range(3):
            train(job, saver)
            saver.save()
    root = Folder(tmp_path / "run")
    content = read_content(root, newest_required(root))
    trees = [
        [chunk.entry.tree for chunk in chunks if isinstance(chunk.entry, StateEntry)]
        for chunks in content.chunks
    ]
    assert [any(of_one) for of_one in trees] == [False, False, True]
    whole = read_content(root, newest_required(root), whole=True)
    assert all(
        chunk.entry.tree
        for chunks in whole.chunks
        for chunk in chunks
        if isinstance(chunk.entry, StateEntry)
    )
