"""A follower holds, after every checkpoint, exactly what a model built from it would hold."""

from __future__ import annotations

import copy
import gc
import threading
import time
import weakref
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.examples import some_of
from tests.unit.run.test_going_on import CompactedAtOnce
from tests.unit.serve.served import Job, Net, batch, differences, quantized, restored
from torchrec_checknrun import (
    CompactAfter,
    Follower,
    Intermittent,
    OneShot,
    Quantization,
    Retention,
    Version,
)
from torchrec_checknrun.compaction.compact import compact
from torchrec_checknrun.errors import UnsupportedTable
from torchrec_checknrun.format.entries import difference_of
from torchrec_checknrun.format.names import parse_id
from torchrec_checknrun.format.reader import read_indexes
from torchrec_checknrun.root.chain import newest
from torchrec_checknrun.run import going_on
from torchrec_checknrun.store.folder import Folder

pytestmark = pytest.mark.usefixtures("one_rank")


def followers(root: Path) -> dict[tuple[int | None, int], Follower]:
    torch.manual_seed(5)
    return {
        (bits, copies): Follower(
            root, quantized(Net(), bits), copies=copies, memory_bytes=200 if copies == 1 else None
        )
        for bits in (None, 8, 4, 2)
        for copies in (1, 2)
    }


@pytest.mark.parametrize(
    ("sharding", "bits"),
    some_of(product(["row_wise", "column_wise"], [None, 8, 4, 3, 2]), 0, 8),
)
def test_every_checkpoint_as_if_built_from_it(
    tmp_path: Path, bits: int | None, sharding: str
) -> None:
    job = Job(
        tmp_path,
        sharding,
        quantization=Quantization(bits=bits, exact_below_rows=0) if bits else None,
    )
    following = followers(tmp_path)
    assert {follower.poll() for follower in following.values()} == {None}
    for seed in range(3):
        job.train(seed)
        job.save()
        wanted = restored(tmp_path, sharding=sharding)
        for (form, copies), follower in following.items():
            version = follower.poll()
            assert version is not None
            assert (version.step, version.error, version.lag_steps) == (seed + 1, None, 0)
            assert version.whole is (seed == 0)
            assert differences(follower, quantized(wanted, form)) == [], (form, copies)
            if sharding == "row_wise":
                copied = None in (bits, form) or (form == bits and form in (2, 4))
                assert version.rows_encoded == (0 if copied else version.rows_applied)
    job.saver.close()


@pytest.mark.parametrize("policy", [OneShot(), Intermittent()])
def test_differences_to_the_full_checkpoint(tmp_path: Path, policy: OneShot | Intermittent) -> None:
    job = Job(tmp_path, policy=policy)
    follower = Follower(tmp_path, quantized(Net(), 4))
    for seed in range(4):
        job.train(seed)
        job.save()
        version = follower.poll()
        assert version is not None
        assert differences(follower, quantized(restored(tmp_path), 4)) == []
    assert version is not None
    assert not version.whole
    job.saver.close()


def test_several_checkpoints_at_once(tmp_path: Path) -> None:
    job = Job(tmp_path, quantization=Quantization(bits=4, exact_below_rows=0))
    follower = Follower(tmp_path, quantized(Net(), 4))
    for seed in range(6):
        job.train(seed)
        job.save()
        if seed % 3 == 2:
            version = follower.poll()
            assert version is not None
            assert version.whole is (seed == 2)
            assert differences(follower, quantized(restored(tmp_path), 4)) == []
    job.saver.close()


def test_a_run_that_fell_back(tmp_path: Path) -> None:
    job = Job(tmp_path)
    follower = Follower(tmp_path, quantized(Net(), 8))
    ids = []
    for seed in range(4):
        job.train(seed)
        job.save()
        version = follower.poll()
        assert version is not None
        ids.append(version.checkpoint_id)
    job.saver.close()
    again = Job(tmp_path)
    again.saver.restore(ids[1])
    again.train(9)
    again.save()
    version = follower.poll()
    assert version is not None
    assert version.step == 3
    assert differences(follower, quantized(restored(tmp_path), 8)) == []
    again.saver.close()


@pytest.mark.parametrize(
    "quantization",
    [
        Quantization(method="delta", mean_bits=3, exact_below_rows=0),
        Quantization(method="delta", mean_bits=3, optimizer="logdelta", exact_below_rows=0),
        Quantization(method="lc", bits=3, exact_below_rows=0),
    ],
    ids=["delta", "logdelta", "lc"],
)
def test_links_of_differences(tmp_path: Path, quantization: Quantization) -> None:
    job = Job(tmp_path, quantization=quantization)
    following = followers(tmp_path)
    for seed in range(3):
        job.train(seed)
        job.save()
        wanted = restored(tmp_path)
        for (form, _), follower in following.items():
            version = follower.poll()
            assert version is not None
            assert version.whole is (seed == 0)
            assert differences(follower, quantized(wanted, form)) == [], form
    chain, _ = newest(Folder(tmp_path))
    assert chain is not None
    assert len(chain.head.deltas) == 4
    job.saver.close()


def test_a_prediction_stays_on_the_version_that_it_began_with(tmp_path: Path) -> None:
    job = Job(tmp_path)
    follower = Follower(tmp_path, quantized(Net(), 8))
    job.train(0)
    job.save()
    follower.poll()
    with follower.read() as (model, version):
        before = model(batch(3))
        job.train(1)
        job.save()
        newer = follower.poll()
        assert torch.equal(model(batch(3)), before)
        assert version is not None
        assert newer is not None
        assert newer.sequence > version.sequence
        with follower.read() as (other, inner):
            assert inner is not None
            assert inner.checkpoint_id == newer.checkpoint_id
            assert not torch.equal(other(batch(3)), before)
    assert differences(follower, quantized(restored(tmp_path), 8)) == []
    job.saver.close()


@pytest.mark.parametrize("method", some_of(["exact", "delta"], 1))
def test_a_run_that_goes_on_from_compacted_copies(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(going_on, "CompactionProcess", CompactedAtOnce)
    quantization = None
    if method == "delta":
        quantization = Quantization(method="delta", mean_bits=3, exact_below_rows=0)
    after = CompactAfter(links=2)
    job = Job(tmp_path, quantization=quantization, compact_after=after, retention=Retention(1))
    every, seldom = (Follower(tmp_path, quantized(Net(), 8)) for _ in range(2))
    whole = 0
    for seed in range(6):
        job.train(seed)
        job.save()
        assert job.saver._saver.going_on.wait(60)
        for follower in (every, seldom) if seed % 3 == 2 else (every,):
            version = follower.poll()
            assert version is not None
            assert version.step == seed + 1
            whole += version.whole
            assert differences(follower, quantized(restored(tmp_path), 8)) == []
    job.saver.close()
    chain, _ = newest(Folder(tmp_path))
    assert chain is not None
    baseline = parse_id(chain.baseline.id)
    assert baseline is not None
    assert baseline.is_copy
    assert whole <= 3, "a copy of what is served is not read again"


@pytest.mark.parametrize("damaged", [False, True])
def test_a_copy_of_what_follows_the_served_version(tmp_path: Path, damaged: bool) -> None:
    job = Job(tmp_path)
    follower = Follower(tmp_path, quantized(Net(), 4))
    for seed in range(3):
        job.train(seed)
        job.save()
        if seed < 2:
            follower.poll()
    job.saver.close()
    compact(tmp_path)
    if damaged:
        ids = [id for path in tmp_path.glob("seq-*") if (id := parse_id(path.name))]
        (original,) = [id.name for id in ids if id.step == 3 and not id.is_copy]
        (file,) = (tmp_path / original).glob("*.bin")
        content = bytearray(file.read_bytes())
        content[: len(content) // 2] = bytes(len(content) // 2)
        file.write_bytes(content)
    version = follower.poll()
    assert version is not None
    assert (version.step, version.whole) == (3, damaged)
    assert (version.error is not None) is damaged, "the damage is told, once"
    assert differences(follower, quantized(restored(tmp_path), 4)) == []
    again = follower.poll()
    assert again is not None
    assert (again.rows_applied, again.error) == (version.rows_applied, None)


def test_a_dense_part_stored_as_differences(tmp_path: Path) -> None:
    job = Job(tmp_path, dense="difference")
    often, seldom = (Follower(tmp_path, quantized(Net(), 8)) for _ in range(2))
    for seed in range(6):
        job.train(seed)
        job.save()
        assert often.poll() is not None
        assert differences(often, quantized(restored(tmp_path), 8)) == []
    assert seldom.poll() is not None
    assert differences(seldom, quantized(restored(tmp_path), 8)) == []
    chain, _ = newest(Folder(tmp_path))
    assert chain is not None
    chunks = read_indexes(Folder(tmp_path), chain.head)
    assert any(difference_of(chunk.entry) for chunk in chunks)
    job.saver.close()


def test_two_followers_of_one_model(tmp_path: Path) -> None:
    """One would write what the other says to be of its version."""
    job = Job(tmp_path)
    job.train(0)
    job.save()
    net = quantized(Net(), 8)
    one, other = Follower(tmp_path, net), Follower(tmp_path, net)
    one.poll()
    with pytest.raises(UnsupportedTable, match="another Follower of this process"):
        other.poll()
    apart = Follower(tmp_path, copy.deepcopy(net))
    apart.poll()
    del one
    gc.collect()
    other.poll()
    for follower in (apart, other):
        assert differences(follower, quantized(restored(tmp_path), 8)) == []
    job.saver.close()


def test_a_thread_ends_with_its_follower(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.train(0)
    job.save()
    follower = Follower(tmp_path, Net(), interval_seconds=0.01)
    follower.start()
    thread, alive = follower._thread, weakref.ref(follower)
    assert thread is not None
    del follower
    deadline = time.monotonic() + 60
    while thread.is_alive() and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert not thread.is_alive()
    assert alive() is None
    job.saver.close()


def test_a_compiled_model(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.train(0)
    job.save()
    compiled: Any = torch.compile(Net())  # when first called
    follower = Follower(tmp_path, compiled)
    follower.poll()
    wanted = restored(tmp_path)
    with follower.read() as (model, _), torch.no_grad():
        assert torch.equal(model.get_submodule("_orig_mod")(batch(1)), wanted(batch(1)))
    job.saver.close()


def test_a_thread_that_closes_its_follower_can_be_started_again(tmp_path: Path) -> None:
    """End the thread from ``on_version``, as a server that serves one version at a time may."""
    job, closed = Job(tmp_path), threading.Event()

    def close(version: Version) -> None:
        follower.close()
        closed.set()

    follower = Follower(tmp_path, Net(), interval_seconds=0.01, on_version=close)
    for step in (1, 2):
        job.train(step)
        job.save()
        follower.start()
        assert closed.wait(30), f"step {step} is not served"
        closed.clear()
        assert follower.version is not None
        assert follower.version.step == step
    job.saver.close()


def test_a_closed_follower_still_waits_for_predictions(tmp_path: Path) -> None:
    """Show what is newest by hand, as a server may that is about to end."""
    job = Job(tmp_path)
    follower = Follower(tmp_path, Net())
    predicting, leave = threading.Event(), threading.Event()

    def predict() -> None:
        with follower.read():
            predicting.set()
            leave.wait(30)

    job.train(0)
    job.save()
    follower.poll()
    thread = threading.Thread(target=predict)
    thread.start()
    assert predicting.wait(30)
    follower.close()
    for step in (1, 2):  # the second one goes where that prediction reads
        job.train(step)
        job.save()
        threading.Timer(0.2, leave.set).start() if step == 2 else None
        version = follower.poll()
        assert version is not None
        assert (version.step, version.error) == (step + 1, None)
    thread.join(30)
    job.saver.close()


def test_a_thread_that_outlives_close_ends_after_a_new_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let one thread alone follow once storage that was silent answers again."""
    job = Job(tmp_path)
    job.train(0)
    job.save()
    answers, names = threading.Event(), Folder.names

    def silent(folder: Folder) -> list[str]:
        answers.wait(60)
        return names(folder)

    follower = Follower(tmp_path, Net(), interval_seconds=0.01, timeout_seconds=30.0)
    monkeypatch.setattr(Folder, "names", silent)
    monkeypatch.setattr(follower, "_seconds", 0.1)  # of waiting for the thread
    follower.start()
    first = follower._thread
    assert first is not None
    time.sleep(0.1)
    follower.close()
    assert first.is_alive()
    follower.start()
    answers.set()
    first.join(30)
    assert not first.is_alive()
    follower.close()
    job.saver.close()
