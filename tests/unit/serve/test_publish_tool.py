"""``checknrun publish`` brings a root of publications to a run's newest checkpoint."""

from __future__ import annotations

import shutil
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.examples import some_of
from tests.unit.console import Console
from tests.unit.serve.served import Job, Net, differences, kernels, quantized, restored
from torchrec_checknrun import Follower, Full, Intermittent, OneShot, Quantization, compact, verify
from torchrec_checknrun.errors import IncompatibleCheckpoint, StorageFailed
from torchrec_checknrun.format.manifest import Header, Manifest
from torchrec_checknrun.root import prune
from torchrec_checknrun.root.chain import newest
from torchrec_checknrun.root.checkpoints import read_manifest
from torchrec_checknrun.root.followers import announced
from torchrec_checknrun.root.retention import Retention
from torchrec_checknrun.root.writer import RootWriter
from torchrec_checknrun.serve.publish import publish
from torchrec_checknrun.store.folder import Folder

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(name="roots")
def _roots(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "run", tmp_path / "serve"


def trained(root: Path, saves: int = 3, **options: Any) -> Job:
    job = Job(root, **options)
    for seed in range(saves):
        job.train(seed)
        job.save()
    return job


def chain(root: Path) -> list[str]:
    found, _ = newest(Folder(root))
    assert found is not None
    return [manifest.id for manifest in found.manifests]


CHOICES: list[Any] = [
    {},
    {"quantization": Quantization(bits=4, exact_below_rows=0)},
    {"quantization": Quantization(method="delta", step=1e-3, exact_below_rows=0)},
    {
        "quantization": Quantization(
            method="delta", step=1e-3, optimizer="logdelta", exact_below_rows=0
        )
    },
    {"quantization": Quantization(method="lc", bits=2, exact_below_rows=0)},
    {"policy": OneShot()},
    {"policy": Intermittent()},
    {"sharding": "column_wise"},
]


@pytest.mark.parametrize("choice", some_of(CHOICES, 2, 6), ids=str)
def test_again_adds_what_is_new(roots: tuple[Path, Path], choice: dict[str, Any]) -> None:
    job = trained(roots[0], **choice)
    sharding = {"sharding": choice["sharding"]} if "sharding" in choice else {}
    follower = Follower(roots[1], quantized(Net(), 4))
    assert len(publish(roots[0], roots[1]).published) == len(chain(roots[0]))
    assert publish(roots[0], roots[1]).published == ()
    for seed in (5, 6):
        version = follower.poll()
        assert version is not None
        assert version.step == job.saver.steps
        assert version.whole is (seed == 5)
        assert differences(follower, quantized(restored(roots[0], **sharding), 4)) == []
        job.train(seed)
        job.save()
        done = publish(roots[0], roots[1])
        assert [manifest.step for manifest in done.published] == [job.saver.steps]
        assert done.bytes == done.published[0].stored_bytes
        for table in done.published[0].tables.values():
            assert table.optimizer_bytes == 0
        assert set(done.published[0].states) == {"model"}
    assert all(not found.problems for found in verify(roots[1]))
    job.saver.close()


@pytest.mark.parametrize("bits", some_of([8, 4, 2], 1))
def test_widths(roots: tuple[Path, Path], bits: int) -> None:
    job = trained(roots[0], rows=1100, chunk_bytes=20_000)
    publish(roots[0], roots[1], bits=bits)
    wanted = quantized(restored(roots[0], rows=1100), bits)
    follower = Follower(roots[1], quantized(Net(rows=1100), bits))
    version = follower.poll()
    assert version is not None
    assert version.rows_encoded == (version.rows_applied if bits == 8 else 0)
    if bits < 8:  # TorchRec's bytes; at 8 bits the rows are encoded twice
        assert differences(follower, wanted) == []
    job.saver.close()


def test_what_the_run_goes_through(roots: tuple[Path, Path]) -> None:
    """Publish a run that falls back, is compacted and pruned, and begins anew; a follower of the
    copy follows.
    """
    job = trained(roots[0])
    follower = Follower(roots[1], quantized(Net(), 2))
    first = chain(roots[0])[0]

    def follow(step: int) -> None:
        publish(roots[0], roots[1])
        version = follower.poll()
        assert version is not None
        assert (version.step, version.error) == (step, None)
        assert differences(follower, quantized(restored(roots[0]), 2)) == []

    follow(3)
    job.saver.restore(checkpoint=first)
    job.train(7)
    job.save()
    follow(2)
    compact(roots[0])
    assert publish(roots[0], roots[1]).published == ()  # the same state
    job.train(8)
    job.save()
    job.saver.close()
    prune.prune(Folder(roots[0]), Retention(1))
    follow(3)
    job = Job(roots[0], resume="never")
    job.saver.restore()
    job.train(9)
    job.save()
    follow(1)
    prune.prune(Folder(roots[1]), Retention(1))
    job.train(10)
    job.save()
    follow(2)
    job.saver.close()


def test_a_baseline_that_only_a_copy_was_published_of(roots: tuple[Path, Path]) -> None:
    """The run goes on from the full checkpoint, not from the copy: its followers get that, too."""
    job = trained(roots[0], policy=OneShot())
    compact(roots[0])
    follower = Follower(roots[1], quantized(Net(), 4))
    assert len(publish(roots[0], roots[1]).published) == 1
    for step, added in ((4, 2), (5, 1)):
        job.train(step)
        job.save()
        assert len(publish(roots[0], roots[1]).published) == added
        version = follower.poll()
        assert version is not None
        assert (version.step, version.error) == (step, None)
        assert differences(follower, quantized(restored(roots[0]), 4)) == []
    assert all(not found.problems for found in verify(roots[1]))
    job.saver.close()


def test_targets_that_are_refused(roots: tuple[Path, Path], tmp_path: Path) -> None:
    job = trained(roots[0])
    publish(roots[0], roots[1], bits=8)
    with pytest.raises(IncompatibleCheckpoint, match="holds rows in 8 bits: give the same --bits"):
        publish(roots[0], roots[1], bits=4)
    other = trained(tmp_path / "other", saves=1)
    with pytest.raises(IncompatibleCheckpoint, match="it is of another run"):
        publish(tmp_path / "other", roots[1], bits=8)
    with pytest.raises(ValueError, match="bits must be one of"):
        publish(roots[0], roots[1], bits=3)
    assert chain(roots[1])  # as it was
    assert len(list(roots[1].glob("*/manifest.json"))) == 3
    for each in (job, other):
        each.saver.close()


def test_rows_as_they_are_have_32_bits(roots: tuple[Path, Path]) -> None:
    job = trained(roots[0], saves=1)
    publish(roots[0], roots[1], bits=32)
    assert publish(roots[0], roots[1]).published == ()
    with pytest.raises(IncompatibleCheckpoint, match="holds rows in 32 bits: give the same --bits"):
        publish(roots[0], roots[1], bits=8)
    job.saver.close()


def test_the_run_s_own_root_is_no_target(roots: tuple[Path, Path], tmp_path: Path) -> None:
    """Delete no checkpoint of a run whose root, a link to it, or a copy is given as the target."""
    trained(roots[0], policy=Full()).saver.close()
    (tmp_path / "link").symlink_to(roots[0])
    shutil.copytree(roots[0], roots[1])
    for target in (roots[0], tmp_path / "link", roots[1]):
        with pytest.raises(IncompatibleCheckpoint, match="holds the run's own checkpoints"):
            publish(roots[0], target, keep=1)
        assert len(list(target.glob("*/manifest.json"))) == 3


def test_a_folder_in_the_run_s_root_is_no_target(tmp_path: Path) -> None:
    run = tmp_path / "run"
    trained(run, policy=Full()).saver.close()
    before = sorted(tmp_path.rglob("*"))
    for target in (run / "serve", tmp_path):
        with pytest.raises(ValueError, match="must lie outside of the checkpoints' root"):
            publish(run, target)
    assert sorted(tmp_path.rglob("*")) == before


def test_no_run_s_root_is_a_target(roots: tuple[Path, Path]) -> None:
    """Delete nothing of an older copy of a run's root, from which the run has gone on, or of
    another run's.
    """
    trained(roots[0], policy=Full()).saver.close()
    shutil.copytree(roots[0], roots[1])
    job = Job(roots[0], policy=Full())
    job.saver.restore()
    for seed in (5, 6):
        job.train(seed)
        job.save()
    job.saver.close()
    for keep in (None, 1):
        with pytest.raises(IncompatibleCheckpoint, match="with optimizer or training state"):
            publish(roots[0], roots[1], keep=keep)
        assert len(list(roots[1].glob("*/manifest.json"))) == 3


def test_ended_in_the_middle(roots: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep publications that were added, each a whole state; the next attempt goes on there."""
    job = trained(roots[0])
    follower = Follower(roots[1], quantized(Net(), 4))
    before, left = RootWriter.before_commit, [2]

    def check(*arguments: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise StorageFailed(5, "gone in the middle")
        before(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(RootWriter, "before_commit", check)
        with pytest.raises(StorageFailed):
            publish(roots[0], roots[1])
    version = follower.poll()
    assert version is not None
    assert version.step == 2
    assert differences(follower, quantized(restored(roots[0], chain(roots[0])[1]), 4)) == []
    assert len(publish(roots[0], roots[1]).published) == 1
    follower.poll()
    assert differences(follower, quantized(restored(roots[0]), 4)) == []
    job.saver.close()


def test_old_publications_are_deleted(roots: tuple[Path, Path], console: Console) -> None:
    """Bases and links that nobody needs go, but those that a follower is reading."""
    job = trained(roots[0], policy=Full())
    follower = Follower(roots[1], quantized(Net(), 4))
    words = ("publish", roots[0], roots[1], "--keep", 1)
    assert console.json(*words)["deleted"] == []
    (first,) = chain(roots[1])

    def published() -> set[str]:
        return {path.parent.name for path in roots[1].glob("*/manifest.json")}

    with announced(Folder(roots[1]), first, large=True):
        for seed in (5, 6):
            job.train(seed)
            job.save()
            console.json(*words)
            assert published() == {first, *chain(roots[1])}
    assert console.json(*words)["deleted"] == [first]  # though nothing is new
    assert published() == {*chain(roots[1])}
    follower.poll()
    assert differences(follower, quantized(restored(roots[0]), 4)) == []
    job.train(7)
    job.save()
    assert "1 old publications deleted" in console.run(*words).out
    assert follower.poll() is not None
    assert differences(follower, quantized(restored(roots[0]), 4)) == []
    with pytest.raises(ValueError, match="keep must be at least 1"):
        publish(roots[0], roots[1], keep=0)
    job.saver.close()


def test_one_of_every_so_many_hours_is_kept(
    roots: tuple[Path, Path], console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keep by the times at which the checkpoints were saved, a quarter of an hour apart."""
    job = trained(roots[0], saves=0, policy=Full())
    words = ("publish", roots[0], roots[1], "--keep", 1, "--keep-hours", 1)
    begin = datetime(2026, 1, 1, 12, tzinfo=timezone.utc)
    made = Manifest.of

    def dated(header: Header, **fields: Any) -> Manifest:
        if fields["created_by"].endswith("(publish)"):
            return made(header, **fields)
        minutes = 15 * (header.step - 1)
        return made(header, **fields | {"created_at": str(begin + timedelta(minutes=minutes))})

    monkeypatch.setattr(Manifest, "of", dated)
    for seed in range(7):
        job.train(seed)
        job.save()
        console.json(*words)
    job.saver.close()
    names = {path.parent.name for path in roots[1].glob("*/manifest.json")}
    steps = sorted(read_manifest(Folder(roots[1]), name).step for name in names)
    assert steps == [1, 5, 7]  # the first of each hour, and the newest
    refused = console.run("publish", roots[0], roots[1], "--keep-hours", 1)
    assert (refused.code, "--keep-hours needs --keep" in refused.err) == (2, True)
    refused = console.run(*words[:-1], -1)
    assert (refused.code, "every_hours must be positive" in refused.err) == (2, True)
    with pytest.raises(ValueError, match="every_hours needs keep"):
        publish(roots[0], roots[1], every_hours=1)


def test_the_console_tool(roots: tuple[Path, Path], console: Console) -> None:
    job = trained(roots[0])
    words = ("publish", roots[0], roots[1], "--bits", 8)
    done = console.json(*words)
    assert done["head"] == chain(roots[0])[-1]
    assert done["published"] == chain(roots[1])
    sizes = [read_manifest(Folder(roots[1]), id).stored_bytes for id in done["published"]]
    assert done["bytes"] == sum(sizes)
    assert "already" in console.run(*words).out
    job.train(7)
    job.save()
    assert "1 publications added" in console.run(*words).out
    refused = console.run(*words[:-1], 3)
    assert (refused.code, "bits must be one of" in refused.err) == (2, True)
    job.saver.close()


@pytest.mark.parametrize("bits", some_of([8, 4, 3, 2], 1, 2))
def test_rows_as_inference_tables_hold_them(
    roots: tuple[Path, Path], tmp_path: Path, console: Console, bits: int
) -> None:
    quantization = Quantization(bits=bits, exact_below_rows=0)
    trained(roots[0], quantization=quantization).saver.close()
    words = ("export", roots[0], tmp_path / "out", "--format", "safetensors", "--layout")
    assert "needs --rows fused" in console.run(*words, "inference").err
    done = console.json(*words, "inference", "--rows", "fused", "--no-optimizer")
    names = ["ebc.embedding_bags.wide", "ebc.embedding_bags.mean", "ebc.embedding_bags.tall"]
    if bits == 3:
        reason = "full: rows are stored in 3 bits, a width of no inference"
        assert set(done["tables"].values()) == {reason}
        return
    assert set(done["tables"].values()) == {f"inference, {bits} bit"}
    model = quantized(restored(roots[0]), bits)
    held = [
        rows
        for kernel in kernels(model)
        for rows, _ in kernel.split_embedding_weights(split_scale_shifts=False)
    ]
    wanted = dict(zip(["wide", "tall", "mean"], held, strict=True))
    for name in names:
        found = load_file(tmp_path / "out" / f"{name}.safetensors")["weight"]
        own = wanted[name.rpartition(".")[2]]
        assert found.shape[1] == {"wide": 8}.get(name.rpartition(".")[2], 16) * bits // 8 + 4
        assert torch.equal(found, own[:, : found.shape[1]])
