"""What a fused kernel's optimizer goes by besides its counter and its parameter group's rate.

Its own rate is another one until the fused optimizer's next ``step()`` or ``zero_grad()``, or if it
was set by hand (``set_learning_rate``); and hyperparameters can be set while it trains
(``update_hyper_parameters``). All of it goes with the tables, as the rate does, since each rank has
other kernels. As with torch's parameter groups, what was saved wins over what a new process was
built with.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import torch

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
"""FBGEMM's ``OptimizerArgs`` that are numbers and may be set while training."""


def kernel_options(tbe: Any, group: Mapping[str, Any]) -> Options:
    """Return what a kernel's optimizer goes by, for all its tables alike.

    Args:
        tbe: the table-batched embedding module.
        group: of the fused optimizer.

    Returns:
        Of the kernel ``learning_rate``, ``step`` (the counter that its update goes by, which lags
        behind the stored one where that was set by hand), hyperparameters; and of the parameter
        group all but the rate that is one plain value (``initial_lr`` of a scheduler).
    """
    found: Options = {
        f"{_KERNEL}learning_rate": _number(tbe.get_learning_rate()),
        f"{_KERNEL}step": int(tbe.iter_cpu[0]),
    }
    values: dict[str, Any] = {
        name: getattr(tbe.optimizer_args, name, None) for name in _HYPERPARAMETERS
    }
    values["lower_bound"] = getattr(tbe, "gwd_lower_bound", None)
    if isinstance(counter := getattr(tbe, "max_counter", None), torch.Tensor):
        values["max_counter"] = float(counter[0])
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
    """Write what ``kernel_options`` returned, where a kernel's tables agree on it.

    Args:
        of_tables: by table; those that were data parallel have none.
    """
    names = dict.fromkeys(name for options in of_tables.values() for name in options)
    changed = []
    for name in names:
        values = [options[name] for options in of_tables.values() if name in options]
        if name == f"{_KERNEL}step" and len(values) < len(of_tables):
            continue  # another table's counter may be ahead
        if any(value != values[0] for value in values):
            if name != f"{_KERNEL}step":  # taken from the counter again
                logger.warning(
                    "tables %s are in one kernel now and were trained with %s %s: it stays as it "
                    "is; set it if that is not what you want",
                    list(of_tables),
                    name.removeprefix(_KERNEL),
                    ", ".join(
                        f"{value:g}" if type(value) is float else str(value) for value in values
                    ),
                )
        elif name.startswith(_GROUP):
            live = group.get(name.removeprefix(_GROUP))
            if isinstance(live, torch.Tensor):
                live.fill_(values[0])
            else:
                group[name.removeprefix(_GROUP)] = _plain(values[0])
        elif _set(tbe, name.removeprefix(_KERNEL), _plain(values[0])):
            changed.append(f"{name} = {values[0]}")
    if changed:
        logger.warning(
            "the kernel of tables %s goes on with %s, as saved: set it after the restore if you "
            "want another value",
            list(of_tables),
            ", ".join(changed),
        )


def _set(tbe: Any, name: str, value: Any) -> bool:
    """Set one value; returns whether a hyperparameter was another one."""
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
    """JSON has no infinity and no NaN: these are stored as text."""
    return value if math.isfinite(value) else str(float(value))


def _plain(value: Any) -> Any:
    return float(value) if value in ("inf", "-inf", "nan") else value
