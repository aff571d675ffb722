"""Check the policies' figures: simulated sizes are real ones; curves have the paper's shapes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.dlrm_criteo.synthetic import Synthetic
from recipes.figures import plots, policies
from recipes.figures.lookups import Lookups, batches_until, read_slots
from recipes.figures.policies import POLICIES, simulate
from recipes.figures.simulated_run import Run
from recipes.figures.small_job import small_job
from tests.examples import examples
from torchrec_checknrun import Checkpointer, Quantization
from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.policy import Decision
from torchrec_checknrun.root.checkpoints import committed, read_manifest
from torchrec_checknrun.store.folder import Folder

TABLES = [5, 40, 300]


class InTurns:
    """A policy with every kind of decision."""

    def decide(self, history: Sequence[Manifest]) -> Decision:
        kinds = [Decision.SINCE_BASELINE, Decision.SINCE_BASELINE, Decision.SINCE_LAST]
        return [*kinds, Decision.FULL][len(history) - 1]


@settings(max_examples=examples(30), deadline=None)
@given(
    slots=st.lists(st.integers(0, 20), min_size=1, max_size=6),
    seed=st.integers(0, 100),
)
def test_a_window_holds_what_was_looked_up_in_it(slots: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    lookups, seen = Lookups(TABLES), []
    for count in slots:
        sparse = np.stack([rng.integers(0, rows, count) for rows in TABLES], axis=1)
        lookups.add(sparse)
        lookups.end_slot()
        seen.append(sparse)
    for slot in range(len(slots)):
        window = np.concatenate(seen[slot:])
        counts = [len(np.unique(column)) for column in window.T]
        assert [table.count for table in lookups.since(slot)] == counts
        assert lookups.fractions()[slot] == pytest.approx(sum(counts) / sum(TABLES))
    assert len(lookups.fractions()) == len(slots)


def test_only_whole_slots_are_read() -> None:
    dataset = Synthetic([50] * 26, samples=1000, holdout_every=0)
    slots = list(read_slots(dataset, batch=30, batches=4, limit=11))
    assert [[part.shape for part in slot] for slot in slots] == [[(30, 26)] * 4] * 2


def test_the_interval_that_modifies_a_part_of_the_rows() -> None:
    tables = [2000] * 26
    dataset = Synthetic(tables, samples=4000, vocabulary_start=1, holdout_every=0)
    number = batches_until(dataset, tables, 20, 0.26)
    lookups, at_end = Lookups(tables), []
    for (sparse,) in read_slots(dataset, 20, 1, number):
        lookups.add(sparse)
        at_end.append(lookups.modified_fraction)
    assert at_end[-1] >= 0.26 > at_end[int(0.9 * number)]
    with pytest.raises(ValueError, match="after all 4000 samples"):
        batches_until(dataset, tables, 20, 0.99)


@pytest.mark.parametrize("bits", [None, 4])
def test_simulated_checkpoints_weigh_what_real_ones_do(tmp_path: Path, bits: int | None) -> None:
    overrides = ["model.scale=0.001", "trainer.batch_size=256", "trainer.eval_samples=256"]
    policy = InTurns()
    with small_job(overrides) as job:
        assert isinstance(job.reader.dataset, Synthetic)
        lookups = Lookups(job.reader.dataset.num_embeddings.tolist())
        dim = job.shards[0].shape.dim
        run = Run(policy, bits, lookups.num_embeddings, dim)
        checkpointer = Checkpointer(
            tmp_path,
            model=job.model,
            policy=policy,
            quantization=Quantization(bits=bits),
            retention=None,
        )
        for interval in range(6):
            batches = job.batches(2)
            job.train(batches)
            for batch in batches:
                lookups.add(batch.sparse_features.values().view(26, -1).T.numpy())
            lookups.end_slot()
            run.save(lookups, 2 * 256 * interval)
            checkpointer.save()
        checkpointer.close()
    root = Folder(tmp_path)
    real = [read_manifest(root, name) for name in reversed(committed(root))]
    assert [one.kind for one in run.checkpoints] == [manifest.kind for manifest in real]
    assert [manifest.kind for manifest in real].count("full") == 2
    for one, manifest in zip(run.checkpoints, real, strict=True):
        totals = manifest.tables.values()
        assert one.modified_fraction == manifest.modified_fraction
        assert one.bytes == sum(t.weight_bytes + t.ids_bytes + t.optimizer_bytes for t in totals)


def test_shapes_are_those_of_the_paper() -> None:
    tables = [3, 20, 6000, 12_000] + [500] * 22
    dataset = Synthetic(tables, samples=36_000, vocabulary_start=1, holdout_every=0)
    widths = (None, 2)
    numbers = simulate(dataset, tables, 500, 1, 72, 16, widths)
    assert numbers["interval_samples"] == 2000
    assert numbers["intervals"] == 18

    for line in numbers["growth"]:  # concave, and alike from every start
        gains = np.diff([0.0, *line["fractions"][11::12]])
        assert (gains > 0).all()
        assert (np.diff(gains) < 0).all()
        common = min(len(line["fractions"]), 16)
        first = numbers["growth"][0]["fractions"][:common]
        assert line["fractions"][:common] == pytest.approx(first, rel=0.05)
    means = []
    for line in numbers["per_interval"]:  # flat, and sublinear in the interval
        assert np.ptp(line["fractions"]) < 0.1 * np.mean(line["fractions"])
        means.append(np.mean(line["fractions"]))
    assert all(one < two < 2 * one for one, two in itertools.pairwise(means))

    runs = {(run["bits"], run["policy"]): run for run in numbers["runs"]}
    assert set(runs) == set(itertools.product(widths, POLICIES))
    for bits in widths:
        sizes, kept = (
            {
                policy: [checkpoint[key] for checkpoint in runs[bits, policy]["checkpoints"]]
                for policy in POLICIES
            }
            for key in ("bytes", "kept_bytes")
        )
        full = sizes["Full"][0]
        assert sizes["Full"] == kept["Full"] == [full] * 18
        assert sizes["OneShot"][1:] == sorted(sizes["OneShot"][1:])
        assert max(sizes["OneShot"][1:]) < full
        assert kept["OneShot"][1:] == [full + size for size in sizes["OneShot"][1:]]
        assert np.ptp(sizes["Consecutive"][1:]) < 0.1 * sizes["Consecutive"][1]
        assert kept["Consecutive"] == list(itertools.accumulate(sizes["Consecutive"]))
        assert max(kept["Intermittent"]) < 2 * full
        _check_decisions(runs[bits, "Intermittent"])
        least = sorted(POLICIES, key=lambda policy: float(runs[bits, policy]["mean_bytes"]))
        assert least[0] == "Consecutive"
        assert least[-1] == "Full"


def _check_decisions(run: dict[str, Any]) -> None:
    """Check the decisions by the rule of section 5.1; expect more than one baseline."""
    checkpoints, sizes = run["checkpoints"], list[float]()
    assert len(run["baselines"]) > 2
    for number, checkpoint in enumerate(checkpoints[1:], 1):
        full = bool(sizes) and 1 + sum(sizes) <= (len(sizes) + 1) * sizes[-1]
        assert (number in run["baselines"]) == full
        assert checkpoint["kind"] == ("full" if full else "differential")
        sizes = [] if full else [*sizes, checkpoint["fraction"]]
        assert sizes == sorted(sizes)  # one tooth of the saw


@pytest.mark.parametrize("from_file", [False, True])
def test_the_command_writes_figures(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    from_file: bool,
) -> None:
    pytest.importorskip("matplotlib", reason="figures are drawn with matplotlib")
    monkeypatch.setattr(policies, "QUICK", policies.Size(samples=40_000, scale=0.0001))
    options = ["--quick", "--out", str(tmp_path / "out"), "--bits", "exact", "2"]
    if from_file:
        tables = [1000] * 26
        samples = Synthetic(tables, samples=4000, holdout_every=0).generate(np.arange(4000))
        lines = (
            "\t".join(["0", *["1"] * 13, *(f"{row:08x}" for row in sparse)])
            for sparse in samples.sparse
        )
        (tmp_path / "train.txt").write_text("\n".join(lines) + "\n")
        options += ["--data", str(tmp_path / "train.txt"), "--scale", "0.00005"]
        options += ["--interval", "400"]
        monkeypatch.setattr(plots, "draw_policies", lambda numbers, folder: None)
    monkeypatch.setattr("sys.argv", ["", *options])
    assert policies.main() == 0
    numbers = json.loads((tmp_path / "out" / "policies.json").read_text())
    assert numbers["source"] == ("train.txt" if from_file else "synthetic")
    assert "Intermittent" in capsys.readouterr().out
    if from_file:
        assert (numbers["interval_samples"], numbers["intervals"]) == (400, 10)
    else:
        for name in plots.POLICY_NAMES:
            assert (tmp_path / "out" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        first = numbers["per_interval"][2]
        assert first["interval_samples"] == numbers["interval_samples"]
        assert first["fractions"][0] == pytest.approx(0.26, abs=0.03)


def test_too_few_samples_are_an_error_that_helps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options = ["--samples", "2000", "--scale", "0.01", "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["", *options])
    with pytest.raises(SystemExit, match="smaller --scale or --fraction"):
        policies.main()
