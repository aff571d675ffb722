"""A Checkpointer publishes between checkpoints, and a follower of the publications has its rows."""

from __future__ import annotations

import logging
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import zoo as zoo_nets
from tests.distributed.zoo import ROWS, _embeddings, build_zoo
from tests.examples import some_of
from tests.unit.serve.served import Job, Net, batch, differences, kernel_bytes, quantized, restored
from torchrec_checknrun import Checkpointer, CheckpointReport, Follower, Publish, verify
from torchrec_checknrun.errors import IncompatibleCheckpoint
from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.root.checkpoints import read_manifest
from torchrec_checknrun.root.followers import announced
from torchrec_checknrun.run.publisher import CheapChain, Publisher
from torchrec_checknrun.store.folder import Folder

pytestmark = pytest.mark.usefixtures("one_rank")
Roots = tuple[Path, Path]


@pytest.fixture(name="roots")
def _roots(tmp_path: Path) -> Roots:
    return tmp_path / "run", tmp_path / "serve"


def publishing(roots: Roots, sharding: str = "row_wise", rows: int = 40, **options: Any) -> Job:
    """Make a job that publishes when told to."""
    chosen = {"every_seconds": 1e6, "bits": 32, **options.pop("publish", {})}
    return Job(roots[0], sharding, rows, publish=Publish(roots[1], **chosen), **options)


def publish(job: Job) -> CheckpointReport:
    report = job.saver.publish()
    assert report is not None
    return report


def publisher(job: Job) -> Publisher:
    found = job.saver._publisher
    assert found is not None
    return found


def plain(job: Job) -> Net:
    """Copy the model as it is now into one that is not sharded."""
    found = Net(rows=job.rows)
    with torch.no_grad():
        for name, value in job.model.state_dict().items():
            into = found.state_dict()[name]
            if not hasattr(value, "local_shards"):
                into.copy_(value)
                continue
            for shard in value.local_shards():
                (row, col), part = shard.metadata.shard_offsets, shard.tensor
                into[row : row + part.shape[0], col : col + part.shape[1]] = part
    return found.eval()


def manifests(root: Path) -> list[Manifest]:
    """Read the manifests of a root, oldest first."""
    names = sorted(path.parent.name for path in root.glob("*/manifest.json"))
    return [read_manifest(Folder(root), name) for name in names]


FORMS = [(bits, "row_wise") for bits in (32, 4, 2)] + [(32, "column_wise")]


@pytest.mark.parametrize(("bits", "sharding"), some_of(FORMS, 1, 3))
def test_a_follower_has_the_rows_of_training(roots: Roots, bits: int, sharding: str) -> None:
    """Compare with what TorchRec quantizes of the model at the publication, byte for byte."""
    rows = 1100 if bits < 32 else 40  # rows of small tables are published as they are
    job = publishing(roots, sharding, rows, publish={"bits": bits})
    form = 8 if bits == 32 else bits
    follower = Follower(roots[1], quantized(Net(rows=rows), form))
    for seed in range(4):
        job.train(seed)
        assert publish(job).kind == ("full" if seed == 0 else "differential")
        if seed == 1:
            job.save()
        version = follower.poll()
        assert version is not None
        assert (version.step, version.whole) == (seed + 1, seed == 0)
        assert version.rows_applied < (rows if seed else 5 * rows)
        wanted = quantized(plain(job), form)
        with follower.read() as (model, _):
            pairs = zip(kernel_bytes(model), kernel_bytes(wanted), strict=True)
            assert all(torch.equal(own, other) for own, other in pairs)
            for name in ("over.weight", "over.bias", "seen"):
                assert torch.equal(model.state_dict()[name], wanted.state_dict()[name])
    job.saver.close()


def test_eight_bits(roots: Roots) -> None:
    job = publishing(roots, rows=1100, publish={"bits": 8})
    follower = Follower(roots[1], Net(rows=1100))
    job.train(1)
    publish(job)
    (manifest,) = manifests(roots[1])
    assert (manifest.bits, manifest.lossy) == (8, True)
    follower.poll()
    with follower.read() as (model, _), torch.no_grad():
        own, other = model.state_dict(), plain(job).state_dict()
        own = {name: value for name, value in own.items() if name.startswith("ebc.")}
        for name, value in own.items():
            spread = other[name].max(1).values - other[name].min(1).values
            assert ((value - other[name]).abs() <= spread[:, None] / 500).all()  # 255 steps
            assert not torch.equal(value, other[name])
    job.saver.close()


def test_checkpoints_and_publications_have_marks_of_their_own(roots: Roots) -> None:
    job = publishing(roots)
    follower = Follower(roots[1], Net())
    for seed in range(6):
        job.train(seed)
        if seed % 3 == 0:
            job.save()
        if seed % 2:
            publish(job)
            follower.poll()
            with follower.read() as (model, _):
                assert all(
                    torch.equal(value, plain(job).state_dict()[name])
                    for name, value in model.state_dict().items()
                )
    job.train(9)
    job.save()
    wanted = plain(job)
    job.saver.close()
    found = restored(roots[0]).state_dict()
    assert all(torch.equal(found[name], value) for name, value in wanted.state_dict().items())


def test_nothing_but_what_a_prediction_depends_on(roots: Roots) -> None:
    job = publishing(roots)
    job.train(1)
    publish(job)
    (manifest,) = manifests(roots[1])
    assert set(manifest.states) == {"model"}
    assert all(table.optimizer_bytes == 0 for table in manifest.tables.values())
    assert len(manifest.tables) == 4
    job.train(2)
    publish(job)
    job.saver.close()
    assert [found.problems for found in verify(roots[1])] == [(), ()]


def test_put_off_while_gradients_wait(roots: Roots) -> None:
    job = publishing(roots)
    job.train(1)
    job.optimizer.zero_grad()
    job.model(batch(2)).sum().backward()  # fused rows have changed, the dense layer has not
    assert job.saver.publish() is None
    assert not manifests(roots[1])
    job.optimizer.step()
    publish(job)
    follower = Follower(roots[1], quantized(Net(), 4))
    follower.poll()
    assert differences(follower, quantized(plain(job), 4)) == []
    job.saver.close()


def test_after_a_restore_the_next_one_is_a_base(roots: Roots) -> None:
    job = publishing(roots)
    follower = Follower(roots[1], quantized(Net(), 4))
    job.train(1)
    job.save()
    first = plain(job)
    publish(job)
    job.train(2)
    assert publish(job).kind == "differential"
    follower.poll()
    job.saver.restore()  # the rows of the second step go back, unmarked
    assert publish(job).kind == "full"
    version = follower.poll()
    assert version is not None
    assert (version.step, version.whole) == (1, True)
    assert differences(follower, quantized(first, 4)) == []
    job.train(3)
    assert publish(job).kind == "differential"
    job.saver.close()


def test_another_process_begins_with_a_base(roots: Roots) -> None:
    for _ in range(2):
        job = publishing(roots)
        job.train(1)
        assert publish(job).kind == "full"
        job.train(2)
        assert publish(job).kind == "differential"
        job.saver.close()
    assert [manifest.sequence for manifest in manifests(roots[1])] == [3, 4]


def test_replaced_shards_begin_with_a_base(roots: Roots) -> None:
    job = publishing(roots)
    job.train(1)
    publish(job)
    tracked = publisher(job)._tracked
    tracked.shards = list(tracked.shards)  # as after a look that found the same ones
    job.train(2)
    assert publish(job).kind == "differential"
    tracked.shards[0] = type(tracked.shards[0])(tracked.shards[0].writes, tracked.shards[0].index)
    job.train(3)
    assert publish(job).kind == "full"
    job.saver.close()


def test_a_failure_keeps_its_rows_and_never_stops_training(
    roots: Roots, caplog: pytest.LogCaptureFixture
) -> None:
    job = publishing(roots)
    follower = Follower(roots[1], quantized(Net(), 4))
    job.train(1)
    publish(job)
    follower.poll()
    job.train(2)
    away = roots[1].with_name("away")
    roots[1].rename(away)
    roots[1].write_text("a file where the folder was")
    with caplog.at_level(logging.WARNING):
        assert job.saver.publish() is None
    assert "publication failed (1 in a row), its rows are part of the next one" in caplog.text
    assert publisher(job).failures == 1
    job.train(3)
    job.save()  # another root, and none of its business
    roots[1].unlink()
    away.rename(roots[1])
    publish(job)
    assert publisher(job).failures == 0
    follower.poll()
    assert differences(follower, quantized(plain(job), 4)) == []
    job.saver.close()


def test_a_root_that_cannot_be_claimed_is_asked_ever_more_seldom(roots: Roots) -> None:
    """A claim is taken while training waits."""
    roots[1].write_text("a file where the folder should be")
    job = publishing(roots)
    job.train(1)
    for pause in (2, 4, 8):
        assert job.saver.publish() is None
        assert publisher(job)._pause == pause
        assert publisher(job)._rests()
    roots[1].unlink()
    assert publish(job).kind == "full"
    assert (publisher(job)._pause, publisher(job).failures) == (1, 0)
    job.saver.close()


def test_a_root_that_another_run_publishes_to(
    roots: Roots, caplog: pytest.LogCaptureFixture
) -> None:
    job = publishing(roots)
    job.train(1)
    publish(job)
    other = publishing((roots[0].with_name("other"), roots[1]))
    other.train(1)
    assert other.saver.publish() is None
    assert "another Checkpointer of this process writes to" in caplog.text
    other.save()
    job.train(2)
    assert publish(job).kind == "differential"
    for each in (job, other):
        each.saver.close()


def test_a_chain_that_costs_more_than_its_base_ends(roots: Roots) -> None:
    job = publishing(roots, publish={"keep": 100})
    for seed in range(12):
        job.train(seed)
        publish(job)
    job.saver.close()
    found = manifests(roots[1])
    bases = [place for place, manifest in enumerate(found) if manifest.kind == "full"]
    assert len(bases) > 1
    for base, following in pairwise(bases):
        sizes = [manifest.stored_bytes for manifest in found[base:following]]
        assert sum(sizes[1:]) > sizes[0] >= sum(sizes[1:-1])


def test_a_chain_of_very_many_links_ends(roots: Roots) -> None:
    job = publishing(roots, rows=1100)
    job.train(1)
    publish(job)
    job.train(2)
    publish(job)
    job.saver.close()
    base, link = manifests(roots[1])
    assert [CheapChain(3).decide([base, *[link] * n]).name for n in (1, 2, 3)] == [
        *["SINCE_LAST"] * 2,
        "FULL",
    ]


def test_tables_that_are_left_out(roots: Roots) -> None:
    job = publishing(roots, publish={"tables": ["*embedding_bags.*"]})
    job.train(1)
    publish(job)
    (manifest,) = manifests(roots[1])
    assert sorted(manifest.tables) == [f"ebc.embedding_bags.{n}" for n in ("mean", "tall", "wide")]
    with pytest.raises(IncompatibleCheckpoint, match=r"ec\.embeddings\.wide"):
        Follower(roots[1], Net()).poll()
    follower = Follower(roots[1], Net(), strict=False)
    version = follower.poll()
    assert version is not None
    assert version.kept == ("table 'ec.embeddings.wide'",)
    job.train(2)
    job.save()
    wanted = plain(job).state_dict()
    job.saver.close()
    found = restored(roots[0]).state_dict()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_weights_of_feature_processors(roots: Roots) -> None:
    zoo = build_zoo("feature_processed", dict.fromkeys(ROWS, "table_wise:0"))
    torch.manual_seed(7)
    embeddings, _, _, _, width = _embeddings("feature_processed", 8, None)
    served = zoo_nets.Net(embeddings.to_empty(device="cpu"), width, sequence=False)
    follower = Follower(roots[1], served)
    with Checkpointer(
        roots[0], model=zoo.model, publish=Publish(roots[1], every_seconds=1e6, bits=32)
    ) as saver:
        before = ""
        for _ in range(2):
            zoo.train(1)
            assert saver.publish() is not None
            follower.poll()
            with follower.read() as (model, _):
                own = model.state_dict()["embeddings._feature_processors.position_weights.f0"]
                live = zoo.model.state_dict()["embeddings._feature_processors.position_weights.f0"]
                assert torch.equal(own, live)
                assert str(own) != before
                before = str(own)


def test_old_publications_go_unless_a_follower_reads_them(roots: Roots) -> None:
    job = publishing(roots, publish={"keep": 1})
    job.train(1)
    held = publish(job).id
    with announced(Folder(roots[1]), held, large=True):
        for seed in range(2):
            job.saver.restore() if seed else None
            job.train(seed)
            if seed == 0:
                job.save()
            publish(job)
        publisher(job)._writer.wait_for_pruning()
        assert held in {manifest.id for manifest in manifests(roots[1])}
    job.train(5)
    publish(job)
    publisher(job)._writer.wait_for_pruning()
    left = manifests(roots[1])
    assert [manifest.kind for manifest in left] == ["full", "differential"]
    assert held != left[0].id
    job.saver.close()
