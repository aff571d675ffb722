"""Random histories of a run: a follower is always what a model built from scratch would be."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.examples import examples
from tests.unit.serve.served import Job, Net, differences, quantized, restored
from tests.unit.serve.test_faults import flip
from torchrec_checknrun import (
    Consecutive,
    Follower,
    Full,
    Intermittent,
    OneShot,
    Quantization,
    Retention,
    compact,
)
from torchrec_checknrun.root.chain import newest
from torchrec_checknrun.root.prune import prune
from torchrec_checknrun.store.folder import Folder

pytestmark = pytest.mark.usefixtures("one_rank")

CODECS = {
    "fp32": None,
    "8 bit": Quantization(bits=8, exact_below_rows=0),
    "4 bit": Quantization(bits=4, exact_below_rows=0),
    "4 bit as FBGEMM": Quantization(bits=4, method="asymmetric", exact_below_rows=0),
    "2 bit": Quantization(bits=2, exact_below_rows=0),
    "delta": Quantization(method="delta", mean_bits=3, exact_below_rows=0),
    "logdelta": Quantization(method="delta", mean_bits=3, optimizer="logdelta", exact_below_rows=0),
    "lc": Quantization(method="lc", bits=2, exact_below_rows=0),
}
POLICIES = [Consecutive(), OneShot(), Intermittent(), Full()]
ACTIONS = ["train", "train", "save", "save", "poll", "poll", "fall back", "restart", "prune",
           "compact", "damage", "uncommitted", "reshard"]  # fmt: skip


@dataclass
class History:
    """A run that saves, and followers of it."""

    root: Path
    options: dict[str, Any]
    models: list[int | None]
    seed: int = 0
    sharding: str = "row_wise"
    log: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.job = self.start()
        self.followers = {
            (bits, copies): Follower(
                self.root, quantized(Net(), bits), copies=copies, memory_bytes=3000
            )
            for bits in self.models
            for copies in (1, 2)
        }

    def start(self, checkpoint: str | None = None) -> Job:
        job = Job(self.root, self.sharding, **self.options)
        job.saver.restore(checkpoint)
        return job

    def ids(self) -> list[str]:
        chain, _ = newest(Folder(self.root))
        return [] if chain is None else [manifest.id for manifest in chain.manifests]

    def act(self, action: str, choice: int) -> None:
        self.log.append(action)
        ids = self.ids()
        if action == "train":
            self.seed += 1
            self.job.train(self.seed)
        elif action == "save":
            self.seed += 1
            self.job.train(self.seed)
            self.job.save()
        elif action == "poll":
            self.poll()
        elif action in ("fall back", "restart", "reshard"):
            self.job.saver.close()
            if action == "reshard":
                self.sharding = "column_wise" if self.sharding == "row_wise" else "row_wise"
            back = ids[choice % len(ids)] if ids and action == "fall back" else None
            self.job = self.start(back)
        elif action == "prune" and ids:
            prune(Folder(self.root), Retention(keep=1 + choice % 2))
        elif action == "compact" and ids:
            compact(self.root)
        elif action == "damage" and ids:
            self.damage(choice)
        elif action == "uncommitted":
            (self.root / f"seq-{900 + self.seed:06}_step-00000001_00000000").mkdir(
                parents=True, exist_ok=True
            )

    def damage(self, choice: int) -> None:
        """Save, damage what was saved, look, and save again from what is whole."""
        self.act("save", 0)
        file = self.root / self.ids()[-1] / "rank-00000.bin"
        flip(file, -50)
        before = {key: follower.version for key, follower in self.followers.items()}
        for key, follower in self.followers.items():
            seen = before[key]
            if seen is not None:
                version = follower.poll()
                assert version is not None
                assert version.sequence >= seen.sequence
                assert version.checkpoint_id != file.parent.name
                assert version.error is not None
        if choice % 2:
            flip(file, -50)  # a passing fault
            return
        self.job.saver.close()
        shutil.rmtree(file.parent)
        self.job = self.start()

    def poll(self) -> None:
        if not self.ids():
            assert {follower.poll() for follower in self.followers.values()} == {None}
            return
        plain = restored(self.root, sharding=self.sharding)
        wanted: dict[int | None, nn.Module] = {b: quantized(plain, b) for b in self.models}
        for (bits, copies), follower in self.followers.items():
            version = follower.poll()
            assert version is not None
            assert version.error is None, self.log
            assert differences(follower, wanted[bits]) == [], (self.log, bits, copies)


@settings(
    max_examples=examples(200, quick=4), deadline=None, suppress_health_check=list(HealthCheck)
)
@given(
    actions=st.lists(
        st.tuples(st.sampled_from(ACTIONS), st.integers(0, 5)), min_size=4, max_size=14
    ),
    codec=st.sampled_from(sorted(CODECS)),
    policy=st.sampled_from(POLICIES),
    models=st.sampled_from([[None, 8], [4, 8], [2, 4], [None, 2]]),
)
def test_any_history(
    actions: list[tuple[str, int]], codec: str, policy: Any, models: list[int | None]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        if codec in ("delta", "logdelta", "lc"):
            policy = Consecutive()  # the one that it goes with
        options = {"quantization": CODECS[codec], "policy": policy}
        history = History(Path(folder) / "run", options, models)
        try:
            for action, choice in [*actions, ("save", 0), ("poll", 0)]:
                history.act(action, choice)
        finally:
            history.job.saver.close()
