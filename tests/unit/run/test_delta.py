"""Tables stored as differences to the last checkpoint, through the public Checkpointer."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed.models import CollectionSpec, Job, ModelSpec, TableSpec
from tests.examples import ALL, some_of
from tests.unit.run.deltas import (
    STEP,
    TABLES,
    chain,
    delta,
    expected,
    live,
    make_job,
    manifest,
    restored,
    same,
    saving,
    sound,
    train,
)
from torchrec_checknrun import (
    Consecutive,
    Quantization,
    Retention,
    load_tables,
)
from torchrec_checknrun.compaction.compact import compact
from torchrec_checknrun.tools.diff import compare

pytestmark = pytest.mark.usefixtures("one_rank", "state_scheme")


@pytest.fixture
def job(one_rank: None) -> Job:
    return make_job()


def test_every_link_restores_its_integers(tmp_path: Path, job: Job) -> None:
    made = chain(tmp_path, job, 20 if ALL else 10)
    assert sound(tmp_path) == []
    kinds = [manifest(tmp_path, name)["kind"] for name, _ in made]
    assert kinds[:2] == ["full", "differential"]
    for name, wanted in made:
        assert same(restored(tmp_path, name), wanted) == []
    assert same(restored(tmp_path), made[-1][1]) == []


def test_a_chain_goes_on_where_it_was_restored(tmp_path: Path, job: Job) -> None:
    """Restart after every checkpoint: integers are rebuilt, and the next one is a link."""
    chain(tmp_path, job, 1)
    for _ in range(4):
        other = make_job(seed=7)
        with saving(tmp_path, other) as saver:
            assert saver.restore() is not None
            assert same(live(saver), expected(saver)) == []
            train(other, saver)
            report = saver.save()
            wanted = expected(saver)
            assert saver._saver.lineage.previous is not None
            previous = manifest(tmp_path, report.id)["parent"]
        assert previous is not None or report.kind == "full"
        assert same(restored(tmp_path), wanted) == []
    assert sound(tmp_path) == []


@pytest.mark.parametrize(
    ("fused", "options"),
    some_of(
        itertools.product(
            ["rowwise_adagrad", "adagrad", "sgd"],
            [{}, {"mean_bits": 4.0}, {"tail": True}, {"optimizer": "log8"}],
        ),
        *(1, 2, 7, 8),
    ),
)
def test_optimizers_and_options(tmp_path: Path, fused: str, options: dict[str, Any]) -> None:
    spec = ModelSpec((CollectionSpec("c", TABLES),), fused=fused)
    made = chain(tmp_path, make_job(spec=spec), 3, quantization=delta(**options))
    found = restored(tmp_path, spec=spec)
    weights = {name: value for name, value in made[-1][1].items() if "/" not in name}
    assert same({name: found[name] for name in weights}, weights) == []
    assert sound(tmp_path) == []


def test_steps_follow_the_optimizers_state(tmp_path: Path, job: Job) -> None:
    with saving(tmp_path, job) as saver:
        train(job, saver, 5)
        saver.save()
        for shard in saver._target.tracked.shards:
            sums = shard.local.optimizer["momentum1"].numpy().astype(np.float64)
            (held,) = (
                one for (table, _), one in saver._saver._links._held.items() if table == shard.table
            )
            rows = held.gather(np.arange(len(sums)))
            trained = sums > 0
            assert trained.any()
            assert np.array_equal(rows.kind == 1, trained)  # the others keep their bits
            wanted = np.rint(np.log2(STEP) - 0.5 * np.log2(sums[trained]))
            largest = abs(shard.local.weight.detach().numpy()[trained]).max(axis=1)
            floor = np.frexp(largest)[1] - 24
            assert np.array_equal(rows.exponent[trained], np.maximum(wanted, floor))


def test_tail_limits_steps_by_the_largest_rate(tmp_path: Path, job: Job) -> None:
    with saving(tmp_path, job, quantization=delta(step=1e6, tail=True)) as saver:
        train(job, saver, 3)
        saver.save()
        for held in saver._saver._links._held.values():
            rows = held.gather(np.arange(held.rectangle.rows))
            assert rows.exponent[rows.kind == 1].max() == -4  # the rate is 0.1


def test_a_new_base_when_links_exceed_the_last(tmp_path: Path, job: Job) -> None:
    made = chain(tmp_path, job, 30)
    kinds = [manifest(tmp_path, name)["kind"] for name, _ in made]
    assert kinds.count("full") > 1
    size = {name: delta_bytes(manifest(tmp_path, name)) for name, _ in made}
    base, links = 0, 0
    for (name, _), kind in zip(made, kinds, strict=True):
        if kind == "full":
            assert not base or links > base
            base, links = size[name], 0
        else:
            assert links <= base
            links += size[name]


def delta_bytes(found: dict[str, Any]) -> int:
    tables = (found["tables"][name] for name in found["deltas"])
    return sum(t["weight_bytes"] + t["ids_bytes"] + t["optimizer_bytes"] for t in tables)


def test_what_is_outside_of_training(tmp_path: Path, job: Job) -> None:
    """Evicted rows, NaN, infinities, denormals, rows written by hand."""
    table = "c.embedding_bags.t0"
    with saving(tmp_path, job) as saver:
        train(job, saver, 3)
        saver.save()
        (shard,) = (s for s in saver._target.tracked.shards if s.table == table)
        sums = (1e-3, 1e-3, 3e38, 1e-41, 1e-3, 0.0, float("inf"), float("nan"), 1e-3)
        values = (float("nan"), 1e-40, 3e38, float("inf"), -0.0, 0.01, 0.01, 0.02, 0.03)
        for value, sum_of_squares in zip(values, sums, strict=True):
            ids = torch.tensor([1, 5, 9])
            weight = torch.full((3, 8), value)
            state = torch.full((3,), sum_of_squares)
            shard.write_rows(ids, weight, {"momentum1": state})
            train(job, saver)
            saver.save()
            wanted = expected(saver)
            assert same(restored(tmp_path), wanted) == []
    assert sound(tmp_path) == []


def test_tables_may_mix_codecs(tmp_path: Path, job: Job) -> None:
    """Each table follows its own rule in every reader."""
    chosen = Quantization(exact_below_rows=0, tables={"*t0": delta()})
    made = chain(tmp_path, job, 4, quantization=chosen, policy=Consecutive())
    other = make_job(seed=7)
    with saving(tmp_path, other, quantization=chosen) as saver:
        saver.restore()
        assert same(live(saver), made[-1][1]) == []
        train(other, saver)
        assert saver.save().kind == "differential"
        wanted = expected(saver)
    compact(tmp_path)
    assert same(restored(tmp_path), wanted) == []
    assert sound(tmp_path) == []


def test_another_choice_of_codecs_begins_with_a_base(tmp_path: Path, job: Job) -> None:
    chain(tmp_path, job, 1)
    for chosen in (Quantization(bits=8, exact_below_rows=0), delta(), delta(method="fisher")):
        other = make_job(seed=7)
        with saving(tmp_path, other, quantization=chosen, policy=Consecutive()) as saver:
            saver.restore()
            train(other, saver)
            assert saver.save().kind == "full"


def test_compacted_links_are_the_same_integers(tmp_path: Path, job: Job) -> None:
    """Compact after each link, restore, and go on from the copy."""
    made = chain(tmp_path, job, 5)
    for name, wanted in made:
        report = compact(tmp_path, name)
        if report is None:
            continue
        copy = manifest(tmp_path, report.id)
        original = manifest(tmp_path, name)
        assert copy["kind"] == "full"
        for table, digests in copy["deltas"].items():
            assert digests == {"before": None, "after": original["deltas"][table]["after"]}
        assert same(restored(tmp_path, report.id), wanted) == []
    assert sound(tmp_path) == []
    other = make_job(seed=7)
    with saving(tmp_path, other) as saver:
        assert saver.restore() is not None  # the copy, which is newer
        train(other, saver)
        assert saver.save().kind == "differential"
        wanted = expected(saver)
    assert same(restored(tmp_path), wanted) == []


def test_tables_of_such_a_chain_warm_start_another_model(tmp_path: Path, job: Job) -> None:
    made = chain(tmp_path, job, 3)
    other = make_job(seed=7)
    load_tables(tmp_path, other.model, ["t0"])
    with saving(tmp_path / "other", other) as saver:
        found = live(saver)
    (name,) = (n for n in found if "t0" in n and "/" not in n)
    assert found[name].tobytes() == made[-1][1][name].tobytes()


def test_tools_see_what_a_restore_gives(tmp_path: Path, job: Job) -> None:
    made = chain(tmp_path, job, 3)
    found = compare(tmp_path, made[1][0], made[3][0], window_bytes=300)
    for table in found.tables:
        (name,) = (n for n in made[1][1] if n.startswith(f"{table.table}[") and "/" not in n)
        one, other = made[1][1][name], made[3][1][name]
        assert table.changed_rows == int((one != other).any(axis=1).sum()) > 0


def test_retention_keeps_whole_chains(tmp_path: Path, job: Job) -> None:
    with saving(tmp_path, job, retention=Retention(keep=1)) as saver:
        for _ in range(12 if ALL else 6):
            train(job, saver)
            saver.save()
            assert saver._saver.writer._pruner is not None
            saver._saver.writer._pruner.wait(60)
            assert same(restored(tmp_path), expected(saver)) == []


def test_beyond_the_budget_tables_stand_alone(
    tmp_path: Path, job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = delta(reference_bytes=600)  # t0: 40 rows of 12 bytes; t1 is larger
    with saving(tmp_path, job, quantization=chosen) as saver:
        train(job, saver)
        saver.save()
        train(job, saver)
        report = saver.save()
        wanted = live(saver)
        deltas = expected(saver)
    assert "'fisher' instead of 'delta'" in caplog.text
    assert "t1" in caplog.text
    found = manifest(tmp_path, report.id)
    assert list(found["deltas"]) == ["c.embedding_bags.t0"]
    assert found["tables"]["c.embedding_bags.t1"]["codecs"][0]["name"] in ("fisher", "exact")
    other = make_job(seed=7)
    with saving(tmp_path, other, quantization=chosen) as saver:
        saver.restore()
        values = live(saver)
    for name in wanted:
        if "/" in name and "t1" in name and chosen.optimizer == "logdelta":  # log8 here
            assert np.allclose(values[name], wanted[name], rtol=0.07, atol=0)
        elif "t0" in name or "/" in name:
            assert values[name].tobytes() == deltas[name].tobytes()
        else:
            assert np.abs(values[name] - wanted[name]).max() < 1


def test_manifests_are_of_a_newer_version_only_with_links(tmp_path: Path, job: Job) -> None:
    """Without differences of the dense part, which are of that version as well."""
    chain(tmp_path / "delta", job, 1, dense="whole")
    fisher = delta(method="fisher")
    chain(tmp_path / "fisher", make_job(), 1, quantization=fisher, dense="whole")
    for path in tmp_path.glob("*/seq-*"):
        found = manifest(path.parent, path.name)
        with_links = path.parent.name == "delta"
        assert found["format_version"] == 1 + with_links
        assert ("deltas" in found) == with_links


def test_grown_tables_begin_with_a_base(tmp_path: Path, job: Job) -> None:
    made = chain(tmp_path, job, 2)
    tables = tuple(TableSpec(t.name, t.rows + 7, t.dim, t.features) for t in TABLES)
    spec = ModelSpec((CollectionSpec("c", tables),))
    other = make_job(seed=7, spec=spec)
    with saving(tmp_path, other) as saver:
        saver.restore()
        found = live(saver)
        for name, wanted in made[-1][1].items():
            (key,) = (
                k
                for k in found
                if k.split("[")[0] == name.split("[")[0] and k.split("/")[1:] == name.split("/")[1:]
            )
            assert found[key][: len(wanted)].tobytes() == wanted.tobytes()
        train(other, saver)
        assert saver.save().kind == "full"
        wanted_now = expected(saver)
    assert same(restored(tmp_path, spec=spec), wanted_now) == []


def test_forks_from_an_older_link(tmp_path: Path, job: Job) -> None:
    made = chain(tmp_path, job, 3)
    for name, _ in itertools.islice(made, 1, 3):
        other = make_job(seed=7)
        with saving(tmp_path, other) as saver:
            saver.restore(name)
            train(other, saver, 2)
            saver.save()
            wanted = expected(saver)
        assert same(restored(tmp_path), wanted) == []
    assert sound(tmp_path) == []


def test_compaction_beside_a_live_run(tmp_path: Path, job: Job) -> None:
    """Compact after every link while the run goes on with its own chain."""
    with saving(tmp_path, job) as saver:
        kinds = []
        for _ in range(8 if ALL else 5):
            train(job, saver)
            report = saver.save()
            kinds.append(report.kind)
            wanted = expected(saver)
            compact(tmp_path, report.id)
            assert same(restored(tmp_path), wanted) == []
            assert same(restored(tmp_path, report.id), wanted) == []
    assert kinds.count("differential") > 3
    assert sound(tmp_path) == []
