"""Read and set a fused kernel's optimizer options besides its counter and its group's rate.

The kernel's own rate differs from the group's until the fused optimizer's next ``step()`` or
``zero_grad()``, or if set by hand (``set_learning_rate``); hyperparameters can be set while
training (``update_hyper_parameters``). All of them are saved with the tables, as the rate is, since
each rank has other kernels. As with torch's parameter groups, saved values win over the values that
a new process was built with.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import torch

from torchrec_checknrun.dense.param_groups import set_option

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
                    list(of_tables),
                    name.removeprefix(_KERNEL),
                    ", ".join(
                        f"{value:g}" if type(value) is float else str(value) for value in values
                    ),
                )
        elif name.startswith(_GROUP):
            set_option(group, name.removeprefix(_GROUP), _plain(values[0]))
        elif _set(tbe, name.removeprefix(_KERNEL), _plain(values[0])):
            changed.append(f"{name} = {values[0]}")
    if changed:
        logger.warning(
            "the kernel of tables %s continues with %s, as saved: set another value after the "
            "restore if needed",
            list(of_tables),
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


def _plain(value: Any) -> Any:
    return float(value) if value in ("inf", "-inf", "nan") else value
