"""Whatever a run goes through, on any numbers of ranks, followers serve what it has published.

Rank 0 of each pool of workers has followers that live on from one life of the run to the next, and
miss what it does on other numbers of ranks; pytest's own process, without a process group, has
others.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.distributed.serving import FORMS, KINDS, MAPPED, Counted, Wanted, served, trained
from tests.distributed.worker_pool import WorkerPool
from tests.distributed.zoo import Zoo
from tests.examples import examples
from torchrec_checknrun import (
    Checkpointer,
    Consecutive,
    Follower,
    Intermittent,
    OneShot,
    Publish,
    compact,
)
from torchrec_checknrun.errors import StorageFailed
from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.root.chain import newest
from torchrec_checknrun.root.policy import Decision
from torchrec_checknrun.root.prune import prune
from torchrec_checknrun.root.retention import Retention
from torchrec_checknrun.run.publisher import CheapChain
from torchrec_checknrun.store.folder import Folder

Workers = Callable[[int], WorkerPool]
EVENTS = ["train", "train", "publish", "publish", "put off", "fail", "save", "restore",
          "fall back", "prune", "compact", "follow"]  # fmt: skip
POLICIES: dict[str, Any] = {
    "consecutive": Consecutive(),
    "one-shot": OneShot(),
    "intermittent": Intermittent(),
}
ROOTS = ("serve", "run")


class Followers:
    """Followers of a run's two roots, and what each has served last."""

    def __init__(self, folder: Path, kind: str) -> None:
        self._wanted = Wanted(folder / "wanted", kind)
        self._all = {
            (where, form, copies): Follower(
                folder / where, FORMS[form](served(kind)), copies=copies, memory_bytes=3000
            )
            for where, form, copies in (
                ("serve", "as it is", 2),
                ("serve", "quantized", 1),
                ("run", "quantized", 2),
                ("run", "as it is", 1),
            )
        }

    def poll(self, newest_of: dict[str, int]) -> list[str]:
        """Return what is wrong after a look; nothing, if all serve the newest of each root."""
        wrong = []
        for (where, form, copies), follower in self._all.items():
            version = follower.poll()
            sequence = None if version is None else version.sequence
            error = None if version is None else version.error
            if sequence != newest_of.get(where) or error is not None:
                wrong.append(f"{where} serves {sequence}, not {newest_of.get(where)}: {error}")
            elif sequence is not None:
                found = self._wanted.differences(follower, where, sequence, form)
                wrong += [f"{where} {sequence}, {form}, {copies} copies: {name}" for name in found]
        return wrong


_followers: dict[str, Followers] = {}
"""The followers of this worker, by the folder of a history."""


class Life:
    """One process of the run on each rank, from its start to its end."""

    def __init__(self, folder: str, kind: str, saver: Checkpointer, job: Zoo) -> None:
        self.folder = Path(folder)
        self.wanted = Wanted(self.folder / "wanted", kind)
        self.saver = saver
        self.job = job
        if folder not in _followers and dist.get_rank() == 0:
            _followers.clear()
            _followers[folder] = Followers(self.folder, kind)

    def newest(self) -> dict[str, int]:
        found = {}
        for where in ROOTS:
            chain, _ = newest(Folder(self.folder / where))
            if chain is not None:
                found[where] = chain.head.sequence
        return found

    def on_rank_0(self, act: Callable[[], object]) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            act()
        dist.barrier()

    def act(self, event: str, choice: int) -> None:
        run, serve = (Folder(self.folder / where) for where in ("run", "serve"))
        if event == "train":
            self.job.train()
            self.saver.step()
        elif event == "put off":
            self.put_off()
        elif event == "publish":
            self.publish()
        elif event == "fail":
            self.fail()
        elif event == "save":
            report = self.saver.save()
            assert report is not None
            self.wanted.keep(self.job, "run", report.sequence)
        elif event == "restore":
            self.saver.restore()
        elif event == "fall back":
            chain, _ = newest(run)
            assert chain is not None
            self.saver.restore(chain.manifests[choice % len(chain.manifests)].id)
        elif event == "prune":
            self.on_rank_0(lambda: [prune(root, Retention(1)) for root in (run, serve)])
        elif event == "compact":
            self.on_rank_0(lambda: compact(run.url))
        elif event == "follow":
            self.on_rank_0(self.follow)

    def publish(self) -> None:
        report = self.saver.publish()
        assert report is not None
        self.wanted.keep(self.job, "serve", report.sequence)

    def put_off(self) -> None:
        """Have a publication due while gradients wait: nothing is published."""
        self.job.optimizer.zero_grad()
        self.job.model(self.job.batch())[0].backward()
        assert self.saver.publish() is None
        self.job.optimizer.step()
        self.job.steps += 1
        self.saver.step()

    def fail(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            assert self.saver._publisher is not None
            patch.setattr(self.saver._publisher._writer, "before_commit", _gone)
            assert self.saver.publish() is None

    def follow(self) -> None:
        wrong = _followers[str(self.folder)].poll(self.newest())
        assert not wrong, "\n".join(wrong)


def long_chains(self: CheapChain, history: Sequence[Manifest]) -> Decision:
    """Publish a few links upon each base: those of small tables soon cost more than it."""
    return Decision.SINCE_LAST if len(history) < 6 else Decision.FULL


def _gone(*arguments: object) -> None:
    raise StorageFailed(5, "gone")


def live(
    folder: str, kind: str, seed: int, policy: str, staging: str, events: list[tuple[str, int]]
) -> None:
    job = trained(kind, seed)
    rule = Publish(f"{folder}/serve", every_seconds=1e6, bits=32, keep=1)
    state: dict[str, Any] = {"optimizer": job.optimizer, "steps": Counted(job)}
    options: dict[str, Any] = {"retention": None, "chunk_bytes": 1500, "staging": staging}
    with (
        pytest.MonkeyPatch.context() as patch,
        Checkpointer(
            f"{folder}/run",
            model=job.model,
            state=state,
            policy=POLICIES[policy],
            publish=rule,
            **options,
        ) as saver,
    ):
        patch.setattr(CheapChain, "decide", long_chains)
        life = Life(folder, kind, saver, job)
        saver.restore()
        for event, choice in events:
            life.act(event, choice)


@st.composite
def histories(draw: st.DrawFn) -> tuple[str, list[dict[str, Any]]]:
    """Draw a kind of model, and the lives of its run."""
    kind = draw(st.sampled_from(KINDS))
    ranks = draw(st.lists(st.sampled_from([1, 2]), min_size=2, max_size=4))
    if kind in MAPPED:  # TorchRec can't move an id to another rank: they may be joined only
        ranks.sort(reverse=True)
    lives = []
    for number, count in enumerate(ranks):
        events = draw(st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 5)), max_size=8))
        first = [("train", 0), ("save", 0)] if not number else []
        lives.append(
            {
                "ranks": count,
                "seed": draw(st.integers(0, 100)),
                "policy": draw(st.sampled_from(sorted(POLICIES))),
                "staging": draw(st.sampled_from(["copy_on_write", "copy", "encode"])),
                "events": [*first, *events, ("train", 0), ("publish", 0), ("follow", 0)],
            }
        )
    return kind, lives


@settings(
    max_examples=examples(200, quick=3), deadline=None, suppress_health_check=list(HealthCheck)
)
@given(history=histories())
def test_any_history(workers: Workers, history: tuple[str, list[dict[str, Any]]]) -> None:
    kind, lives = history
    with tempfile.TemporaryDirectory() as folder:
        followers = Followers(Path(folder), kind)
        for life in lives:
            ranks = life.pop("ranks")
            workers(ranks).run(live, folder=folder, kind=kind, **life)
            life["ranks"] = ranks
            heads = {w: newest(Folder(Path(folder) / w))[0] for w in ROOTS}
            found = {w: chain.head.sequence for w, chain in heads.items() if chain is not None}
            assert not dist.is_initialized()
            wrong = followers.poll(found)
            assert not wrong, "\n".join(wrong)
