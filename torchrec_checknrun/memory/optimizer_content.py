"""Encode a dense optimizer at every step, as long as nothing was replaced only once; see
``dense.steady``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchrec_checknrun.dense.param_groups import GROUPS
from torchrec_checknrun.dense.steady import SteadyOptimizer
from torchrec_checknrun.format.state_tree import leaves
from torchrec_checknrun.memory.model_content import STATES, sealed
from torchrec_checknrun.shared_memory.header import Piece, as_piece
from torchrec_checknrun.values.state import Tree, encode_state, tree_items
from torchrec_checknrun.values.tensor_bytes import RawViews, raw_bytes, shows_memory


class _Shown(RawViews):
    """The bytes of tensors, row-major: live memory, or copies where that has another order (of
    parameters whose channels come last, for instance).
    """

    def __init__(self) -> None:
        super().__init__()
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def of(self, tensor: torch.Tensor) -> memoryview:
        if shows_memory(tensor):
            return raw_bytes(tensor)
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        self._copies.append((tensor.detach(), copy))
        return raw_bytes(copy)

    def renew(self) -> None:
        """Copy the present values."""
        for live, copy in self._copies:
            copy.copy_(live)


class OptimizerContent:
    """One optimizer's part of a rank's state, encoded; its tensors are live memory.

    Args:
        name: the state object's.
        store: returns its content, in the stored form and without tables.
    """

    def __init__(self, name: str, optimizer: object, store: Callable[[], Any]) -> None:
        self._name, self._store = name, store
        self._steady = SteadyOptimizer(optimizer)
        self._tree: Tree = {}
        self._payload: list[Piece] = []
        self._pieces: list[Piece] = []
        self._shown = _Shown()

    def pieces(self) -> list[Piece] | None:
        """Return the content as a section; None if the optimizer must be asked each time.

        Raises:
            UnsupportedState, SaveFailed: it can't be stored.
        """
        if not self._steady.is_known or not (self._steady.holds() or self._look()):
            return None
        if (groups := self._steady.renewed_groups()) is not None:
            self._renew(groups)
        self._shown.renew()
        return self._pieces

    def _look(self) -> bool:
        """Ask the optimizer; return whether later looks at its objects will do."""
        if not self._steady.begin():
            return False
        content = self._store()
        self._shown = _Shown()
        encoded = encode_state({STATES: {self._name: content}}, "image", self._shown)
        self._tree, payload = encoded
        self._payload = [*map(as_piece, payload)]
        self._pieces = sealed(self._tree, self._payload)
        tensors = (tensor for _, tensor in leaves(content, (torch.Tensor,)))
        return self._steady.note(content[GROUPS], tensors)

    def _renew(self, groups: list[dict[Any, Any]]) -> None:
        """Encode the groups again, and nothing else."""
        stored = tree_items(tree_items(tree_items(self._tree)[STATES])[self._name])
        node, _ = encode_state(groups, GROUPS)  # constants have no payload
        stored[GROUPS].clear()
        stored[GROUPS].update(node)
        self._pieces = sealed(self._tree, self._payload)
