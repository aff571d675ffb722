"""Drive random runs as a Hypothesis state machine: write, run and judge a script for each life."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.distributed.models import ModelSpec, Plan, random_plan, random_spec
from tests.distributed.sequence_model import Begun, Call, Life, Point, Reference, Way
from tests.distributed.sequence_parents import wrong_parents
from tests.distributed.sequences import live
from tests.distributed.worker_pool import CaseFailed, WorkerPool

Workers = Callable[[int], WorkerPool]
Answers = list[dict[str, Any]]

POLICIES = ["one_shot", "consecutive", "intermittent", "full"]
WIDTHS = [None, 8, 4, 2]
LINKS = ["delta", "lc"]
LIVES = st.builds(
    Life,
    world_size=st.sampled_from([2, 2, 1]),
    plan=st.integers(0, 99),
    policy=st.sampled_from(["consecutive", *POLICIES]),
    bits=st.sampled_from([None, *WIDTHS]),
    staging=st.sampled_from(["copy_on_write", "copy_on_write", "auto", "copy", "encode"]),
    in_parts=st.sampled_from([False, False, True]),
    when_busy=st.sampled_from(["skip", "wait"]),
    max_failures=st.sampled_from([0, 0, 1, 2]),
    at_end=st.booleans(),
    links=st.sampled_from(["", "", "", "delta", "lc"]),
    log_state=st.booleans(),
    lc_bits=st.sampled_from([2, 3, 4]),
    as_before=st.sampled_from([True, True, False]),
)
POINTS = [*Point]
WAYS = st.builds(
    Way,
    hold=st.sampled_from([None, Point.FILE, *POINTS[2:]]),
    hold_rank=st.integers(0, 1),
    fault=st.sampled_from([*[None] * 7, *POINTS]),
    fault_rank=st.sampled_from([None, 0, 1]),
)
FREE = Way()
STEPS = st.integers(1, 3)
CHOICES = st.integers(0, 99)
CASE_SECONDS = 240.0
OF_LINKS = {
    *("link", "link: delta", "link: logdelta", "link: lc", "evict"),
    *(f"lc_bits: {bits}" for bits in (2, 3, 4)),
}
ALPHABET = {
    *OF_LINKS,
    *("train", "save", "save in the background", "let go", "wait", "at the end"),
    *(f"fail: {point.name}" for point in Point),
    *("raised", "only logged", "skipped", "waited for", "in parts"),
    *("background: thread", "staging: auto", "staging: copy", "staging: encode"),
    *("staging: copy_on_write", "copied on write", "protected"),
    *("restore the newest", "restore an older one", "end: close", "end: abandon"),
    *("more ranks", "fewer ranks", "width rises", "width falls", "differential", "full"),
    *(f"policy: {policy}" for policy in POLICIES),
    *(f"bits: {bits}" for bits in WIDTHS),
}


def sharding(spec: ModelSpec, life: Life) -> Plan:
    """Draw a life's plan in which every rank holds a row of each table that is cut.

    FBGEMM's CPU kernels write beyond their memory when they train a table without rows.
    """
    plan = random_plan(spec, life.world_size, life.plan)
    for collection in spec.collections:
        for table in collection.tables:
            if table.rows < life.world_size:
                plan[f"{collection.name}.{table.name}"] = "table_wise:0"
    return plan


class Run(RuleBasedStateMachine):
    """A run, life by life: each life's script, and how its outcome is judged.

    Args:
        ends: how a life may end before its time.
        backgrounds: who may write.
        seen: counts what has happened, except for the operations that end every run.
        sabotage: what is broken, see ``SABOTAGE``.
        linked: every life stores rows as differences.
    """

    def __init__(
        self,
        workers: Workers,
        ends: Sequence[str] = ("abandon", "close"),
        backgrounds: Sequence[str] = ("thread",),
        seen: Counter[str] | None = None,
        sabotage: str | None = None,
        linked: bool = False,
    ) -> None:
        super().__init__()
        self.workers = workers
        self.ends = ends
        self.backgrounds = backgrounds
        self.seen = Counter() if seen is None else seen
        self.sabotage = sabotage
        self.linked = linked
        self.model = Reference()
        self.folder = tempfile.TemporaryDirectory(prefix="sequence-")
        self.root = Path(self.folder.name) / "root"
        self.copies = Path(self.folder.name) / "copies"
        self.copies.mkdir()
        self.life: Life | None = None
        self.broken = False

    @initialize(spec=st.integers(0, 10**6), life=LIVES, background=CHOICES)
    def begin_run(self, spec: int, life: Life, background: int) -> None:
        self.spec = random_spec(spec)
        self._born(life, background, None)

    @rule(steps=STEPS)
    def train(self, steps: int) -> None:
        calls = [self.model.step() for _ in range(steps)]
        self._do("train", {"steps": steps}, steps=calls)

    @rule(steps=STEPS, way=WAYS)
    def train_until_due(self, steps: int, way: Way) -> None:
        """Train until a checkpoint is due; if another is on its way, skip it or wait."""
        assert self.life is not None
        if steps > 1:
            self.train(steps - 1)
        if self.model.held:
            self.seen["skipped" if self.life.when_busy == "skip" else "waited for"] += 1
        self._begin("due", self.model.step(way), way)

    @rule(steps=STEPS, way=WAYS, meanwhile=st.integers(0, 2))
    def save_in_the_background(self, steps: int, way: Way, meanwhile: int) -> None:
        """Train, save in the background, and train on without a look at the outcome."""
        self.train(steps)
        call = self.model.save(way, wait=False)
        later = [self.model.step() for _ in range(meanwhile)]
        self._begin("save_in_the_background", call, way, later, meanwhile=meanwhile)

    @rule(steps=st.integers(1, 2), way=WAYS)
    def save(self, steps: int, way: Way) -> None:
        """Train a step at least, since a committed step is not saved again, and save."""
        self.train(steps)
        way = replace(way, hold=None)
        self._begin("save", self.model.save(way, wait=True), way)

    @precondition(lambda self: self.model.held)
    @rule()
    def let_go(self) -> None:
        self.model.let_go()
        self._do("let_go", {})

    @rule(which=CHOICES)
    def evict(self, which: int) -> None:
        """Overwrite rows by hand, after a save that is on its way."""
        self.model.evict()
        self._do("evict", {"which": which})

    @precondition(lambda self: self.model.pending)
    @rule()
    def wait(self) -> None:
        self._do("wait", {}, call=self.model.wait())

    @precondition(lambda self: self.model.listed)
    @rule(newest=st.booleans(), which=CHOICES)
    def restore(self, newest: bool, which: int) -> None:
        self._restore(None if newest else which)

    @rule(
        end=CHOICES,
        last=WAYS,
        life=LIVES,
        background=CHOICES,
        newest=st.sampled_from([True, True, False]),
        which=CHOICES,
    )
    def restart(
        self, end: int, last: Way, life: Life, background: int, newest: bool, which: int
    ) -> None:
        """Start new processes, after a checkpoint that may be due at the end of the old ones."""
        self._die(self.ends[end % len(self.ends)], last)
        self._born(life, background, None if newest else which)

    def teardown(self) -> None:
        """Restore every listed checkpoint on one rank and on two."""
        try:
            if self.life is not None and not self.broken:
                with self._uncounted():
                    self._end("close")
                self._live()
                with self._uncounted():
                    self._restore_everything()
        finally:
            self.folder.cleanup()

    def _restore_everything(self) -> None:
        for ranks in (1, 2):
            self._born(Life(ranks, plan=ranks), 0, None)
            for which in range(len(self.model.listed)):
                self._restore(which)
            self._die("close")

    @contextmanager
    def _uncounted(self) -> Iterator[None]:
        seen, self.seen = self.seen, Counter()
        try:
            yield
        finally:
            self.seen = seen

    def _born(self, life: Life, background: int, which: int | None) -> None:
        before = self.life
        chosen = self.backgrounds[background % len(self.backgrounds)]
        life = life if before is None else life.after(before)
        if self.linked and not life.links:
            life = replace(life, links=LINKS[life.plan % len(LINKS)])
        life = self.life = replace(life, background=chosen).fitted()
        choices = ("policy", "bits", "background", "staging", "when_busy", "lc_bits")
        self.seen.update(f"{name}: {getattr(self.life, name)}" for name in choices)
        if before is not None:
            wider = (life.bits or 32) - (before.bits or 32)
            self.seen["more ranks"] += life.world_size > before.world_size
            self.seen["fewer ranks"] += life.world_size < before.world_size
            self.seen["width rises"] += wider > 0
            self.seen["width falls"] += wider < 0
        self.model.born(self.life)
        self.ids = [begun.id for begun in self.model.begun]
        self.script: list[list[Any]] = []
        self.checks: list[Callable[[Answers], None]] = []
        self.new: list[tuple[Begun, Counter[str]]] = []
        self._restore(which)

    def _restore(self, which: int | None) -> None:
        self.model.let_go()  # before it is looked up what is listed
        listed = self.model.listed
        source = listed[which % len(listed)] if which is not None and listed else None
        found = self.model.restore(source)
        if found is not None:
            newest = found is listed[-1]
            self.seen["restore the newest" if newest else "restore an older one"] += 1
        number = source.number if source else None
        self._do("restore", {"number": number, "anything": found is not None}, restored=found)

    def _die(self, how: str, last: Way = FREE) -> None:
        self._end(how, last)
        self._live()

    def _end(self, how: str, last: Way = FREE) -> None:
        self.seen[f"end: {how}"] += 1
        if how == "close":
            way = replace(last, hold=None)
            call = self.model.close(way)
            self.seen["at the end"] += call.begun is not None
            self._begin("close", call, way)
        else:
            self.model.die(let_go=how == "kill later")
            if how == "abandon":
                self._do("abandon", {})
            else:
                self.script.append(["kill", {"let_go": how == "kill later"}])

    def _begin(
        self, name: str, call: Call, way: Way, steps: list[Call] | None = None, **more: Any
    ) -> None:
        """Note a call that may begin a checkpoint."""
        if call.begun is not None:
            self.new.append((call.begun, self.seen))
            if way.fault is not None:
                self.seen[f"fail: {way.fault.name}"] += 1
        arguments = {"way": self.model.fitted(way).to_json(), **more}
        self._do(name, arguments, call=call, steps=steps or [])

    def _do(self, name: str, arguments: dict[str, Any], **expected: Any) -> None:
        self.seen[name.replace("_", " ")] += 1
        self.script.append([name, arguments])
        where = f"{len(self.script)}. {name}({arguments})"
        seen = self.seen
        self.checks.append(lambda answers: self._check(where, expected, answers, seen))

    def _live(self) -> None:
        """Run the script, and compare its outcome with the reference's."""
        assert self.life is not None
        self.broken = True
        where = {
            "root": str(self.root),
            "copies": str(self.copies),
            "spec": self.spec.to_json(),
            "plan": sharding(self.spec, self.life),
        }
        try:
            answers = self.workers(self.life.world_size).run(
                live,
                timeout=CASE_SECONDS,
                where=where,
                life=asdict(self.life),
                ids=self.ids,
                script=self.script,
                sabotage=self.sabotage,
            )
        except CaseFailed:
            left = sorted(self.copies.glob("rank*.json"))
            if len(left) < self.life.world_size:
                raise
            answers = [json.loads(path.read_text()) for path in left]
            for path in left:
                path.unlink()
        for check, of_ranks in zip(self.checks, zip(*answers, strict=True), strict=True):
            check(list(of_ranks))
        self._check_listing()
        self.broken = False

    def _check(
        self, where: str, expected: dict[str, Any], answers: Answers, seen: Counter[str]
    ) -> None:
        call: Call | None = expected.get("call")
        if call is not None and call.begun is not None:
            call.begun.id = answers[0]["begun"] or ""
        for rank, answer in enumerate(answers):
            at = f"{where} on rank {rank}: {answer}"
            if "restored" in expected:
                self._check_restored(at, expected["restored"], answer)
            if call is not None:
                assert answer.get("begun") == (call.begun and call.begun.id), at
                assert answer["call"] == call.answers[rank].to_json(), at
                seen["raised"] += call.answers[rank].error
                for what in ("in parts", "copied on write", "protected"):
                    seen[what] += answer.get(what.replace(" ", "_"), False)
            for step, one in zip(answer.get("steps", []), expected.get("steps", []), strict=True):
                assert step == one.answers[rank].to_json(), at
                seen["raised"] += one.answers[rank].error

    def _check_restored(self, at: str, wanted: Begun | None, answer: dict[str, Any]) -> None:
        assert answer["restored"] == (wanted and wanted.id), at
        assert not answer["problems"], at
        if wanted is not None:
            assert answer["step"] == wanted.step, at
            wanted.digest = wanted.digest or answer["digest"]
            assert answer["digest"] == wanted.digest, f"{at}: another restore gave something else"

    def _check_listing(self) -> None:
        """Assert that the right checkpoints are listed, in the order of their begin."""
        assert self.life is not None
        manifests = {
            path.parent.name: json.loads(path.read_text())["manifest"]
            for path in self.root.glob("*/manifest.json")
        }
        for begun in self.model.begun:
            if begun.listed is None:
                begun.listed = begun.id in manifests
        listed = [begun.id for begun in self.model.listed]
        assert set(listed) == manifests.keys()
        assert [manifests[name]["step"] for name in listed] == [b.step for b in self.model.listed]
        sequences = [manifests[name]["sequence"] for name in listed]
        assert sequences == sorted(set(sequences))
        rowwise = self.spec.fused == "rowwise_adagrad"
        problems = wrong_parents(self.life, self.model.events, manifests, rowwise)
        assert not problems, problems
        for begun, seen in self.new:
            if begun.listed:
                manifest = manifests[begun.id]
                seen[manifest["kind"]] += 1
                if self.life.links == "lc":
                    codecs = (c for t in manifest["tables"].values() for c in t["codecs"])
                    assert {codec["bits"] for codec in codecs} <= {self.life.lc_bits}
                if manifest["kind"] == "differential" and "deltas" in manifest:
                    seen.update(["link", f"link: {self.life.scheme}"])
        self.seen["only logged"] += self.model.only_logged
