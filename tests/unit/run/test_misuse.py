"""Accept users' guesses at the arguments of a Checkpointer, or name the right form in the error."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from tests.distributed import references
from tests.distributed.models import (
    CollectionSpec,
    Job,
    ModelSpec,
    TableSpec,
    uniform_plan,
)
from tests.distributed.states import gather
from tests.unit.run.jobs import checkpointer, make_job, train
from torchrec_checknrun import (
    Checkpointer,
    Consecutive,
    Intermittent,
    OneShot,
    PerRank,
    Quantization,
    Retention,
    RngState,
)
from torchrec_checknrun.errors import IncompatibleCheckpoint, RootInUse, UnsupportedState

pytestmark = pytest.mark.usefixtures("one_rank")


def test_a_pattern_of_no_table_is_told_of(
    tmp_path: Path, job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = {"bits": 4, "tables": {"*t0*": 8, "t0": 4, "users": 2}}
    with caplog.at_level(logging.WARNING), checkpointer(tmp_path, job, quantization=chosen):
        (line,) = (line for line in caplog.messages if "pattern" in line)
    assert "'t0', 'users'" in line
    assert "c.embedding_bags.t0" in line


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (8, Quantization(bits=8)),
        (None, Quantization()),
        ({"bits": 8}, Quantization(bits=8)),
        ({}, Quantization()),
        (
            {"bits": 4, "tables": {"*user*": 8, "*ad*": {"bits": 2}}},
            Quantization(
                bits=4, tables={"*user*": Quantization(bits=8), "*ad*": Quantization(bits=2)}
            ),
        ),
    ],
)
def test_a_width_stands_for_a_quantization(
    tmp_path: Path, job: Job, value: Any, wanted: Quantization
) -> None:
    with checkpointer(tmp_path, job, quantization=value) as saver:
        assert saver._saver.proposer.quantization == wanted


@pytest.mark.parametrize(
    ("name", "policy"),
    [("consecutive", Consecutive()), ("one_shot", OneShot()), ("intermittent", Intermittent())],
)
def test_a_name_stands_for_a_policy(tmp_path: Path, job: Job, name: str, policy: object) -> None:
    with checkpointer(tmp_path, job, policy=name) as saver:
        assert saver._saver.proposer._policy == policy


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"quantization": 9}, ["quantization must be Quantization(bits=8)", "not 9", "bits must"]),
        ({"quantization": "8"}, ["quantization must be", "not '8'"]),
        ({"quantization": True}, ["quantization must be", "not True"]),
        ({"quantization": [8]}, ["quantization must be", "not [8]"]),
        ({"quantization": {"bit": 8}}, ["quantization must be", "no 'bit'", "bits, method"]),
        ({"quantization": {"bits": "8"}}, ["quantization must be", "bits must be", "not '8'"]),
        ({"quantization": {"bits": 8, "tables": [1]}}, ["quantization must be"]),
        ({"quantization": {"bits": 8, "compress": "no"}}, ["compress must be True or False"]),
        ({"policy": "consecutively"}, ["policy must be an object such as", "'consecutive'"]),
        ({"policy": Consecutive}, ["policy must be an object such as Full()"]),
        ({"every_steps": "10"}, ["every_steps must be at least 1 step", "1000", "not '10'"]),
        ({"every_steps": 0}, ["every_steps must be at least 1 step", "not 0"]),
        ({"every_steps": 2.5}, ["every_steps must be", "not 2.5"]),
        ({"every_steps": True}, ["every_steps must be", "not True"]),
        ({"every_steps": [10]}, ["every_steps must be", "not [10]"]),
        ({"triggers": "AtEnd"}, ["triggers must be a list, as triggers=[AtEnd()]"]),
        ({"retention": 2}, ["retention must be Retention(keep=...)", "not 2"]),
        ({"resume": "yes"}, ["resume must be one of ('auto', 'must', 'never')", "not 'yes'"]),
        ({"resume": True}, ["resume must be one of"]),
        ({"max_failures": True}, ["max_failures must be", "such as 2", "not True"]),
        ({"timeout_seconds": "60"}, ["timeout_seconds must be positive", "1800", "not '60'"]),
        ({"timeout_seconds": True}, ["timeout_seconds must be", "not True"]),
    ],
    ids=str,
)
def test_a_mistake_is_named_with_an_example(
    tmp_path: Path, job: Job, options: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ValueError, match="must be") as caught:
        checkpointer(tmp_path, job, **options)
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("bits", 8, "quantization=Quantization(bits=8)"),
        ("keep", 3, "retention=Retention(keep=2"),
        ("on_sigterm", True, "triggers=[OnSigterm("),
        ("at_end", True, "triggers=[AtEnd()]"),
        ("every_seconds", 600, "triggers=[EverySeconds(600)]"),
        ("optimizer_state", "log8", 'optimizer="log8"'),
        ("tables", {}, "quantization=Quantization(tables="),
        ("every_step", 3, "did you mean 'every_steps'?"),
        ("quantisation", 4, "did you mean 'quantization'?"),
        ("states", {}, "did you mean 'state'?"),
        ("optimizer", torch.nn.Linear(1, 1), "state={'optimizer': optimizer}"),
        ("scheduler", torch.nn.Linear(1, 1), "state={'scheduler': scheduler}"),
        ("verbose", True, "see help(Checkpointer) for its arguments, such as every_steps=1000"),
    ],
)
def test_names_that_only_hydra_knows(
    tmp_path: Path, job: Job, name: str, value: object, instead: str
) -> None:
    with pytest.raises(TypeError) as caught:
        checkpointer(tmp_path, job, **{name: value})
    assert name in str(caught.value)
    assert instead in str(caught.value)


def test_every_key_of_the_hydra_group_is_known() -> None:
    """Know every key of the Hydra group in the constructor or in its error message."""
    from dataclasses import fields
    from inspect import signature

    from torchrec_checknrun.hydra_config.config import CheckNRunConfig
    from torchrec_checknrun.options.unknown import _ONLY_HYDRA

    keys = {field.name for field in fields(CheckNRunConfig)} - {"_target_", "_convert_"}
    arguments = signature(Checkpointer).parameters.keys()
    assert keys - arguments <= _ONLY_HYDRA.keys()
    assert not _ONLY_HYDRA.keys() & arguments


@pytest.mark.parametrize("root", [None, "", "  ", 5, b"/data/run", ["/data"], Path])
def test_a_root_is_a_folder_or_url(job: Job, root: Any) -> None:
    with pytest.raises(ValueError, match=r"root must be a folder or URL such as .*not "):
        Checkpointer(root, model=job.model)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ([object()], ["state must map names to objects", '{"optimizer": optimizer']),
        ("optimizer", ["state must map names to objects"]),
        ({1: PerRank(torch.nn.Linear(1, 1))}, ["names in state must be text", "not 1"]),
        ({"": torch.nn.Linear(1, 1)}, ["names in state must be text"]),
        ({"lr": 0.1}, ["state 'lr' is a float without state_dict()", "wrap it"]),
        ({"optimizer": None}, ["state 'optimizer' is a NoneType"]),
        ({"optimizer": torch.optim.SGD}, ["state 'optimizer' is a type"]),
        ({"rng": PerRank({})}, ["state 'rng' is a dict without state_dict()"]),  # type: ignore[arg-type]  # refused
        ({"rng": PerRank(RngState())}, ["'rng' is declared twice", "as RngState()"]),  # type: ignore[arg-type]  # refused
        ({"model": torch.nn.Linear(1, 1)}, ["the model's own name"]),
    ],
    ids=str,
)
def test_state_maps_names_to_objects(
    tmp_path: Path, job: Job, state: Any, words: list[str]
) -> None:
    with pytest.raises(ValueError, match="state") as caught:
        Checkpointer(tmp_path, model=job.model, state=state)
    assert [word for word in words if word not in str(caught.value)] == []


def plain_tables() -> EmbeddingBagCollection:
    tables = EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=10, feature_names=["f"])
    return EmbeddingBagCollection([tables], device=torch.device("cpu"))


def test_a_model_that_is_not_sharded(tmp_path: Path) -> None:
    model = nn.ModuleDict({"sparse": plain_tables()})
    with pytest.raises(ValueError, match=r"model is not sharded: sparse .*DistributedModelP"):
        Checkpointer(tmp_path, model=model)
    for no_model in (None, "model", nn.Linear, plain_tables):
        with pytest.raises(ValueError, match=r"model must be a module such as Distr"):
            Checkpointer(tmp_path, model=no_model)  # type: ignore[arg-type]  # on purpose
    assert list(tmp_path.iterdir()) == []


def test_tables_that_stay_unsharded_are_told_of(
    tmp_path: Path, job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    job.model.beside = plain_tables()
    checkpointer(tmp_path, job).close()
    assert "not sharded, and so written in full with every checkpoint: beside" in caplog.text


def test_a_model_without_tables_is_saved(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with Checkpointer(tmp_path, model=model) as saver:
        saver.step()
        saver.save()
        wanted = model.weight.detach().clone()
        model.weight.data.zero_()
        assert saver.restore() is not None
    assert torch.equal(model.weight, wanted)


class TestTwoOnOneRoot:
    """Refuse two writers on one root, each of which would delete the other's checkpoints."""

    def test_the_second_may_not_write(self, tmp_path: Path, job: Job) -> None:
        with checkpointer(tmp_path, job) as first:
            train(job, first)
            first.save()
            other = make_job(seed=3)
            with checkpointer(tmp_path, other) as second:
                assert second.restore() is not None  # reading disturbs no writer
                for act in (second.step, second.save):
                    with pytest.raises(RootInUse, match=r"another Checkpointer .*close\(\) it"):
                        act()
            train(job, first)
            assert first.save() is not None

    def test_after_the_first_is_closed_the_second_may(self, tmp_path: Path, job: Job) -> None:
        first = checkpointer(tmp_path, job)
        train(job, first)
        first.save()
        first.close()
        with checkpointer(tmp_path, job) as second:
            second.restore()
            train(job, second)
            assert second.save() is not None

    def test_one_that_was_dropped_is_no_obstacle(self, tmp_path: Path, job: Job) -> None:
        first: Checkpointer | None = checkpointer(tmp_path, job)
        assert first is not None
        train(job, first)
        first.save()
        first = None
        with checkpointer(tmp_path, job) as second:
            second.restore()
            train(job, second)
            assert second.save() is not None


class TestMissingRoot:
    def test_a_typo_is_told_of_loudly(
        self, tmp_path: Path, job: Job, caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / "run-17").mkdir()
        with checkpointer(tmp_path / "run-71", job) as saver:
            assert saver.restore() is None
        (record,) = (r for r in caplog.records if "FRESH START" in r.getMessage())
        assert record.levelno >= logging.WARNING
        assert f"{tmp_path}/run-71 does not exist" in record.getMessage()
        assert "run-17" in record.getMessage()
        assert not (tmp_path / "run-71").exists()

    @pytest.mark.parametrize(
        ("files", "words"),
        [([], "is empty"), (["notes.txt"], "holds no checkpoint, but notes.txt")],
    )
    def test_what_is_there_instead(
        self, tmp_path: Path, job: Job, files: list[str], words: str
    ) -> None:
        root = tmp_path / "run"
        root.mkdir()
        for name in files:
            (root / name).touch()
        with checkpointer(root, job) as saver, pytest.raises(Exception, match=words):
            saver.restore(required=True)

    def test_required_raises_without_a_checkpoint(self, tmp_path: Path, job: Job) -> None:
        from torchrec_checknrun.errors import CheckpointNotFound

        with checkpointer(tmp_path / "run", job) as saver:
            with pytest.raises(CheckpointNotFound, match=r"nothing to restore.*required=False"):
                saver.restore(required=True)
            assert saver.restore() is None
            assert saver.restore(required=False) is None
        with checkpointer(tmp_path / "run", job, resume="must") as saver:
            with pytest.raises(CheckpointNotFound, match="nothing to restore"):
                saver.restore()
            assert saver.restore(required=False) is None
            train(job, saver)
            saver.save()
        with checkpointer(tmp_path / "run", make_job(1), resume="must") as saver:
            assert saver.restore() is not None
            assert saver.restore(required=True) is not None

    def test_never_starts_fresh(
        self, tmp_path: Path, job: Job, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Start fresh, and delete no existing checkpoint."""
        with checkpointer(tmp_path, job) as saver:
            train(job, saver)
            saver.save()
            train(job, saver)
            saver.save()
        before = {path.name for path in tmp_path.glob("seq-*")}
        other = make_job(seed=2)
        fresh = checkpointer(tmp_path, other, resume="never", retention=Retention(keep=1))
        with fresh as saver:
            assert saver.restore() is None
            assert saver.steps == 0
            assert saver.restore(required=False) is None
            assert caplog.text.count("FRESH START, since resume is 'never'") == 2
            for _ in range(4):
                train(other, saver)
                report = saver.save()
            assert report is not None
            assert report.chain_length == 4
        assert before <= {path.name for path in tmp_path.glob("seq-*")}

    def test_going_back_tells_what_becomes_of_the_newer_ones(
        self, tmp_path: Path, job: Job, caplog: pytest.LogCaptureFixture
    ) -> None:
        ids = []
        with checkpointer(tmp_path, job) as saver:
            for _ in range(2):
                train(job, saver)
                ids.append(saver.save().id)
        with checkpointer(tmp_path, job) as saver:
            saver.restore(ids[1])
            saver.restore()
            assert "newer" not in caplog.text
            saver.restore(ids[0])
        (text,) = (m for m in caplog.messages if "newer" in m)
        assert f"newer than {ids[0]}" in text
        assert "retention deletes" in text

    @pytest.mark.parametrize("how", ["forgotten", "refused"])
    def test_without_a_restore_nothing_older_is_deleted(
        self, tmp_path: Path, job: Job, caplog: pytest.LogCaptureFixture, how: str
    ) -> None:
        """Keep the newest chain of a run that nobody has asked for, and say so once."""
        with checkpointer(tmp_path, job) as saver:
            for _ in range(2):
                train(job, saver)
                head = saver.save().id
        before = {path.name for path in tmp_path.glob("seq-*")}
        assert "restored" not in caplog.text
        other = make_job(seed=2)
        with checkpointer(tmp_path, other, retention=Retention(keep=1)) as saver:
            if how == "refused":
                with pytest.raises(IncompatibleCheckpoint):
                    saver.restore(map={"t0": "no such table"})
            for _ in range(4):
                train(other, saver)
                saver.save()
        assert before <= {path.name for path in tmp_path.glob("seq-*")}
        (text,) = (m for m in caplog.messages if m.startswith("nothing was restored"))
        assert f"holds checkpoints up to {head} (step 2)" in text
        assert f"`checknrun pin {tmp_path} {head}`" in text


def of_another_model() -> Job:
    """Make a job whose tables have names of their own."""
    spec = ModelSpec((CollectionSpec("teacher", (TableSpec("x", 30, 4, ("f0",)),)),))
    return Job.build(spec, uniform_plan(spec, "table_wise", 1))


def test_an_optimizer_of_another_models_tables_is_refused(tmp_path: Path, job: Job) -> None:
    other = of_another_model()
    state = {"optimizer": job.optimizer, "other": other.optimizer, "teacher": other.model}
    refused = pytest.raises(UnsupportedState, match=r"'other' holds .*teacher.*ModuleDict")
    with refused:
        Checkpointer(tmp_path, model=job.model, state=state)


def test_both_models_as_one_are_saved_with_their_rates(tmp_path: Path, job: Job) -> None:
    def begin(job: Job, other: Job) -> Checkpointer:
        both = nn.ModuleDict({"first": job.model, "second": other.model})
        state = {"optimizer": job.optimizer, "other": other.optimizer}
        return Checkpointer(tmp_path, model=both, state=state)

    other = of_another_model()
    for group in other.model.fused_optimizer.param_groups:
        group["lr"] = 0.0625
    job.train()
    other.train()
    with begin(job, other) as saver:
        saver.save()
    wanted = [gather(job), gather(other)]
    job, other = make_job(seed=7), of_another_model()
    with begin(job, other) as saver:
        saver.restore()
    for found, saved in zip([gather(job), gather(other)], wanted, strict=True):
        assert references.differences(found, saved, None) == []
    assert other.model.fused_optimizer.param_groups[0]["lr"] == 0.0625
