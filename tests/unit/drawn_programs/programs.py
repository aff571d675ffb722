"""Draw training programs: one value of each of many independent choices, the first being plain."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

STEPS = 8
"""The turns of a whole run."""


@dataclass(frozen=True)
class Program:
    """The choices that make a training program, and how it is saved, killed and restored.

    Attributes:
        tables: the kind of lookup.
        sharding: that of the first two tables.
        fused: the tables' optimizer; ``each`` gives every table another one.
        replica: whether the third table is data parallel, stepped by the dense optimizer.
        half: whether tables are of fp16.
        extra: a layer with a peculiarity.
        dense: the dense optimizer.
        over_all: whether the dense optimizer is given the sharded tables, too, and steps none.
        wrapper: what is around the optimizers.
        schedule: what moves rates.
        loop: a turn's order.
        between: what the loop does beside training, after a turn.
        change: what is changed while training goes on.
        by_hand: how rows are written by hand, in two of the turns.
        policy, staging, when_busy, dense_form, quantization, chunk_bytes, compact_after, every:
            the Checkpointer's options.
        saves: where ``save()`` is called beside ``step()``.
        survive: ``images`` or None, or ``priority`` for images with priority saves.
        ways: how each death but the first start is recovered from, in a row.
        kill: the turn after which the first death comes; the second comes two turns later.
        torn: whether deaths come in the middle of the turn after it.
    """

    tables: str = "bags"
    sharding: str = "table_wise"
    fused: str = "rowwise_adagrad"
    replica: bool = False
    half: bool = False
    extra: str = "none"
    dense: str = "sgd"
    over_all: bool = False
    wrapper: str = "bare"
    schedule: str = "none"
    loop: str = "plain"
    between: str = "none"
    change: str = "none"
    by_hand: str = "none"
    policy: str = "consecutive"
    staging: str = "copy_on_write"
    when_busy: str = "wait"
    dense_form: str = "whole"
    quantization: str = "none"
    chunk_bytes: int = 1000
    compact_after: int | None = None
    every: int = 2
    saves: str = "none"
    survive: str | None = None
    ways: tuple[str, ...] = ("checkpoint",)
    kill: int = 5
    torn: bool = False

    def __str__(self) -> str:
        """Name the choices that are not the plain ones."""
        plain = asdict(Program())
        found = {k: v for k, v in asdict(self).items() if v != plain[k]}
        return f"Program({', '.join(f'{k}={v!r}' for k, v in found.items())})"


CHOICES: dict[str, tuple[Any, ...]] = {
    "tables": ("bags", "sequence", "weighted", "processed", "mapped"),
    "sharding": ("table_wise", "row_wise", "column_wise"),
    "fused": ("rowwise_adagrad", "sgd", "adagrad", "each", "ema"),
    "replica": (False, True),
    "half": (False, True),
    "extra": (
        *("none", "dropout", "batch_norm", "spectral_norm", "old_spectral_norm", "weight_norm"),
        *("late_buffer", "extra_state", "observed", "channels_last", "column_major"),
        *("checkpointed", "tables_checkpointed", "tied", "max_norm", "growing", "recurrent"),
    ),
    "dense": (
        *("sgd", "adam", "adamw_fused", "amsgrad", "tensor_rate", "adagrad", "rmsprop", "nadam"),
        *("groups", "dicts", "lists", "flat", "lbfgs", "two", "lookahead", "adafactor"),
        *("radam", "asgd", "rprop"),
    ),
    "over_all": (False, True),
    "wrapper": (
        *("bare", "keyed", "warm_around", "warm_inside", "clip_inside", "clip_around_warm"),
        *("clip_around_all", "own", "averaging", "delegating", "warm_warm", "groups_saved"),
    ),
    "schedule": (
        *("none", "lambda", "lambda_of_all", "lambda_of_tables", "one_cycle", "sequential"),
        *("plateau", "by_hand", "on_kernel", "hyperparameters", "cosine_restarts"),
        *("cyclic", "averaging_rate", "chained", "multiplied"),
    ),
    "loop": (
        *("plain", "late_zero", "accumulated", "dropped", "scaled", "sam", "twice", "retained"),
        *("pipeline_base", "pipeline_sparse"),
    ),
    "between": (
        *("none", "evaluated", "evaluated_with_grad", "swapped", "swapped_after", "averaged"),
        *("noise", "metric", "replay"),
    ),
    "change": ("none", "frozen", "added_group", "reset", "reloaded", "rewound", "clamped"),
    "by_hand": ("none", "writing", "copied", "marked", "loaded"),
    "policy": ("consecutive", "one_shot", "intermittent", "full"),
    "staging": ("copy_on_write", "copy", "encode", "auto"),
    "when_busy": ("wait", "skip"),
    "dense_form": ("whole", "difference"),
    "quantization": ("none", "compressed", "small_tables"),
    "chunk_bytes": (1000, 200, 1 << 20),
    "compact_after": (None, 2),
    "every": (2, 1, 3),
    "saves": ("none", "before_step", "in_the_middle", "two_in_a_row", "unwaited"),
    "survive": (None, "images", "priority"),
    "ways": (
        ("checkpoint",),
        ("images",),
        ("checkpoint", "images"),
        ("images", "checkpoint"),
        ("images", "images"),
        ("checkpoint", "checkpoint"),
        ("older",),
        ("older", "images"),
        ("checkpoint", "older"),
    ),
    "kill": (5, 3, 4, 6),
    "torn": (False, True),
}
assert list(CHOICES) == [field.name for field in fields(Program)]

PIPELINES = ("pipeline_base", "pipeline_sparse")


WITH_EVALUATION = ("evaluated", "evaluated_with_grad", "swapped", "swapped_after")
BESIDE_RATES = ("none", "by_hand", "on_kernel", "hyperparameters", "lambda_of_tables")
"""Schedules that don't ask the dense optimizer's groups for their first rates."""
OF_STATE = ("bare", "keyed", "own", "averaging", "clip_inside", "groups_saved")
"""Wrappers that don't ask the dense optimizer's groups for their rates."""

OF_NUMBERS = ("sgd", "adamw_fused", "dicts", "lists", "flat", "lbfgs", "two", "asgd", "rprop")
"""Optimizers without an eps, which is 0 in fp16, so that rows without a gradient become NaN."""


def fitting(program: Program) -> Program:
    """Set aside what can't meet in one program, and keep the rest."""
    p = _fitting_optimizers(program)
    if p.tables == "sequence":  # TorchRec's can't be gone through twice, nor be mixed
        extra = "checkpointed" if p.extra == "tables_checkpointed" else p.extra
        p = replace(p, extra=extra, replica=False)
    if p.tables == "processed":  # TorchRec's module takes fused, sharded tables only
        p = replace(p, replica=False)
    if p.tables == "mapped":
        p = _fitting_maps(p)
    if p.survive is None:
        p = replace(p, ways=tuple("checkpoint" if w == "images" else w for w in p.ways))
    return _fitting_loops(p)


def _fitting_maps(program: Program) -> Program:
    """Set aside what managed collisions don't do: rows of a CPU can't be reset with all optimizers;
    and a lookup that is repeated, or ahead of its step, maps other ids.
    """
    p = replace(program, sharding="row_wise", fused=among(("adagrad", "sgd"), program.fused))
    extra = "checkpointed" if p.extra == "tables_checkpointed" else p.extra
    loop = "pipeline_base" if p.loop in PIPELINES else p.loop
    return replace(p, replica=False, half=False, extra=extra, loop=loop)


def _fitting_optimizers(program: Program) -> Program:
    p = program
    if p.dense in ("lbfgs", "two"):
        p = replace(p, wrapper="bare")
    if p.dense in ("lbfgs", "flat", "dicts", "lists", "lookahead", "two"):  # step all they have
        p = replace(p, over_all=False)
    if p.dense == "lbfgs" and p.extra in ("channels_last", "column_major"):  # PyTorch's flattens
        p = replace(p, extra="none")
    if p.half and p.dense not in OF_NUMBERS:
        p = replace(p, replica=False)
    if p.dense == "lbfgs":  # it calls the turn's closure, and has one group
        p = replace(p, loop="plain", schedule="none", change="none")
    if p.change == "added_group":  # TorchRec's wrappers take none, schedules ask for first rates
        p = replace(p, wrapper="bare", schedule=among(BESIDE_RATES, p.schedule))
        p = replace(p, dense="sgd" if p.dense in ("flat", "lookahead") else p.dense)
    if p.dense == "lookahead":  # its own groups have no rates
        p = replace(p, wrapper=among(OF_STATE, p.wrapper))
        p = replace(p, schedule=among(BESIDE_RATES, p.schedule))
    if p.dense == "flat" and p.change == "reset":  # what it makes at first is never made again
        p = replace(p, change="none")
    if p.dense == "adagrad" and p.change == "reset":  # made anew, of tables that it doesn't step
        p = replace(p, over_all=False)
    if p.fused == "ema" and p.schedule == "hyperparameters":
        p = replace(p, schedule="none")
    return p


def _fitting_loops(program: Program) -> Program:
    p = program
    if p.loop in PIPELINES:  # the pipeline itself calls the optimizer
        p = replace(p, torn=False, saves="none" if p.saves == "in_the_middle" else p.saves)
    if p.loop == "scaled" and p.half and p.replica:  # PyTorch unscales no gradients of fp16
        p = replace(p, replica=False)
    if p.loop in ("sam", "retained") and p.change == "frozen":  # gradients that DDP waits for
        p = replace(p, change="none")
    if p.loop == "pipeline_sparse" and (p.tables == "sequence" or "tables" in p.extra):
        p = replace(p, loop="pipeline_base")  # what torch.fx can't trace
    if p.loop == "pipeline_sparse" and p.between in WITH_EVALUATION:  # its tables wait for batches
        p = replace(p, between="averaged")
    return p


def among(allowed: tuple[str, ...], value: str) -> str:
    """Return a value if it is allowed, and the first one that is otherwise."""
    return value if value in allowed else allowed[0]


def drawn(seed: int) -> Program:
    """Draw a program; about half of its choices are plain."""
    draw = random.Random(seed)
    chosen = {
        name: values[0] if draw.random() < 0.4 else draw.choice(values)
        for name, values in CHOICES.items()
    }
    return fitting(Program(**chosen))


def plainer(program: Program) -> list[Program]:
    """Return programs with one choice made plainer each."""
    found = []
    for name, values in CHOICES.items():
        if getattr(program, name) != values[0]:
            found.append(fitting(replace(program, **{name: values[0]})))
    return [other for other in found if other != program]
