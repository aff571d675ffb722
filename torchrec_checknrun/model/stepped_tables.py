"""Find the tables of a kernel that a dense optimizer steps, and data-parallel tables' memory.

Every step of every optimizer in the process needs the answer, even of optimizers without tables: so
the answer is kept until parameters or memory change.
"""

from __future__ import annotations

import operator
import weakref
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.optim import Optimizer

from torchrec_checknrun.dense.optimizers import is_same_memory
from torchrec_checknrun.model.kernels import Kernel


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
