"""A restore of any checkpoint of any run gives the state that the run had at that save."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from tests.distributed import references
from tests.distributed.models import Job, ModelSpec, Plan, random_plan, random_spec, uniform_plan
from tests.distributed.states import gather, scramble
from tests.distributed.worker_pool import WorkerPool
from tests.examples import examples, some_of
from torchrec_checknrun import Checkpointer, Consecutive, Full, Intermittent, OneShot, Quantization
from torchrec_checknrun.policy import Policy

Workers = Callable[[int], WorkerPool]

POLICIES: dict[str, Policy] = {
    "full": Full(),
    "one_shot": OneShot(),
    "consecutive": Consecutive(),
    "intermittent": Intermittent(),
}


@dataclass(frozen=True)
class Segment:
    """One life of the training processes: the steps before each checkpoint."""

    intervals: tuple[int, ...]
    policy: str = "one_shot"
    bits: int | None = None


def checkpointer(root: str, job: Job, segment: dict[str, Any]) -> Checkpointer:
    return Checkpointer(
        root,
        model=job.model,
        retention=None,
        state={"optimizer": job.optimizer, "job": job},
        policy=POLICIES[segment["policy"]],
        quantization=Quantization(segment["bits"], "asymmetric", exact_below_rows=0),
        chunk_bytes=700,
    )


def train(
    root: str, copies: str, spec: dict[str, Any], plan: Plan, segments: list[dict[str, Any]]
) -> list[str]:
    """Train, save and resume; copy the state of every checkpoint, and return their ids."""
    ids: list[str] = []
    for number, segment in enumerate(segments):
        job = Job.build(ModelSpec.from_json(spec), plan, seed=100 * number + len(list_ids(root)))
        dist.barrier()
        with checkpointer(root, job, segment) as saver:
            saver.restore()
            for steps in segment["intervals"]:
                for _ in range(steps):
                    job.train()
                    saver.step()
                report = saver.save()
                if report.unchanged:  # that step is committed already
                    assert (steps, saver.steps > 0) == (0, True)
                    continue
                assert report.step == saver.steps == job.steps
                ids.append(report.id)
                state = gather(job)
                if dist.get_rank() == 0:
                    references.store(Path(copies) / f"{report.id}.npz", state)
    return ids


def list_ids(root: str) -> list[str]:
    return sorted(path.parent.name for path in Path(root).glob("*/manifest.json"))


def compare(root: str, copies: str, spec: dict[str, Any], plan: Plan) -> list[str]:
    """Restore every checkpoint into a model full of noise; return all differences."""
    job = Job.build(ModelSpec.from_json(spec), plan, seed=7)
    problems = []
    with checkpointer(root, job, asdict(Segment(()))) as saver:
        for name in list_ids(root):
            scramble(job)
            report = saver.restore(name)
            assert report is not None
            assert report.id == name
            state = gather(job)
            if dist.get_rank() == 0:
                wanted = references.load(Path(copies) / f"{name}.npz")
                bits = references.narrowest_bits(Path(root), name)
                problems += [
                    f"{name}: {problem}" for problem in references.differences(state, wanted, bits)
                ]
                if saver.steps != report.step or job.steps != report.step:
                    problems.append(f"{name}: at step {job.steps}, not {report.step}")
    return problems


@st.composite
def scenarios(draw: st.DrawFn) -> dict[str, Any]:
    segments = draw(
        st.lists(
            st.builds(
                Segment,
                intervals=st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple),
                policy=st.sampled_from(sorted(POLICIES)),
                bits=st.sampled_from([None, None, 8, 4, 2]),
            ),
            min_size=1,
            max_size=3,
        )
    )
    return {
        "model": draw(st.integers(0, 10**6)),
        "plans": draw(st.integers(0, 10**6)),
        "world_size": draw(st.sampled_from([2, 2, 1])),
        "segments": [asdict(segment) for segment in segments],
    }


def check_scenario(workers: Workers, scenario: dict[str, Any]) -> None:
    spec, plans = random_spec(scenario["model"]), scenario["plans"]
    world_size = scenario["world_size"]
    saved_plan = random_plan(spec, world_size, plans)
    with tempfile.TemporaryDirectory() as folder:
        root, copies = str(Path(folder) / "root"), str(Path(folder) / "copies")
        Path(copies).mkdir()
        where: dict[str, Any] = {"root": root, "copies": copies, "spec": spec.to_json()}
        workers(world_size).run(train, **where, plan=saved_plan, segments=scenario["segments"])
        for ranks, plan in (
            (world_size, saved_plan),
            (world_size, random_plan(spec, world_size, plans + 1)),
            (3 - world_size, random_plan(spec, 3 - world_size, plans + 2)),
        ):
            problems = workers(ranks).run(compare, **where, plan=plan)[0]
            assert not problems, f"{world_size} to {ranks} ranks, {saved_plan} to {plan}"


quick = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=examples(10, quick=3),
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@quick
@given(scenario=scenarios())
def test_any_checkpoint_restores(workers: Workers, scenario: dict[str, Any]) -> None:
    note(str(scenario))
    check_scenario(workers, scenario)


def test_tables_that_fbgemm_trains_wrong(workers: Workers) -> None:
    """Lose no row where FBGEMM's CPU kernel trains others than were looked up: behind a table
    without rows on a rank, of another number of columns.
    """
    segment = Segment((2, 3), bits=4)
    spec, plans = random_spec(1629), 54829
    assert [(t.rows, t.dim) for t in spec.collections[0].tables] == [(1, 8), (40, 20), (2, 4)]
    assert set(random_plan(spec, 2, plans).values()) >= {"row_wise"}
    segments = [asdict(segment)]
    scenario = {"model": 1629, "plans": plans, "world_size": 2, "segments": segments}
    check_scenario(workers, scenario)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(quick, max_examples=examples(150))
@given(scenario=scenarios())
def test_any_checkpoint_restores_long(workers: Workers, scenario: dict[str, Any]) -> None:
    note(str(scenario))
    check_scenario(workers, scenario)


@pytest.mark.slow  # tests/campaign has kills that are always run
@pytest.mark.parametrize(("world_size", "other", "bits"), [(2, 1, None), (1, 2, None), (2, 1, 4)])
def test_third_differential_after_a_kill(
    workers: Workers, tmp_path: Path, world_size: int, other: int, bits: int | None
) -> None:
    spec = random_spec(11)
    root, copies = tmp_path / "root", tmp_path / "copies"
    copies.mkdir()
    where: dict[str, Any] = {"root": str(root), "copies": str(copies), "spec": spec.to_json()}
    plan = uniform_plan(spec, "row_wise", world_size)
    before = Segment((2, 2, 2), bits=bits)  # a full checkpoint and two differential ones
    workers(world_size).run(train, **where, plan=plan, segments=[asdict(before)])
    workers(world_size).stop()  # SIGKILL
    after = Segment((1,), bits=bits)
    (third,) = workers(world_size).run(train, **where, plan=plan, segments=[asdict(after)])[0]
    baseline, *differentials = list_ids(str(root))
    assert len(differentials) == 3
    assert differentials[-1] == third
    assert references.narrowest_bits(root, third) == bits
    assert workers(world_size).run(parents, root=str(root))[0] == [None] + [baseline] * 3
    for ranks in (world_size, other):
        for sharding in ("row_wise", "table_wise"):
            plan = uniform_plan(spec, sharding, ranks)
            assert workers(ranks).run(compare, **where, plan=plan)[0] == []


def parents(root: str) -> list[str | None]:
    """Return every checkpoint's parent, as the chain that a restore reads says, in order."""
    from torchrec_checknrun.root.checkpoints import read_manifest
    from torchrec_checknrun.store.folder import Folder

    links = [read_manifest(Folder(root), name).parent for name in list_ids(root)]
    return [link.id if link else None for link in links]


def straight_run(spec: dict[str, Any], plan: Plan, steps: int, copy: str) -> list[str]:
    """Train without a checkpoint; return how the end differs from a copy."""
    job = Job.build(ModelSpec.from_json(spec), plan, seed=0)
    job.train(steps)
    return references.differences(gather(job), references.load(Path(copy)), None)


@pytest.mark.parametrize(
    ("sharding", "policy"),
    some_of(itertools.product(["row_wise", "table_wise"], sorted(POLICIES)), 2, 4),
)
def test_twice_resumed_is_as_never_stopped(
    workers: Workers, tmp_path: Path, sharding: str, policy: str
) -> None:
    spec = random_spec(5)
    plan = uniform_plan(spec, sharding, 2)
    root, copies = tmp_path / "root", tmp_path / "copies"
    copies.mkdir()
    segments = [asdict(Segment(i, policy)) for i in ((2, 1), (2,), (1, 2))]
    ids = workers(2).run(
        train,
        root=str(root),
        copies=str(copies),
        spec=spec.to_json(),
        plan=plan,
        segments=segments,
    )[0]
    problems = workers(2).run(
        straight_run,
        spec=spec.to_json(),
        plan=plan,
        steps=8,
        copy=str(copies / f"{ids[-1]}.npz"),
    )[0]
    assert problems == []
