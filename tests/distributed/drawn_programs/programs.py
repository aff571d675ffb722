"""Draw training programs of several ranks: one rank's choices, and those of ranks and layouts."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from tests.distributed.layouts import Layout
from tests.unit.drawn_programs import programs
from tests.unit.drawn_programs.nets import ROWS
from tests.unit.drawn_programs.programs import PIPELINES, Program

OWN_BUFFERS = ("batch_norm", "late_buffer", "observed", "growing")
"""Layers with buffers of each rank's own."""
OF_TABLES = ("lambda_of_all", "lambda_of_tables")
"""Schedules of groups that are of a rank's own tables."""
LINKS = ("delta", "lc")
SPLITTABLE = ("sgd", "adagrad")
"""Optimizers whose states follow the columns: any columns can be joined and split."""


@dataclass(frozen=True)
class Ranked:
    """A program on several ranks.

    Attributes:
        program: what each rank does.
        ranks: the number of them, by life; the last number is that of all further lives.
        plan: seed of the shardings.
        moves: whether every life has shardings of its own.
        torn: where the ranks are in a turn that dies: ``together``; ``apart``, some with their
            dense optimizers stepped; or ``ahead``, some at the end of it.
        lost: whose memory is gone where a checkpoint is to be restored: ``all``, or ``one``.
        hosted: whether machines keep the newest checkpoint in memory, where there are no images.
        closed: whether lives end with ``close()``, which saves, and not by death.
        fails: whether a rank can't write its second file, in each life.
        slow: whether rows are copied slowly, while training overwrites them.
        peers: whether ranks keep copies of others, with priority saves.
        killed: whether processes die by SIGKILL, with a save that may be on its way.
        background: what writes.
        codec: bits of a value, or a method of differences; empty: exact.
        published: whether the run publishes, and a follower serves it.
        retention: checkpoints that are kept; None: all.
        budget: bytes of memory for staging; None: as much as a save takes.
    """

    program: Program = field(default_factory=Program)
    ranks: tuple[int, ...] = (2,)
    plan: int = 0
    moves: bool = False
    torn: str = "together"
    lost: str = "all"
    hosted: bool = False
    closed: bool = False
    fails: bool = False
    slow: bool = False
    peers: bool = False
    killed: bool = False
    background: str = "thread"
    codec: str = ""
    published: bool = False
    retention: int | None = None
    budget: int | None = None

    def __str__(self) -> str:
        """Name the choices that are not the plain ones."""
        plain = Ranked()
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        changed = [f"{k}={v!s}" for k, v in found.items() if v != getattr(plain, k)]
        return f"Ranked({', '.join(changed)})"

    @property
    def lives(self) -> int:
        return len(self.program.ways) + 1

    def layout(self, life: int) -> Layout:
        """Return the layout of a life."""
        ranks = self.ranks[min(life, len(self.ranks) - 1)]
        return self.drawn_layout(ranks, life if self.moves else 0)

    def drawn_layout(self, ranks: int, life: int) -> Layout:
        """Draw a sharding for each table; its columns are the same in each life where they must be,
        and whole where rows are stored as differences, whose errors are bounded for whole rows.
        """
        program, plan = self.program, self.plan
        node = 2 if ranks == 4 and plan % 2 else ranks
        whole, moving = random.Random(f"{plan}"), random.Random(f"{plan} {ranks} {life}")
        found = {}
        for table in ROWS:
            split = (moving if program.fused in SPLITTABLE else whole).random() < 0.3
            kinds = ["row_wise", f"table_wise:{moving.randrange(ranks)}"]
            if program.fused != "ema" and program.tables != "sequence":
                kinds.append(f"table_row_wise:{moving.randrange(ranks // node)}")
            if program.tables == "mapped":
                kinds = ["row_wise"]
            elif split and self.codec not in LINKS:
                kinds = [f"column_wise:{moving.randrange(ranks)},{moving.randrange(ranks)}"]
            found[table] = moving.choice(kinds)
        if program.replica:
            found["t2"] = "data_parallel"
        return Layout(found, ranks, node)

    @property
    def stays(self) -> bool:
        """Tell whether all lives have one layout."""
        return len({str(self.layout(life)) for life in range(self.lives)}) == 1

    @property
    def repeats(self) -> bool:
        """Tell whether the end is that of a run without an end, bit for bit."""
        return self.stays and not self.codec and not self.goes_on_in_part

    @property
    def keeps_its_ranks(self) -> bool:
        """Tell whether it has states that nothing merges for other ranks."""
        p = self.program
        of_ranks = p.between == "replay" or p.schedule in OF_TABLES or p.tables == "mapped"
        return p.extra in OWN_BUFFERS or of_ranks

    @property
    def goes_on_in_part(self) -> bool:
        """Tell whether lost ranks may go back alone."""
        return self.program.survive == "priority" and self.lost == "one"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Ranked:
        own = dict(document["program"])
        program = Program(**{**own, "ways": tuple(own["ways"])})
        return cls(**{**document, "program": program, "ranks": tuple(document["ranks"])})


CHOICES: dict[str, tuple[Any, ...]] = {
    "ranks": ((2,), (3,), (4,), (2, 1), (1, 2), (2, 3), (3, 2, 4), (4, 2), (2, 2, 1)),
    "plan": tuple(range(20)),
    "moves": (False, True),
    "torn": ("together", "apart", "ahead"),
    "lost": ("all", "one"),
    "hosted": (False, True),
    "closed": (False, False, True),
    "fails": (False, True),
    "slow": (False, True),
    "peers": (False, True),
    "killed": (False, False, True),
    "background": ("thread", "thread", "thread", "process"),
    "codec": ("", "", "8", "4", "delta", "lc"),
    "published": (False, True),
    "retention": (None, 1, 2),
    "budget": (None, 3000),
}


def fitting(ranked: Ranked) -> Ranked:
    """Set aside what can't meet in one program, and keep the rest."""
    r = _fitting_storage(replace(ranked, program=_fitting_program(ranked)))
    p = r.program
    if r.killed or p.loop == "accumulated":  # where gradients may wait, no end can be saved
        r = replace(r, closed=False)
    if r.closed:
        p = replace(p, torn=False)
        r = replace(r, program=p)
    if p.loop in PIPELINES or p.between == "metric" or p.dense == "lbfgs" or not p.torn:
        r = replace(r, torn="together")
    if 1 in r.ranks:  # which no other rank is apart from
        r = replace(r, torn="together")
    if r.background == "process" or p.saves in ("before_step", "two_in_a_row"):
        r = replace(r, fails=False)  # in a process of its own; or in a call that raises it
    if p.extra in OWN_BUFFERS or p.tables == "mapped":
        r = replace(r, published=False)
    if p.tables == "mapped":  # whose ids can't move to any other ranks
        r = replace(r, ranks=r.ranks[:1])
    return r


def _fitting_storage(ranked: Ranked) -> Ranked:
    r, p = ranked, ranked.program
    if p.survive != "priority":
        r = replace(r, peers=False)
    if p.survive is not None:
        r = replace(r, hosted=False)
    elif not r.hosted:
        r = replace(r, lost="all")
    if p.change == "added_group":  # a start knows where it will be
        r = replace(r, lost="all")
    if r.codec:
        p = replace(p, quantization="none", half=False)
    if r.codec in LINKS:
        p, r = replace(p, policy="consecutive", replica=False), replace(r, background="thread")
    if r.codec == "lc":  # whose oracle knows no copies
        p = replace(p, compact_after=None)
    if p.compact_after is not None:  # what of the originals stays is another test's
        r = replace(r, retention=None)
    return replace(r, program=p)


def _fitting_program(ranked: Ranked) -> Program:
    p = ranked.program
    if p.extra in ("max_norm", "extra_state"):  # each rank's own values of what all ranks share
        p = replace(p, extra="none")
    if p.extra == "tables_checkpointed":  # whose exchanges come in another order on each rank
        p = replace(p, extra="checkpointed")
    if p.tables == "processed":  # whose weights TorchRec keeps apart on each rank
        p = replace(p, tables="weighted")
    if p.loop == "retained":  # DistributedDataParallel averages gradients in the first pass only
        p = replace(p, loop="plain")
    if (ranked.moves or len(set(ranked.ranks)) > 1) and p.schedule in OF_TABLES:
        p = replace(p, schedule="lambda")
    if len(set(ranked.ranks)) > 1:  # nothing merges these
        p = replace(p, extra="none" if p.extra in OWN_BUFFERS else p.extra)
        p = replace(p, between="none" if p.between == "replay" else p.between)
    return programs.fitting(p)


def drawn(seed: int) -> Ranked:
    """Draw a program; about half of its choices are plain."""
    draw = random.Random(f"ranks {seed}")
    chosen = {
        name: values[0] if draw.random() < 0.4 else draw.choice(values)
        for name, values in CHOICES.items()
    }
    program = programs.drawn(seed)
    if draw.random() < 0.3:  # else memory that outlives a death would be a rare find
        survive = draw.choice(("images", "images", "priority"))
        ways = draw.choice((("images",), ("images", "images"), ("checkpoint", "images")))
        program = replace(program, survive=survive, ways=ways)
        chosen |= {"ranks": chosen["ranks"][:1], "moves": False}
    return fitting(Ranked(program, **chosen))


def plainer(ranked: Ranked) -> list[Ranked]:
    """Return programs with one choice made plainer each."""
    found = [
        fitting(replace(ranked, **{name: values[0]}))
        for name, values in CHOICES.items()
        if getattr(ranked, name) != values[0]
    ]
    found += [fitting(replace(ranked, program=p)) for p in programs.plainer(ranked.program)]
    return [other for other in found if other != ranked]
