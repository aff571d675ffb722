"""Find, follow or refuse chains, on a disk or in a store."""

import json
import shutil
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.unit.small_roots import FILE, TABLES, begin, ids, put, remove
from torchrec_checknrun.errors import (
    ChainBroken,
    CheckpointNotFound,
    CorruptCheckpoint,
    UnsupportedFormat,
)
from torchrec_checknrun.format.manifest import Link, Manifest, TableTotals
from torchrec_checknrun.format.names import MANIFEST_NAME, checkpoint_id
from torchrec_checknrun.root.catalog import inventory
from torchrec_checknrun.root.chain import Chain, newest, resolve
from torchrec_checknrun.root.checkpoints import committed, highest_sequence, read_manifest
from torchrec_checknrun.root.counting import counting
from torchrec_checknrun.root.prune import prune
from torchrec_checknrun.root.retention import Retention
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.tools.verify import verify
from torchrec_checknrun.writers.lease import Lease


def test_a_missing_root_is_empty(root: Folder) -> None:
    assert newest(root / "none") == (None, [])
    assert highest_sequence(root / "none") == 0


def test_an_empty_root(root: Folder) -> None:
    assert committed(root) == []
    assert highest_sequence(root) == 0
    assert newest(root) == (None, [])
    with pytest.raises(CheckpointNotFound, match="seq-1"):
        resolve(root, "seq-1")


def test_a_full_checkpoint_is_a_chain(root: Folder) -> None:
    full = put(root, 1)
    chain = resolve(root, full.id)
    assert chain.manifests == (full,)
    assert chain.head == chain.baseline == full
    assert read_manifest(root, full.id) == full


def test_parents_come_first(root: Folder) -> None:
    full = put(root, 1)
    second = put(root, 2, full)
    third = put(root, 3, second)
    one_shot = put(root, 4, full)
    assert ids(resolve(root, third.id)) == [full.id, second.id, third.id]
    assert ids(resolve(root, one_shot.id)) == [full.id, one_shot.id]
    assert resolve(root, third.id).baseline == full
    assert resolve(root, third.id).head == third


def test_newest_is_the_highest_sequence_not_the_highest_step(root: Folder) -> None:
    """Restore the later commit of step 20 after falling back to step 10."""
    full = put(root, 1, step=10)
    put(root, 2, full, step=30)
    again = put(root, 3, full, step=20)
    assert ids(newest(root)[0]) == [full.id, again.id]


def test_sequences_are_numbers(root: Folder) -> None:
    put(root, 999_999)
    last = put(root, 1_000_000)
    assert ids(newest(root)[0]) == [last.id]
    assert committed(root)[0] == last.id


def test_a_missing_parent(root: Folder) -> None:
    full = put(root, 1)
    child = put(root, 2, full)
    remove(root / full.id)
    with pytest.raises(ChainBroken, match=f"{child.id} needs {full.id}.*{MANIFEST_NAME}"):
        resolve(root, child.id)


def test_a_missing_parent_further_back(root: Folder) -> None:
    full = put(root, 1)
    second = put(root, 2, full)
    third = put(root, 3, second)
    remove(root / full.id, MANIFEST_NAME)
    with pytest.raises(ChainBroken, match=f"{second.id} needs {full.id}"):
        resolve(root, third.id)


def test_a_replaced_parent(root: Folder) -> None:
    full = put(root, 1)
    child = put(root, 2, full)
    other = replace(full, created_by="another run").sealed()
    (root / full.id).put(MANIFEST_NAME, other.to_bytes())
    with pytest.raises(ChainBroken, match=rf"{full.checksum}.*{other.checksum}.*replaced"):
        resolve(root, child.id)
    assert_all_agree(root)


def assert_all_agree(root: Folder) -> None:
    """Check that listings and retention judge a chain as a restore does, for the same reason."""
    for one in inventory(root).checkpoints:
        expected: tuple[str, str | None] = "restorable", None
        try:
            resolve(root, one.id)
        except ChainBroken as error:
            expected = "broken", str(error)
        assert (one.status, one.problem) == expected
    whole, _ = newest(root)
    assert whole is not None
    verdict = prune(root, Retention(1), dry_run=True).verdict
    assert dict(verdict.keep) == {whole.head.id: "one of the newest 1"}


def test_a_parent_that_is_no_older(root: Folder) -> None:
    """Refuse parents that could make a chain a circle."""
    newer = put(root, 5)
    for child in (put(root, 5, newer, step=51), put(root, 4, newer)):
        with pytest.raises(ChainBroken, match=rf"is 5, and should be below {child.sequence}$"):
            resolve(root, child.id)
    assert_all_agree(root)


@pytest.mark.parametrize(
    "tables", [{}, {"t": TableTotals(100, 4)}, {"t": TableTotals(99, 8)}, {"u": TABLES["t"]}]
)
def test_a_parent_with_other_tables(root: Folder, tables: dict[str, TableTotals]) -> None:
    full = put(root, 1, tables=tables)
    with pytest.raises(ChainBroken, match="different tables"):
        resolve(root, put(root, 2, full).id)
    assert_all_agree(root)


@pytest.mark.parametrize("content", [None, b"", b"012345678", b"01234567890"])
def test_a_rank_file_of_another_size(root: Folder, content: bytes | None) -> None:
    full = put(root, 1)
    child = put(root, 2, full)

    def damage(manifest: Manifest) -> None:
        if content is None:
            remove(root / manifest.id, FILE.name)
        else:
            (root / manifest.id).put(FILE.name, content)

    damage(child)
    found = "missing" if content is None else f"has {len(content)}"
    with pytest.raises(
        CorruptCheckpoint, match=rf"{FILE.name} should have 10 bytes, but .*{found}"
    ):
        resolve(root, child.id)
    damage(full)
    put(root, 2, full)
    with pytest.raises(ChainBroken, match=f"{child.id} needs {full.id}, .*{FILE.name}"):
        resolve(root, child.id)


def test_a_checkpoint_under_another_name(root: Folder) -> None:
    full = put(root, 1)
    other = checkpoint_id(2, 20, "0" * 8)
    (root / other).create()
    (root / other).put(FILE.name, b"0123456789")
    (root / other).put(MANIFEST_NAME, full.to_bytes())
    with pytest.raises(CorruptCheckpoint, match="moved or copied"):
        resolve(root, other)
    chain, problems = newest(root)
    assert ids(chain) == [full.id]
    assert len(problems) == 1


def test_newest_passes_over_what_is_broken_and_says_why(root: Folder) -> None:
    first = put(root, 1)
    second = put(root, 2, first)
    orphan = put(root, 3, Link(checkpoint_id(9, 1, "0" * 8), "0" * 32))
    damaged = put(root, 4)
    (root / damaged.id).put(MANIFEST_NAME, damaged.to_bytes()[:-3])
    future = put(root, 5)
    document = json.loads(future.to_bytes())
    document["manifest"]["format_version"] = 99
    (root / future.id).put(MANIFEST_NAME, json.dumps(document).encode())
    begin(root, 6)
    short = put(root, 7)
    (root / short.id).put(FILE.name, b"")
    chain, problems = newest(root)
    assert ids(chain) == [first.id, second.id]
    named = [short.id, future.id, damaged.id, orphan.id]
    assert [problem.split(":")[0] for problem in problems] == named
    for problem, reason in zip(
        problems, ["should have 10 bytes", "version 99", "not a manifest", "needs"], strict=True
    ):
        assert reason in problem
    with pytest.raises(UnsupportedFormat, match="version 99"):
        resolve(root, future.id)


def test_newest_without_what_the_caller_knows_to_be_unusable(root: Folder) -> None:
    first = put(root, 1)
    second = put(root, 2)
    assert ids(newest(root, {second.id})[0]) == [first.id]
    assert newest(root, {first.id, second.id}) == (None, [])


def test_broken_chains_are_reported(root: Folder) -> None:
    full = put(root, 1)
    put(root, 2, full)
    remove(root / full.id, FILE.name)
    chain, problems = newest(root)
    assert chain is None
    assert len(problems) == 2


def test_the_uncommitted_are_no_checkpoints_but_use_up_their_number(root: Folder) -> None:
    full = put(root, 1)
    name = begin(root, 7)
    assert highest_sequence(root) == 7
    assert newest(root) == (resolve(root, full.id), [])
    with pytest.raises(CheckpointNotFound, match=name):
        resolve(root, name)


def test_only_the_uncommitted(root: Folder) -> None:
    begin(root, 1)
    assert newest(root) == (None, [])
    assert highest_sequence(root) == 1


def test_foreign_content_is_left_alone(root: Folder) -> None:
    (root / "logs").create()
    (root / "logs").put("events.json", b"{}")
    (root / "other").create()
    (root / "other").put(MANIFEST_NAME, b'{"name": "a web app"}')
    root.put("notes.txt", b"x")
    root.put(MANIFEST_NAME, b"{}")
    root.put("seq-000009_step-00000090_0000000", b"a file")
    assert newest(root) == (None, [])
    assert highest_sequence(root) == 0
    full = put(root, 1)
    assert ids(newest(root)[0]) == [full.id]
    assert committed(root) == [full.id]


def test_names_of_users_count_by_what_their_manifest_says(root: Folder) -> None:
    """Number checkpoints of ``dcp.save`` by their manifests, beside a Checkpointer's or alone."""
    first = put(root, 1, name="z first")
    second = put(root, 2, first, name="a-second")
    (root / "b-uncommitted").create()
    (root / "b-uncommitted").put(FILE.name, b"0123456789")
    assert committed(root) == ["a-second", "z first"]
    assert ids(newest(root)[0]) == ["z first", "a-second"]
    third = put(root, 3, second)
    assert ids(newest(root)[0]) == ["z first", "a-second", third.id]
    assert highest_sequence(root) == 3


def test_links_beside_checkpoints_are_left_alone(tmp_path: Path) -> None:
    root = Folder(tmp_path)
    first = put(root, 1)
    (tmp_path / "latest").symlink_to(first.id)
    assert committed(root) == [first.id]
    assert newest(root)[1] == []


def test_a_file_with_a_checkpoints_name(root: Folder) -> None:
    first, second = put(root, 1), put(root, 2)
    stray = checkpoint_id(0, 0, "0" * 8)
    root.put(stray, b"")
    with pytest.raises(CheckpointNotFound, match=stray):
        read_manifest(root, stray)
    assert list(counting(root, None)) == [second, first]
    assert newest(root)[1] == []
    assert [one.id for one in verify(root.url)] == [second.id, first.id]
    assert list(prune(root, Retention(1)).verdict.delete) == [first.id]
    lease = Lease(root)
    lease.acquire(lambda claim: [manifest.id for manifest in counting(root, claim)])
    lease.release()
    assert stray in root.names()


def test_a_root_may_be_moved(tmp_path: Path) -> None:
    root = Folder(tmp_path / "run")
    full = put(root, 1)
    child = put(root, 2, full)
    shutil.move(root.url, tmp_path / "moved")
    assert ids(newest(Folder(tmp_path / "moved"))[0]) == [full.id, child.id]


def test_lossy_and_width_are_those_of_all_of_a_chain() -> None:
    def manifest(bits: int, error_rows: int) -> Manifest:
        tables = {"t": TableTotals(1, 1, value_bits=bits, error_rows=error_rows)}
        return Manifest("x", 1, 1, "full", None, None, 1, "", "", 0, None, tables, {}, 0, ())

    exact, lossy = manifest(32, 0), manifest(4, 5)
    assert (Chain((exact,)).lossy, Chain((exact,)).widths) == (False, {"t": 32})
    assert (Chain((exact, lossy)).lossy, Chain((exact, lossy)).widths) == (True, {"t": 4})
    assert (Chain((lossy, exact)).lossy, Chain((lossy, exact)).widths) == (True, {"t": 4})
    assert Chain((replace(exact, tables={}),)).widths == {}
