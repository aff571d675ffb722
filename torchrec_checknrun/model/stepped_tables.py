"""Find the tables of a kernel that a dense optimizer steps, and data-parallel tables' memory.

Every step of every optimizer in the process needs the answer, even of optimizers without tables: so
the answer is kept until parameters or memory change.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.optim import Optimizer

from torchrec_checknrun.dense.optimizers import is_same_memory
from torchrec_checknrun.model.kernels import Kernel

_COMPARED_ROWS = 64
"""Rows with gradients that are compared, of each table that no optimizer steps."""


class Stepped(NamedTuple):
    """A table that an optimizer steps.

    Attributes:
        table: position among the kernel's tables.
        group: position of the parameter group among the optimizer's; ``load_state_dict`` may
            replace the group's dict.
        parameter: the optimizer's parameter, a view of the table's memory.
    """

    table: int
    group: int
    parameter: torch.Tensor


@dataclass(frozen=True)
class _Known:
    """The tables that an optimizer steps, with the parameters and memory that they depend on.

    Parameters are held as by the optimizer, which ends this: PyTorch swaps no tensor that has weak
    references.
    """

    optimizer: weakref.ref[Optimizer]
    address: int
    parameters: list[list[torch.Tensor]]
    stepped: tuple[Stepped, ...]
    places: list[int]

    def holds(self, optimizer: Optimizer, address: int) -> bool:
        """Return whether the kernel's memory and the optimizer's parameters are unchanged."""
        groups = optimizer.param_groups
        if self.optimizer() is not optimizer or address != self.address:
            return False
        if len(groups) != len(self.parameters):
            return False
        for group, known in zip(groups, self.parameters, strict=True):
            parameters = group["params"]
            if len(parameters) != len(known):
                return False
            if not all(map(operator.is_, parameters, known)):
                return False
        return self.places == [each.parameter.data_ptr() for each in self.stepped]


class SteppedTables:
    """A cached search for the tables of one data-parallel kernel that optimizers step."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._known: dict[int, _Known] = {}  # by id: a user's optimizer may have no hash
        self._memory: tuple[torch.Tensor, int] | None = None
        self._weights: list[torch.Tensor] = []

    def weights(self) -> list[torch.Tensor]:
        """Return the tables' weights at their present address, views of one memory."""
        base: torch.Tensor = self._kernel.module._emb_module.weights
        address = base.data_ptr()
        if self._memory is None or self._memory[0] is not base or self._memory[1] != address:
            self._memory = base, address
            self._weights = self._kernel.module.split_embedding_weights()
        return self._weights

    def of(self, optimizer: Optimizer) -> tuple[Stepped, ...]:
        """Return the tables that an optimizer steps; most optimizers step none."""
        weights = self.weights()
        assert self._memory is not None
        address = self._memory[1]
        key, all_known = id(optimizer), self._known
        known = all_known.get(key)
        if known is not None and known.holds(optimizer, address):
            return known.stepped
        stepped = tuple(
            Stepped(table, number, parameter)
            for number, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
            for table, weight in enumerate(weights)
            if is_same_memory(parameter, weight)
        )
        parameters = [list(group["params"]) for group in optimizer.param_groups]
        places = [weights[each.table].data_ptr() for each in stepped]
        held = weakref.ref(optimizer, lambda _: all_known.pop(key, None))
        all_known[key] = _Known(held, address, parameters, stepped, places)
        return stepped


class SteppedByHand:
    """A look at the tables of a data-parallel kernel that have gradients and that no optimizer
    steps: a program that writes the update itself, through ``.data``, leaves no other trace.

    Args:
        tables: the kernel's.
    """

    def __init__(self, tables: SteppedTables) -> None:
        self._tables = tables
        self._heard: set[int] = set()
        self._rows: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}
        """By table, ids and values of rows at a backward pass, and the memory's version."""

    def at_backward(self, table: int, ids: torch.Tensor) -> None:
        """Keep some rows that get a gradient, unless an optimizer steps the table."""
        if table in self._heard or table in self._rows or not ids.numel():
            return
        weight, few = self._tables.weights()[table].detach(), ids[:_COMPARED_ROWS].long()
        few = few[(few >= 0) & (few < len(weight))]  # others are for the kernel to refuse
        self._rows[table] = few, weight[few], weight._version

    def stepped(self, tables: Iterable[int]) -> None:
        """Hear that an optimizer has stepped tables, right after a look at all of them."""
        for table in tables:
            self._heard.add(table)
            self._rows.pop(table, None)
        for table, (ids, values, _) in self._rows.items():  # one counter serves all tables
            self._rows[table] = ids, values, self._tables.weights()[table]._version

    def changed(self) -> list[int]:
        """Return the tables whose rows have changed since, unseen by version counters."""
        found = []
        for table, (ids, values, version) in list(self._rows.items()):
            weight = self._tables.weights()[table].detach()
            if weight._version == version and torch.equal(_bits(weight[ids]), _bits(values)):
                continue
            del self._rows[table]
            found += [table] * (weight._version == version)
        return found

    def forget(self) -> None:
        """Accept the rows as they are."""
        self._rows.clear()


def _bits(rows: torch.Tensor) -> torch.Tensor:
    return rows.contiguous().view(torch.uint8)
