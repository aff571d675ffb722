"""Read and set the state of a table's optimizer besides its rows: its clock and its options.

The clock is the step counter and the learning rate. A fused optimizer keeps both in its kernel
(TorchRec puts the counter into no state dict), a dense one per parameter and per parameter group.
Adam and LAMB correct their bias by the counter, so the clock must follow a table from one kernel or
optimizer to another.

A kernel's own rate differs from the group's until the fused optimizer's next ``step()`` or
``zero_grad()``, or if set by hand (``set_learning_rate``); hyperparameters can be set while
training (``update_hyper_parameters``). All of them are saved with the tables, as the rate is, since
each rank has other kernels. As with torch's parameter groups, saved values win over the values that
a new process was built with.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType

from torchrec_checknrun.dense.optimizers import is_same_memory
from torchrec_checknrun.dense.param_groups import set_option
from torchrec_checknrun.dense.tree import state_at
from torchrec_checknrun.model.kernels import Kernel
from torchrec_checknrun.model.stepped_tables import SteppedTables
from torchrec_checknrun.ranks import listed
from torchrec_checknrun.shards import LocalShard

logger = logging.getLogger(__name__)

Options = dict[str, Any]
"""By ``kernel.<name>`` or ``group.<name>``: bool, int, finite float, str or None."""

_KERNEL, _GROUP = "kernel.", "group."
_HYPERPARAMETERS = (
    "eps",
    "beta1",
    "beta2",
    "weight_decay",
    "momentum",
    "eta",
    "max_gradient",
    "max_norm",
    # Since FBGEMM 1.9, of row-wise RMSprop with an adaptive rate.
    "ar_alpha",
    "ema_beta",
    "min_shrinkage",
)
"""Numeric fields of FBGEMM's ``OptimizerArgs`` that may be set while training."""

_CORRECTS_BIAS = frozenset(
    {
        EmbOptimType.ADAM,
        EmbOptimType.PARTIAL_ROWWISE_ADAM,
        EmbOptimType.LAMB,
        EmbOptimType.PARTIAL_ROWWISE_LAMB,
    }
)


@dataclass(frozen=True)
class OptimizerClock:
    """The state of a table's optimizer besides its rows.

    Attributes:
        step: the step counter; None for a dense optimizer without one.
        learning_rate: the parameter group's, as set by schedulers.
        options: a fused optimizer's further options, see ``kernel_options``; empty for a dense one.
    """

    step: int | None
    learning_rate: float
    options: Options = field(default_factory=dict)


Clocks = list[tuple[list[str], OptimizerClock]]
"""Clocks, each with its tables: those of a kernel share one."""


def table_clocks(kernels: Iterable[Kernel]) -> Clocks:
    """Return the clocks of the tables with a shard on this rank and a known optimizer."""
    found: Clocks = []
    for kernel in kernels:
        if kernel.data_parallel:
            for shard, state, group in _dense_groups(kernel):
                counter = None if state.get("step") is None else int(state["step"])
                found.append(([shard.table], OptimizerClock(counter, float(group["lr"]))))
        elif (tbe := kernel.module._emb_module).optimizer != EmbOptimType.NONE:
            group = kernel.module.fused_optimizer.param_groups[0]
            options = kernel_options(tbe, group)
            clock = OptimizerClock(int(tbe.iter.item()), float(group["lr"]), options)
            found.append(([shard.table for shard in kernel.shards], clock))
    return found


def by_table(clocks: Clocks) -> dict[str, OptimizerClock]:
    """Return the clock of each table."""
    return {table: clock for tables, clock in clocks for table in tables}


def set_table_progress(kernels: Iterable[Kernel], progress: Mapping[str, OptimizerClock]) -> None:
    """Set the clocks of the named tables' optimizers.

    A kernel has one counter: it is set to the highest of its tables'. A learning rate is set only
    where nothing but these tables uses it: in their kernel, if they agree, and in a dense parameter
    group that holds nothing else. Elsewhere it stays, with a warning.
    """
    held: set[int] = set()
    for kernel in kernels:
        if kernel.data_parallel:
            _set_dense(kernel, progress)
        elif kernel.module._emb_module.optimizer != EmbOptimType.NONE:
            _set_fused(kernel, progress, held)


def _set_fused(kernel: Kernel, progress: Mapping[str, OptimizerClock], held: set[int]) -> None:
    """Set one kernel's clock.

    Args:
        held: ids of the rates that other kernels have been given, where these are tensors.
    """
    tbe = kernel.module._emb_module
    tables = list(dict.fromkeys(s.table for s in kernel.shards if s.table in progress))
    steps = {step for table in tables if (step := progress[table].step) is not None}
    if steps:
        tbe.iter.fill_(max(steps))
        tbe.iter_cpu.zero_()  # the next forward pass copies iter to it
    if len(steps) > 1 and tbe.optimizer in _CORRECTS_BIAS:
        logger.warning(
            "tables %s share a kernel now but were at optimizer steps %s: its bias correction "
            "continues from the highest",
            listed(tables),
            sorted(steps),
        )
    group = kernel.module.fused_optimizer.param_groups[0]
    rates = {progress[table].learning_rate for table in tables}
    if len(rates) == 1:
        (rate,) = rates
        set_option(group, "lr", rate, held)
        held.add(id(group["lr"]))
        tbe.set_learning_rate(rate)
    elif rates:
        _warn_of_rate(tables, rates, group)
    # Last: the kernel's own rate may differ from the group's, and wins.
    set_kernel_options(tbe, group, {table: progress[table].options for table in tables})


def _set_dense(kernel: Kernel, progress: Mapping[str, OptimizerClock]) -> None:
    by_group: dict[int, tuple[dict[str, Any], list[LocalShard]]] = {}
    for shard, state, group in _dense_groups(kernel):
        if shard.table not in progress:
            continue
        by_group.setdefault(id(group), (group, []))[1].append(shard)
        step = progress[shard.table].step
        if step is None or "step" not in state:
            continue
        if isinstance(state["step"], torch.Tensor):
            state["step"].fill_(step)
        else:
            state["step"] = type(state["step"])(step)
    for group, shards in by_group.values():
        rates = {progress[shard.table].learning_rate for shard in shards}
        if rates == {float(group["lr"])}:
            continue
        weights = [shard.weight for shard in shards]
        alone = all(any(is_same_memory(p, w) for w in weights) for p in group["params"])
        if alone and len(rates) == 1:
            set_option(group, "lr", rates.pop())
        else:
            _warn_of_rate([shard.table for shard in shards], rates, group)


def _dense_groups(
    kernel: Kernel,
) -> Iterator[tuple[LocalShard, dict[str, Any], dict[str, Any]]]:
    """Yield a data-parallel kernel's tables, each with the state and group of its optimizer.

    Of several optimizers the first one counts: those inside come before their wrappers.
    """
    tables, found = SteppedTables(kernel), set()
    for optimizer in kernel.optimizers:
        for stepped in tables.of(optimizer):
            group = optimizer.param_groups[stepped.group]
            if stepped.table not in found and group.get("lr") is not None:
                found.add(stepped.table)
                state = state_at(optimizer, stepped.parameter)
                yield kernel.shards[stepped.table], state, group


def _warn_of_rate(tables: list[str], rates: set[float], group: Mapping[str, Any]) -> None:
    logger.warning(
        "tables %s were trained with learning rate %s; their present parameter group has other "
        "members, too, and keeps %g: set another rate after the restore if needed",
        listed(tables),
        ", ".join(f"{rate:g}" for rate in sorted(rates)),
        float(group["lr"]),
    )


def kernel_options(tbe: Any, group: Mapping[str, Any]) -> Options:
    """Return the options of a kernel's optimizer, which all tables of the kernel share.

    Args:
        tbe: the table-batched embedding module.
        group: the fused optimizer's parameter group.

    Returns:
        The kernel's ``learning_rate``, ``step`` (the counter that its update uses, which lags
        behind the stored one if that was set by hand) and hyperparameters; and the parameter
        group's plain values other than its rate (``initial_lr`` of a scheduler).
    """
    found: Options = {
        f"{_KERNEL}learning_rate": _number(tbe.get_learning_rate()),
        f"{_KERNEL}step": int(tbe.iter_cpu.item()),
    }
    values: dict[str, Any] = {
        name: getattr(tbe.optimizer_args, name, None) for name in _HYPERPARAMETERS
    }
    values["lower_bound"] = getattr(tbe, "gwd_lower_bound", None)
    if isinstance(counter := getattr(tbe, "max_counter", None), torch.Tensor):
        values["max_counter"] = float(counter.item())
    for name, value in values.items():
        if type(value) in (int, float):
            found[_KERNEL + name] = _number(value)
    for name, value in group.items():
        if name in ("params", "lr"):
            continue
        plain = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        if plain is None or type(plain) in (bool, int, float, str):
            found[_GROUP + name] = _number(plain) if type(plain) is float else plain
    return found


def set_kernel_options(tbe: Any, group: dict[str, Any], of_tables: Mapping[str, Options]) -> None:
    """Set the options that ``kernel_options`` returned, where a kernel's tables agree on them.

    Args:
        tbe, group: as for ``kernel_options``.
        of_tables: by table; tables that were data parallel have none.
    """
    names = dict.fromkeys(name for options in of_tables.values() for name in options)
    changed = []
    for name in names:
        values = [options[name] for options in of_tables.values() if name in options]
        if name == f"{_KERNEL}step" and len(values) < len(of_tables):
            continue  # the counter of a table without one may be ahead
        if any(value != values[0] for value in values):
            if name != f"{_KERNEL}step":  # the kernel copies that from its counter
                logger.warning(
                    "tables %s share a kernel now but were trained with %s %s: the kernel keeps "
                    "its present value; set another one after the restore if needed",
                    listed(list(of_tables)),
                    name.removeprefix(_KERNEL),
                    listed([*dict.fromkeys(map(_text, values))]),
                )
        elif name.startswith(_GROUP):
            set_option(group, name.removeprefix(_GROUP), _plain(values[0]))
        elif _set(tbe, name.removeprefix(_KERNEL), _plain(values[0])):
            changed.append(f"{name} = {values[0]}")
    if changed:
        logger.warning(
            "the kernel of tables %s continues with %s, as saved: set another value after the "
            "restore if needed",
            listed(list(of_tables)),
            ", ".join(changed),
        )


def _set(tbe: Any, name: str, value: Any) -> bool:
    """Set one option; return whether it is a hyperparameter whose value has changed."""
    if name == "learning_rate":
        tbe.set_learning_rate(value)
    elif name == "step":
        tbe.iter_cpu.fill_(value)
    elif name == "max_counter":
        if isinstance(getattr(tbe, "max_counter", None), torch.Tensor):
            tbe.max_counter.fill_(value)
    elif name == "lower_bound":
        before, tbe.gwd_lower_bound = getattr(tbe, "gwd_lower_bound", value), value
        return bool(before != value)
    elif name in _HYPERPARAMETERS:
        before = getattr(tbe.optimizer_args, name, value)
        if before != value:
            tbe.optimizer_args = tbe.optimizer_args._replace(**{name: value})
        return bool(before != value)
    return False


def _number(value: float) -> float | str:
    """Return infinity and NaN as text, since JSON has neither."""
    return value if math.isfinite(value) else str(float(value))


def _text(value: object) -> str:
    return f"{value:g}" if type(value) is float else str(value)


def _plain(value: Any) -> Any:
    return float(value) if value in ("inf", "-inf", "nan") else value
